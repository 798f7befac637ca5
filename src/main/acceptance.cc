#include "main/acceptance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

namespace perigee {
namespace {

// The value of a line that begins with `name` and {.
bool take_value(std::string_view line, std::string_view name, double& value) {
  if (!line.starts_with(name) || line.size() == name.size() || line[name.size()] != '{') return false;
  const size_t at = line.rfind(' ');
  if (at == std::string_view::npos) return false;
  value = std::strtod(std::string(line.substr(at + 1)).c_str(), nullptr);
  return true;
}

}  // namespace

Acceptance read_acceptance(std::string_view metrics) {
  constexpr std::string_view kPlace = "position=\"";
  constexpr size_t kMostPlaces = 128;
  Acceptance out;
  while (!metrics.empty()) {
    const std::string_view line = metrics.substr(0, metrics.find('\n'));
    metrics.remove_prefix(std::min(line.size() + 1, metrics.size()));
    double value = 0;
    if (take_value(line, "vllm:spec_decode_num_drafts_total", value)) out.rows += value;
    if (take_value(line, "vllm:spec_decode_num_draft_tokens_total", value)) out.drafts += value;
    const size_t place = line.find(kPlace);
    if (place == std::string_view::npos ||
        !take_value(line, "vllm:spec_decode_num_accepted_tokens_per_pos_total", value))
      continue;
    const auto index = std::strtoul(std::string(line.substr(place + kPlace.size())).c_str(), nullptr, 10);
    if (index >= kMostPlaces) continue;
    if (index >= out.accepted_at.size()) out.accepted_at.resize(index + 1);
    out.accepted_at[index] += value;
  }
  return out;
}

std::string acceptance_text(const Acceptance& before, const Acceptance& after) {
  const double rows = after.rows - before.rows;
  if (rows <= 0) return "";
  std::string places;
  double accepted = 0;
  for (size_t i = 0; i < after.accepted_at.size(); ++i) {
    const double here = after.accepted_at[i] - (i < before.accepted_at.size() ? before.accepted_at[i] : 0);
    places += fmt::format(" {:.3f}", here / rows);
    accepted += here;
  }
  return fmt::format("Drafts: {:.0f} rows verified {:.0f} tokens, accepted by place{}, mean length {:.2f}", rows,
                     after.drafts - before.drafts, places, 1 + accepted / rows);
}

}  // namespace perigee

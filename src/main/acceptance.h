// What a server's metrics say of speculation, for benches.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace perigee {

struct Acceptance {
  double rows = 0, drafts = 0;
  std::vector<double> accepted_at;  // by place

  bool operator==(const Acceptance&) const = default;
};

// From the text of /metrics, under vLLM's names; all zero without them.
Acceptance read_acceptance(std::string_view metrics);
// Of what came between. Empty where nothing was verified.
std::string acceptance_text(const Acceptance& before, const Acceptance& after);

}  // namespace perigee

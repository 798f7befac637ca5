#include "profile/step_table.h"

#include <cxxabi.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

namespace perigee {
namespace {

constexpr std::string_view kGap = "gaps";
constexpr size_t kLookAhead = 32;  // kernels that one of two launches of a step may have and the other not

// The part of an op that a launch belongs to: the use-th of that label, or the last; null: none has it.
const CostPart* find_part(const OpCost& op, const LaunchPlace& place) {
  const CostPart* last = nullptr;
  int32_t use = 0;
  for (const CostPart& part : op.parts) {
    if (!part.has_label(place.label)) continue;
    last = &part;
    if (use++ == place.use) break;
  }
  return last;
}

// Rows of one group while they are added up.
struct GroupRows {
  StepGroup group;
  std::map<std::string, size_t> index;  // of what -> parts
  std::map<std::string, std::set<std::string>> kernels;

  StepRow& row(const std::string& what) {
    const auto [found, is_new] = index.try_emplace(what, group.parts.size());
    if (is_new) group.parts.push_back({.what = what});
    return group.parts[found->second];
  }
};

class TableMaker {
 public:
  explicit TableMaker(const std::vector<OpCost>& ops) : ops_(ops) {
    for (const OpCost& op : ops) {
      GroupRows& rows = group(op.op);
      StepRow& total = rows.group.total;
      ++total.calls;
      total.bytes += op.bytes();
      total.flops += op.flops();
    }
  }

  void add(const StepPiece& piece) {
    if (piece.place.op == kOutsideModel || piece.place.op >= std::ssize(ops_)) return add_outside(piece);
    const OpCost& op = ops_[static_cast<size_t>(piece.place.op)];
    GroupRows& rows = group(op.op);
    rows.group.total.us += piece.us;
    if (piece.kernel.empty()) return;
    const CostPart* part = find_part(op, piece.place);
    const std::string what = part != nullptr ? part->what : std::string(piece.place.label);
    StepRow& row = rows.row(what);
    ++row.calls;
    row.us += piece.us;
    rows.kernels[what].insert(piece.kernel);
    // A part of several kernels is read once.
    if (part != nullptr && counted_.insert({piece.place.op, part}).second) {
      row.bytes += part->bytes;
      row.flops += part->flops;
    }
  }

  StepTable table() {
    StepTable out;
    for (GroupRows& rows : groups_) {
      for (StepRow& row : rows.group.parts)
        for (const std::string& kernel : rows.kernels[row.what])
          row.kernels += (row.kernels.empty() ? "" : " + ") + kernel;
      out.groups.push_back(std::move(rows.group));
    }
    return out;
  }

 private:
  GroupRows& group(const std::string& op) {
    const auto found =
        std::find_if(groups_.begin(), groups_.end(), [&](const GroupRows& rows) { return rows.group.op == op; });
    if (found != groups_.end()) return *found;
    groups_.push_back({.group = {.op = op}});
    return groups_.back();
  }

  void add_outside(const StepPiece& piece) {
    const bool gap = piece.kernel.empty();
    GroupRows& rows = group(std::string(!gap                        ? "outside the model"
                                        : piece.place.label.empty() ? kGap
                                                                    : piece.place.label));
    rows.group.total.us += piece.us;
    ++rows.group.total.calls;
    if (gap) return;
    StepRow& row = rows.row(piece.kernel);
    ++row.calls;
    row.us += piece.us;
  }

  const std::vector<OpCost>& ops_;
  std::vector<GroupRows> groups_;
  std::set<std::pair<int32_t, const CostPart*>> counted_;
};

std::string fixed(double value, int decimals) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

std::string line(const std::string& op, const StepRow& row, double step_us, const StepLimits& limits) {
  const double limit_us = limits.us(row.bytes, row.flops), mega = static_cast<double>(row.bytes) * 1e-6;
  const auto or_dash = [](bool known, const std::string& text) { return known ? text : std::string("-"); };
  return fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", op, row.what, row.kernels, row.calls,
                     fixed(row.us, 1), fixed(step_us > 0 ? 100 * row.us / step_us : 0, 1),
                     or_dash(row.bytes > 0, fixed(mega, 2)), or_dash(row.flops > 0, fixed(row.flops * 1e-9, 2)),
                     or_dash(row.bytes > 0 && row.us > 0, fixed(mega * 1e3 / row.us, 0)),
                     or_dash(limit_us > 0 && row.us > 0, fixed(100 * limit_us / row.us, 0)));
}

Json row_json(const StepRow& row, const StepLimits& limits) {
  Json out;
  if (!row.what.empty()) out.set("what", row.what);
  if (!row.kernels.empty()) out.set("kernels", row.kernels);
  out.set("calls", row.calls);
  out.set("us", row.us);
  out.set("bytes", row.bytes);
  out.set("flops", row.flops);
  out.set("limit_us", limits.us(row.bytes, row.flops));
  return out;
}

std::string full_name(const std::string& name) {
  if (!name.starts_with("_Z")) return name;  // "a" would be a type
  int status = 0;
  char* demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string out = status == 0 ? demangled : name;
  std::free(demangled);
  return out;
}

// Ours take a PeerView, which shows in their mangled names.
bool is_exchange(const std::string& name) {
  return name.find("8PeerView") != std::string::npos || name.starts_with("ncclDevKernel");
}

bool same_work(const DeviceActivity& a, const DeviceActivity& b) {
  return a.kind == b.kind && a.name == b.name;
}

}  // namespace

double StepLimits::us(int64_t bytes, double flops) const {
  if (bytes_per_s <= 0 || flops_per_s <= 0) return 0;
  return std::max(static_cast<double>(bytes) / bytes_per_s, flops / flops_per_s) * 1e6;
}

double StepTable::sum_us() const {
  double sum = 0;
  for (const StepGroup& group : groups) sum += group.total.us;
  return sum;
}

StepTable make_step_table(const std::vector<OpCost>& ops, const std::vector<StepPiece>& pieces) {
  TableMaker maker(ops);
  for (const StepPiece& piece : pieces) maker.add(piece);
  return maker.table();
}

std::string print_step_table(const StepTable& table, const StepLimits& limits) {
  std::string out =
      "| op | part | kernels | calls | us | % of step | MB read | GFLOP | GB/s | % of limit |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n";
  const double step_us = table.sum_us();
  StepRow sum{.what = "", .us = step_us};
  double limit_us = 0;
  for (const StepGroup& group : table.groups) {
    out += line(group.op, group.total, step_us, limits);
    for (const StepRow& row : group.parts) out += line("", row, step_us, limits);
    sum.bytes += group.total.bytes;
    sum.flops += group.total.flops;
    limit_us += limits.us(group.total.bytes, group.total.flops);
  }
  out += line("sum", sum, step_us, {});
  if (limit_us > 0)
    out += fmt::format("Every op at its limit: {} us, {} % of the sum.\n", fixed(limit_us, 0),
                       fixed(100 * limit_us / step_us, 0));
  return out;
}

Json step_table_json(const StepTable& table, const StepLimits& limits) {
  Json::Array groups;
  for (const StepGroup& group : table.groups) {
    Json out = row_json(group.total, limits);
    out.set("op", group.op);
    Json::Array parts;
    for (const StepRow& row : group.parts) parts.push_back(row_json(row, limits));
    out.set("parts", std::move(parts));
    groups.push_back(std::move(out));
  }
  return groups;
}

std::vector<std::vector<DeviceActivity>> split_steps(const std::vector<DeviceActivity>& activities) {
  std::vector<std::vector<DeviceActivity>> steps;
  std::vector<DeviceActivity> step;
  const auto is_result = [&](size_t i) {
    return i < activities.size() && activities[i].kind == DeviceActivity::Kind::kCopyOut;
  };
  for (size_t i = 0; i < activities.size(); ++i) {
    step.push_back(activities[i]);
    if (!is_result(i) || is_result(i + 1)) continue;
    steps.push_back(std::move(step));
    step.clear();
  }
  return steps;
}

std::vector<StepPiece> place_step(const std::vector<DeviceActivity>& step, int64_t begin_ns,
                                  const std::vector<DeviceActivity>& example, const std::vector<LaunchPlace>& places) {
  std::vector<StepPiece> pieces;
  size_t next = 0;
  int64_t busy_until = begin_ns;
  for (const DeviceActivity& activity : step) {
    const int64_t from = std::max(activity.begin_ns, busy_until);
    if (from > busy_until) pieces.push_back({.us = static_cast<double>(from - busy_until) * 1e-3});
    StepPiece piece;
    piece.kernel = short_kernel_name(activity.name);
    if (activity.end_ns > from) piece.us = static_cast<double>(activity.end_ns - from) * 1e-3;
    piece.exchange = is_exchange(activity.name);
    for (size_t i = next; i < std::min(next + kLookAhead, example.size()); ++i) {
      if (!same_work(activity, example[i])) continue;
      piece.place = places[i];
      next = i + 1;
      break;
    }
    pieces.push_back(std::move(piece));
    busy_until = std::max(from, activity.end_ns);
  }
  return pieces;
}

void split_waits(std::vector<std::vector<StepPiece>>& ranks) {
  std::vector<std::vector<size_t>> exchanges;  // of each rank: which of its pieces
  for (const std::vector<StepPiece>& pieces : ranks) {
    exchanges.emplace_back();
    for (size_t i = 0; i < pieces.size(); ++i)
      if (pieces[i].exchange) exchanges.back().push_back(i);
    if (exchanges.back().size() != exchanges[0].size()) return;
  }
  if (exchanges.empty() || exchanges[0].empty()) return;
  for (size_t k = 0; k < exchanges[0].size(); ++k) {
    double last_us = ranks[0][exchanges[0][k]].us;  // that the exchange took the last rank to come
    for (size_t r = 1; r < ranks.size(); ++r) last_us = std::min(last_us, ranks[r][exchanges[r][k]].us);
    for (size_t r = 0; r < ranks.size(); ++r) {
      StepPiece& piece = ranks[r][exchanges[r][k]];
      const double waited = piece.us - last_us;
      piece.us = last_us;
      ranks[r].push_back({.place = {.label = kWaiting}, .us = waited});
    }
  }
}

std::string short_kernel_name(const std::string& name) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  std::string full = full_name(name);
  for (size_t at; (at = full.find(kAnonymous)) != std::string::npos;) full.erase(at, kAnonymous.size());
  std::string shown = full.substr(0, full.find_first_of("<("));
  if (const size_t at = shown.find_last_of(": "); at != std::string::npos) shown.erase(0, at + 1);
  return shown.empty() ? name : shown;
}

}  // namespace perigee

#include "grammar/code_points.h"

#include <algorithm>

namespace perigee {

CodePoints normal(CodePoints ranges) {
  std::sort(ranges.begin(), ranges.end());
  CodePoints out;
  for (const auto& range : ranges) {
    if (!out.empty() && range.first <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, range.second);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

CodePoints complement(const CodePoints& set, uint32_t last) {
  CodePoints out;
  uint32_t next = 0;
  for (const auto& [low, high] : set) {
    if (low > next) out.emplace_back(next, low - 1);
    next = high + 1;
  }
  if (next <= last) out.emplace_back(next, last);
  return out;
}

CodePoints within(const CodePoints& set, uint32_t low, uint32_t high) {
  CodePoints out;
  for (const auto& [a, b] : set)
    if (std::max(a, low) <= std::min(b, high)) out.emplace_back(std::max(a, low), std::min(b, high));
  return out;
}

bool contains(const CodePoints& set, uint32_t code_point) {
  return std::any_of(set.begin(), set.end(),
                     [&](const auto& range) { return range.first <= code_point && code_point <= range.second; });
}

}  // namespace perigee

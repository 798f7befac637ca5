// Sets of Unicode code points.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace perigee {

constexpr uint32_t kLastCodePoint = 0x10FFFF;

// Sorted, disjoint ranges of code points, both ends included.
using CodePoints = std::vector<std::pair<uint32_t, uint32_t>>;

CodePoints normal(CodePoints ranges);  // of ranges in any order
CodePoints complement(const CodePoints& set, uint32_t last = kLastCodePoint);
CodePoints within(const CodePoints& set, uint32_t low, uint32_t high);
bool contains(const CodePoints& set, uint32_t code_point);

}  // namespace perigee

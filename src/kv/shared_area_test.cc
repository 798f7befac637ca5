#include "kv/shared_area.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace perigee {
namespace {

TEST(UnitDigest, EveryByteAndItsPlaceCount) {
  std::vector<uint8_t> unit(256);
  std::iota(unit.begin(), unit.end(), uint8_t{0});
  const uint64_t whole = unit_digest(unit);
  EXPECT_EQ(unit_digest(unit), whole);
  for (size_t i = 0; i < unit.size(); ++i) {
    unit[i] ^= 0x10;
    EXPECT_NE(unit_digest(unit), whole) << "byte " << i;
    unit[i] ^= 0x10;
  }
  for (size_t word = 1; word < unit.size() / 8; ++word) {
    std::vector<uint8_t> swapped = unit;
    std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + static_cast<std::ptrdiff_t>(word * 8));
    EXPECT_NE(unit_digest(swapped), whole) << "word " << word;
  }
}

}  // namespace
}  // namespace perigee

#include "base/inline_vector.h"

#include <gtest/gtest.h>

#include <vector>

namespace perigee {
namespace {

using Short = InlineVector<int32_t, 3>;

TEST(InlineVector, HoldsUpToItsCapacity) {
  Short values;
  EXPECT_TRUE(values.empty());
  values.push_back(5);
  values = {1, 2};
  values.push_back(3);
  EXPECT_EQ(std::vector<int32_t>(values.begin(), values.end()), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(values.back(), 3);
  values.clear();
  EXPECT_EQ(values.size(), 0u);
}

TEST(InlineVector, ComparesWhatItHolds) {
  Short cleared = {7, 8};
  cleared.clear();
  EXPECT_EQ(cleared, Short()) << "what it held before does not count";
  EXPECT_NE((Short{1, 2}), (Short{1, 3}));
  EXPECT_NE((Short{1, 2}), (Short{1, 2, 3}));
}

TEST(InlineVector, NewElementsAreZero) {
  Short values = {1, 2};
  values.resize(1);
  values.resize(3);
  EXPECT_EQ(values, (Short{1, 0, 0}));
}

TEST(InlineVectorDeathTest, MoreThanItsCapacityIsABug) {
  Short values = {1, 2, 3};
  EXPECT_DEATH(values.push_back(4), "more than 3 elements");
  EXPECT_DEATH(values.resize(4), "more than 3 elements");
}

}  // namespace
}  // namespace perigee

#include "base/count_text.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(CountText, HasDigitsInThrees) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(-999), "-999");
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
}

TEST(CountText, OneThingHasNoPlural) {
  EXPECT_EQ(count_text(0, "GPU"), "0 GPUs");
  EXPECT_EQ(count_text(1, "GPU"), "1 GPU");
  EXPECT_EQ(count_text(70272, "token"), "70,272 tokens");
}

}  // namespace
}  // namespace perigee

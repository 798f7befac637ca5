#include "base/memory_text.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(MemoryText, HasOneDecimal) {
  EXPECT_EQ(memory_text(576 << 10), "0.6 MiB");
  EXPECT_EQ(memory_text(int64_t{1023} << 20), "1023.0 MiB");
  EXPECT_EQ(memory_text(int64_t{1} << 30), "1.0 GiB");
  EXPECT_EQ(memory_text(int64_t{139'801} << 20), "136.5 GiB");
}

}  // namespace
}  // namespace perigee

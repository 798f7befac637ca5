#include "control/cache_size.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(CacheSize, OfOneIndex) {
  for (const Dealing dealing : {Dealing::kFewest, Dealing::kInTurn}) {
    const CacheSize size{.pages = 20, .state_pages = 2, .dcp_size = 1, .dealing = dealing};
    EXPECT_EQ(size.max_tokens(), 18 * kBlockTokens);
    EXPECT_EQ(size.pages_of(1), 3);
    EXPECT_EQ(size.pages_of(kBlockTokens + 1), 4);
    EXPECT_DOUBLE_EQ(size.sequences_of(2 * kBlockTokens), 5);
  }
}

TEST(CacheSize, OfSeveralIndices) {
  CacheSize size{.pages = 20, .state_pages = 2, .dcp_size = 4};
  EXPECT_EQ(size.max_tokens(), 4 * 18 * kBlockTokens);
  EXPECT_EQ(size.pages_of(5 * kBlockTokens), 4) << "two blocks where there are most of them";
  EXPECT_DOUBLE_EQ(size.sequences_of(5 * kBlockTokens), 80.0 / 13) << "5 blocks and 8 pages of states";
  size.dealing = Dealing::kInTurn;
  EXPECT_EQ(size.max_tokens(), 4 * 18 * kBlockTokens);
  EXPECT_DOUBLE_EQ(size.sequences_of(5 * kBlockTokens), 5) << "index 0 is full first";
}

TEST(CacheSize, BlocksInTurnAddUp) {
  for (int32_t dcp_size = 1; dcp_size <= kMaxDcpSize; ++dcp_size)
    for (int32_t num_blocks = 0; num_blocks < 50; ++num_blocks) {
      int32_t sum = 0;
      for (int32_t index = 0; index < dcp_size; ++index) sum += num_dealt_in_turn(num_blocks, index, dcp_size);
      EXPECT_EQ(sum, num_blocks) << "dcp size " << dcp_size;
    }
  EXPECT_EQ(num_dealt_in_turn(5, 0, 4), 2);
  EXPECT_EQ(num_dealt_in_turn(5, 1, 4), 1);
  EXPECT_EQ(num_dealt_in_turn(0, 3, 4), 0);
}

}  // namespace
}  // namespace perigee

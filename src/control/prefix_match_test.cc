#include <gtest/gtest.h>

#include <numeric>

#include "control/admission.h"

namespace perigee {
namespace {

class PrefixMatchTest : public testing::Test {
 protected:
  PrefixMatchTest() : index_(16, 1, 128), match_(index_) {
    std::vector<int32_t> tokens(320);
    std::iota(tokens.begin(), tokens.end(), 0);
    sequence_.request.sequence = SequenceId(1);
    sequence_.input = std::make_shared<const std::vector<int32_t>>(tokens);
  }
  // Enters block `block` of the sequence, after the block in `parent`'s page.
  PrefixNode publish(int32_t block, const PrefixNode& parent, int32_t page) {
    std::array<int32_t, kBlockTokens> scratch;
    return *index_.publish(parent, sequence_.block_tokens(block, scratch), sequence_.request.cache_salt, PlaceId(page));
  }
  // The match's pages after an update, and how many blocks that hashed.
  std::pair<std::vector<int32_t>, int64_t> update(int32_t max_blocks = 5) {
    const int64_t before = index_.num_hashed();
    match_.update(sequence_, max_blocks);
    std::vector<int32_t> pages;
    for (const PrefixNode& block : match_.blocks()) pages.push_back(block.page.value);
    return {pages, index_.num_hashed() - before};
  }

  PrefixIndex index_;
  PrefixMatch match_;
  Sequence sequence_;
};

using Found = std::pair<std::vector<int32_t>, int64_t>;

TEST_F(PrefixMatchTest, GoesOnWhereItEnded) {
  EXPECT_EQ(update(), (Found{{}, 1}));
  EXPECT_EQ(update(), (Found{{}, 0})) << "nothing has changed";
  const PrefixNode first = publish(0, index_.root(""), 3);
  EXPECT_EQ(update(), (Found{{3}, 2})) << "the block and the one after it";
  const PrefixNode second = publish(1, first, 4);
  publish(2, second, 5);
  EXPECT_EQ(update(), (Found{{3, 4, 5}, 3}));
  EXPECT_EQ(update(), (Found{{3, 4, 5}, 0}));
}

TEST_F(PrefixMatchTest, EndsAtTheLimit) {
  const PrefixNode first = publish(0, index_.root(""), 3);
  publish(1, first, 4);
  EXPECT_EQ(update(1), (Found{{3}, 1}));
  EXPECT_EQ(update(0), (Found{{}, 0}));
  EXPECT_EQ(update(2), (Found{{3, 4}, 2}));
}

TEST_F(PrefixMatchTest, IsCutWhereABlockWentAndGrowsAgain) {
  const PrefixNode first = publish(0, index_.root(""), 3);
  const PrefixNode second = publish(1, first, 4);
  publish(2, second, 5);
  EXPECT_EQ(update().first, (std::vector<int32_t>{3, 4, 5}));
  index_.erase(PlaceId(4));
  EXPECT_EQ(update(), (Found{{3}, 0})) << "page 5 is still published, and cannot be reached";
  publish(1, first, 7);
  EXPECT_EQ(update().first, (std::vector<int32_t>{3, 7}));
  index_.erase(PlaceId(7));
  publish(1, first, 7);
  EXPECT_EQ(update().first, (std::vector<int32_t>{3, 7})) << "another block in the same page";
}

TEST_F(PrefixMatchTest, StartsAnewForAnotherSequenceInputOrSalt) {
  const PrefixNode first = publish(0, index_.root(""), 3);
  publish(1, first, 4);
  EXPECT_EQ(update().first.size(), 2u);
  sequence_.input = std::make_shared<const std::vector<int32_t>>(320, 9);  // as after a preemption
  EXPECT_EQ(update(), (Found{{}, 1}));
  sequence_.input = std::make_shared<const std::vector<int32_t>>(*sequence_.input);
  sequence_.request.sequence = SequenceId(2);
  sequence_.request.cache_salt = "other";
  publish(0, index_.root("other"), 8);
  EXPECT_EQ(update().first, (std::vector<int32_t>{8}));
  EXPECT_EQ(match_.root().hash, index_.root("other").hash);
}

}  // namespace
}  // namespace perigee

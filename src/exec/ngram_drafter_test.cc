#include "exec/ngram_drafter.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

using Ids = std::vector<int32_t>;

Ids draft(const Ids& tokens, NgramMatch match, int32_t num_drafts = 3) {
  const DraftIds drafts = draft_from(tokens, match, num_drafts);
  return {drafts.begin(), drafts.end()};
}

TEST(NgramDrafter, DraftsWhatFollowedTheSameTokens) {
  EXPECT_EQ(draft({1, 2, 3, 4, 5, 6, 1, 2}, {2, 2}), (Ids{3, 4, 5}));
  EXPECT_EQ(draft({1, 2, 3, 4, 5, 6, 1, 2}, {2, 2}, 1), (Ids{3}));
  EXPECT_EQ(draft({1, 2, 3, 4, 5, 6, 1, 2}, {3, 3}), Ids()) << "too short a match";
  EXPECT_EQ(draft({1, 2, 3, 4}, {1, 4}), Ids());
  EXPECT_EQ(draft({1}, {1, 4}), Ids());
  EXPECT_EQ(draft({}, {1, 4}), Ids());
}

TEST(NgramDrafter, TheLongestMatchCountsAndThenTheNewest) {
  EXPECT_EQ(draft({9, 1, 2, 7, 5, 1, 2, 8, 5, 6, 9, 1, 2}, {1, 3}, 1), (Ids{7}));
  EXPECT_EQ(draft({9, 1, 2, 7, 5, 1, 2, 8, 5, 6, 9, 1, 2}, {1, 2}, 1), (Ids{8}));
  EXPECT_EQ(draft({9, 1, 2, 7, 5, 1, 2, 8, 5, 6, 9, 1, 2}, {3, 9}, 1), (Ids{7}));
}

TEST(NgramDrafter, AShortPeriodRepeats) {
  EXPECT_EQ(draft({4, 4}, {1, 1}, 5), (Ids{4, 4, 4, 4, 4}));
  EXPECT_EQ(draft({1, 2, 3, 1, 2, 3}, {2, 4}, 5), (Ids{1, 2, 3, 1, 2}));
}

TEST(NgramDrafter, KeepsSequencesApart) {
  NgramDrafter drafter({.least = 1, .most = 2}, 2, 2);
  SequenceStart start{.slot = SlotId(0), .sequence = SequenceId(1)};
  start.tokens = std::make_shared<const Ids>(Ids{1, 2, 3});
  drafter.start(start);
  start.slot = SlotId(1);
  start.tokens = std::make_shared<const Ids>(Ids{1, 5, 6});
  drafter.start(start);
  EXPECT_EQ(drafter.next(SlotId(0), {9, 1}), (DraftIds{2, 3}));
  EXPECT_EQ(drafter.next(SlotId(1), {1}), (DraftIds{5, 6}));
  start.slot = SlotId(0);
  drafter.start(start);
  EXPECT_EQ(drafter.next(SlotId(0), {9}), DraftIds()) << "the sequence before had one";
}

}  // namespace
}  // namespace perigee

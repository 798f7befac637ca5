#include "exec/slots.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr SlotId kSlot{0};

SequenceStart start_of(std::vector<int32_t> tokens, int32_t num_prompt, float presence_penalty) {
  SequenceStart start;
  start.slot = kSlot;
  start.sequence = SequenceId(1);
  start.tokens = std::make_shared<const std::vector<int32_t>>(std::move(tokens));
  start.num_prompt_tokens = num_prompt;
  SamplingParams sampling;
  sampling.presence_penalty = presence_penalty;
  start.sampling = std::make_shared<const SamplingParams>(sampling);
  return start;
}

bool seen(const Slot& slot, int32_t id) {
  return (slot.seen[static_cast<size_t>(id / 8)] >> (id % 8) & 1) != 0;
}

TEST(Slots, SampledIdsAreOutputsAndPromptIdsAreNot) {
  Slots slots(1, 100, 4);
  slots.start(start_of({5, 6, 7}, 3, 0.5f));
  const Slot& slot = slots[kSlot];
  EXPECT_EQ(slot.num_outputs, 0);
  slots.accept(kSlot, 9);
  slots.accept(kSlot, 9);
  slots.accept(kSlot, 6);
  EXPECT_EQ(slot.num_outputs, 3);
  EXPECT_EQ(slot.newest_id, 6);
  EXPECT_EQ(slot.output_counts[9], 2);
  EXPECT_EQ(slot.output_counts[6], 1);
  EXPECT_EQ(slot.output_counts[5], 0);
  for (const int32_t id : {5, 6, 7, 9}) EXPECT_TRUE(seen(slot, id)) << id;
  for (const int32_t id : {0, 4, 8, 99}) EXPECT_FALSE(seen(slot, id)) << id;
}

// A sequence that was preempted starts with its former outputs, which stay outputs.
TEST(Slots, FormerOutputsStayOutputs) {
  Slots slots(1, 100, 4);
  slots.start(start_of({5, 6, 7, 20, 21, 20}, 3, 0.5f));
  const Slot& slot = slots[kSlot];
  EXPECT_EQ(slot.num_outputs, 3);
  EXPECT_EQ(slot.output_counts[7], 0) << "the prompt's last";
  EXPECT_EQ(slot.output_counts[20], 2);
  EXPECT_EQ(slot.output_counts[21], 1);
  for (const int32_t id : {5, 6, 7, 20, 21}) EXPECT_TRUE(seen(slot, id)) << id;
}

TEST(Slots, CountsStopAtTheirLargestValue) {
  Slots slots(1, 100, 4);
  slots.start(start_of({5}, 1, 0.5f));
  for (int i = 0; i < UINT16_MAX + 5; ++i) slots.accept(kSlot, 9);
  EXPECT_EQ(slots[kSlot].output_counts[9], UINT16_MAX);
}

// Nothing of one sequence reaches the next one in its slot.
TEST(Slots, AStartForgetsTheSequenceBefore) {
  Slots slots(1, 100, 4);
  SequenceStart first = start_of({5, 6, 7}, 3, 0.5f);
  first.state_pages = {{PageId(40)}, {PageId(41)}};
  slots.start(first);
  slots.append({.slot = kSlot, .block_index = 0, .place = {PageId(3)}});
  slots.accept(kSlot, 9);
  slots.advance(kSlot, 3, true);

  SequenceStart plain = start_of({8}, 1, 0);
  plain.state_pages = {{PageId(50)}, {PageId(51)}};
  slots.start(plain);
  const Slot& slot = slots[kSlot];
  EXPECT_EQ(slot.state_pages, (std::vector<int32_t>{50, 51}));
  EXPECT_TRUE(slot.pages.empty());
  EXPECT_EQ(slot.length, 0);
  EXPECT_EQ(slot.committed, 0);
  EXPECT_EQ(slot.num_outputs, 0);
  EXPECT_EQ(slot.newest_id, 8) << "a decode row may run it";
  EXPECT_TRUE(slot.seen.empty() && slot.output_counts.empty()) << "without penalties nothing is counted";
  slots.accept(kSlot, 9);

  slots.start(start_of({8}, 1, 0.5f));
  EXPECT_EQ(slot.output_counts[9], 0);
  EXPECT_FALSE(seen(slot, 9));
  EXPECT_FALSE(seen(slot, 5));
}

TEST(Slots, AChunkCommitsItsTokensADecodeRowWaits) {
  Slots slots(1, 100, 4);
  SequenceStart start = start_of(std::vector<int32_t>(100, 5), 100, 0);
  start.num_cached_tokens = 64;
  slots.start(start);
  const Slot& slot = slots[kSlot];
  EXPECT_EQ(slot.length, 64);
  EXPECT_EQ(slot.committed, 64) << "a hit's state has seen the hit's tokens";
  slots.advance(kSlot, 36, true);
  EXPECT_EQ(slot.length, 100);
  EXPECT_EQ(slot.committed, 100);
  slots.advance(kSlot, 1, false);
  EXPECT_EQ(slot.length, 101);
  EXPECT_EQ(slot.committed, 100);
  slots.advance(kSlot, 1, false);
  EXPECT_EQ(slot.committed, 101);
}

// Only the rank that a slot is dealt to has tables for it.
TEST(Slots, PenaltiesAreCountedByTheRankOfTheSlot) {
  for (const int64_t rank : {0, 1, 2}) {
    Slots slots(6, 100, 4, {.rank = rank, .size = 3});
    for (int32_t i = 0; i < 6; ++i) {
      SequenceStart start = start_of({5, 6}, 1, 0.5f);
      start.slot = SlotId(i);
      slots.start(start);
      slots.accept(start.slot, 9);
      const Slot& slot = slots[start.slot];
      EXPECT_EQ(slot.newest_id, 9);
      EXPECT_EQ(slot.num_outputs, 2);
      EXPECT_EQ(slot.output_counts.size(), i % 3 == rank ? 100u : 0u);
      EXPECT_EQ(slot.seen.size(), i % 3 == rank ? 13u : 0u);
    }
  }
}

// A rank has the pages of its own dcp index, and knows where every block is.
TEST(Slots, BlocksAndStatesOfADcpGroup) {
  Slots slots(1, 0, 4, {}, {.index = 1, .size = 3});
  SequenceStart start = start_of({5}, 1, 0);
  for (const int32_t index : {0, 1, 2})
    for (const int32_t page : {7, 8}) start.state_pages.push_back({PageId(10 * index + page), index});
  slots.start(start);
  const Slot& slot = slots[kSlot];
  EXPECT_EQ(slot.state_pages, (std::vector<int32_t>{17, 18}));
  int32_t block = 0;
  for (const int32_t owner : {2, 1, 1, 0}) slots.append({kSlot, block++, {PageId(40 + owner), owner}});
  EXPECT_EQ(slot.num_blocks, 4);
  EXPECT_EQ(slot.pages, (std::vector<int32_t>{41, 41}));
  EXPECT_EQ(slot.blocks_here, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(slot.block_owners, (std::vector<uint8_t>{2, 1, 1, 0}));
  EXPECT_TRUE(slot.draft_blocks.empty());
  slots.start(start);
  EXPECT_EQ(slot.num_blocks + std::ssize(slot.pages) + std::ssize(slot.blocks_here) + std::ssize(slot.block_owners), 0);
}

// A draft's own cache has all blocks on every rank, each at its page's place of as many as the group has ranks.
TEST(Slots, BlocksOfADraftsCache) {
  Slots slots(1, 0, 4, {}, {.index = 1, .size = 3, .keeps_all = true});
  slots.start(start_of({5}, 1, 0));
  int32_t block = 0;
  for (const int32_t owner : {2, 1, 0}) slots.append({kSlot, block++, {PageId(40 + owner), owner}});
  EXPECT_EQ(slots[kSlot].draft_blocks, (std::vector<int32_t>{3 * 42 + 2, 3 * 41 + 1, 3 * 40}));
  slots.start(start_of({5}, 1, 0));
  EXPECT_TRUE(slots[kSlot].draft_blocks.empty());
}

}  // namespace
}  // namespace perigee

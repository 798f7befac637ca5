#include "exec/batch_builder.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

// Says which form it is asked for; computes nothing.
class StillModel : public Model {
 public:
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat) const override { return {}; }
  ModelOutput forward(const Batch&, Ops&, const PagePool&) const override { return {}; }
  MlaForm choose_form(TokenKind kind, int64_t, int64_t) const override {
    return kind == TokenKind::kPrompt ? MlaForm::kExpanded : MlaForm::kAbsorbed;
  }

 private:
  ModelInfo info_;
};

SequenceStart start_of(SlotId slot, int32_t num_prompt, int32_t num_tokens, int32_t num_cached) {
  SequenceStart start;
  start.slot = slot;
  start.sequence = SequenceId(slot.value + 100);
  start.tokens = std::make_shared<std::vector<int32_t>>(num_tokens, 5);
  start.num_prompt_tokens = num_prompt;
  start.num_cached_tokens = num_cached;
  start.sampling = std::make_shared<SamplingParams>();
  start.state_pages = {{PageId(10 + slot.value)}, {PageId(20 + slot.value)}};
  return start;
}

using Checkpoints = std::vector<std::pair<int32_t, std::vector<int32_t>>>;  // position and two pages

Checkpoints checkpoints_of(const Batch& batch, size_t sequence) {
  Checkpoints out;
  for (const StateCheckpoint& checkpoint : batch.sequences[sequence].checkpoints)
    out.push_back({checkpoint.position, {checkpoint.pages[0], checkpoint.pages[1]}});
  return out;
}

CheckpointWrite checkpoint(int32_t slot, int32_t boundary, std::pair<int32_t, int32_t> pages) {
  return {SlotId(slot), boundary - 1, boundary, {{PageId(pages.first)}, {PageId(pages.second)}}};
}

class BuilderTest : public testing::Test {
 protected:
  BuilderTest() {
    for (const int32_t slot : {0, 1}) {
      slots_.start(start_of(SlotId(slot), 100, 100, 64 * slot));
      for (int32_t block = 0; block < 4; ++block)
        slots_.append({.slot = SlotId(slot), .block_index = block, .place = {PageId(30 + 4 * slot + block)}});
    }
  }

  // Adds a row of the slot at its length; a chunk when it has tokens of its own.
  void add_row(StepPlan& plan, int32_t slot, int32_t num_tokens, bool decode) const {
    PlanRow row;
    row.slot = SlotId(slot);
    row.sequence = SequenceId(slot + 100);
    row.position = PositionRange::at(slots_[SlotId(slot)].length);
    const auto offset = static_cast<int32_t>(plan.tokens.size());
    row.work = Decode();
    if (!decode) row.work = Prefill{.tokens_offset = offset, .num_tokens = num_tokens, .sample = true};
    if (!decode) plan.tokens.insert(plan.tokens.end(), static_cast<size_t>(num_tokens), 5);
    plan.rows.push_back(row);
  }
  Batch build(const StepPlan& plan, bool deterministic = false) {
    builder_ = std::make_unique<BatchBuilder>(model_, deterministic);
    return builder_->build(plan, slots_);
  }
  void advance(const StepPlan& plan, const Batch& batch) {
    for (size_t i = 0; i < plan.rows.size(); ++i)
      slots_.advance(plan.rows[i].slot, plan.rows[i].num_tokens(), batch.sequences[i].commit_all);
  }

  StillModel model_;
  Slots slots_{4, 1000, 16};
  std::unique_ptr<BatchBuilder> builder_;
};

TEST_F(BuilderTest, ChunksCommitAndDecodeRowsWait) {
  StepPlan chunk;
  add_row(chunk, 0, 100, false);
  const Batch first = build(chunk);
  const SequenceRows& rows = first.sequences[0];
  EXPECT_EQ(rows.committed, 0);
  EXPECT_TRUE(rows.commit_all);
  EXPECT_EQ(rows.slot, 0);
  EXPECT_EQ(rows.state_pages[0], 10);
  EXPECT_EQ(rows.state_pages[1], 20);
  EXPECT_TRUE(rows.checkpoints.empty());
  advance(chunk, first);
  for (int32_t position = 100; position < 103; ++position) {
    StepPlan decode;
    add_row(decode, 0, 1, true);
    const Batch batch = build(decode);
    EXPECT_EQ(batch.sequences[0].position, position);
    EXPECT_EQ(batch.sequences[0].committed, std::max(position - 1, 100)) << "the token before it is in the ring";
    EXPECT_FALSE(batch.sequences[0].commit_all);
    advance(decode, batch);
  }
}

TEST_F(BuilderTest, TheFormFollowsFromTheKindOfToken) {
  const Admission admission{.num_prompt_tokens = 100, .num_cached_tokens = 64, .num_tokens = 130};
  const auto form = [&](int32_t position, const RowWork& work, bool deterministic) {
    return form_of({.position = PositionRange::at(position), .work = work}, admission, model_, deterministic);
  };
  const Prefill one{.num_tokens = 1};
  EXPECT_EQ(form(64, one, false), MlaForm::kExpanded);
  EXPECT_EQ(form(99, one, false), MlaForm::kExpanded) << "a chunk of one token is a chunk";
  EXPECT_EQ(form(100, one, false), MlaForm::kAbsorbed) << "outputs that a preemption threw away";
  EXPECT_EQ(form(130, Decode(), false), MlaForm::kAbsorbed);
  EXPECT_EQ(form(130, Verify{3}, false), MlaForm::kAbsorbed);
  EXPECT_EQ(form(64, one, true), MlaForm::kAbsorbed);
}

TEST_F(BuilderTest, AHitIsCommittedFromTheStart) {
  StepPlan plan;
  add_row(plan, 1, 36, false);
  const Batch batch = build(plan);
  EXPECT_EQ(batch.sequences[0].position, 64);
  EXPECT_EQ(batch.sequences[0].committed, 64);
}

TEST_F(BuilderTest, CheckpointsMeetTheirRows) {
  StepPlan plan;
  add_row(plan, 0, 256, false);
  add_row(plan, 1, 64, false);
  plan.checkpoints.push_back(checkpoint(1, 128, {7, 8}));
  Batch batch = build(plan);
  EXPECT_TRUE(batch.sequences[0].checkpoints.empty());
  EXPECT_EQ(checkpoints_of(batch, 1), (Checkpoints{{128, {7, 8}}}));
  plan.checkpoints.insert(plan.checkpoints.begin(),
                          {checkpoint(0, 64, {3, 4}), checkpoint(0, 192, {1, 9}), checkpoint(0, 256, {5, 2})});
  batch = build(plan);
  EXPECT_EQ(checkpoints_of(batch, 0), (Checkpoints{{64, {3, 4}}, {192, {1, 9}}, {256, {5, 2}}}));
  EXPECT_EQ(checkpoints_of(batch, 1), (Checkpoints{{128, {7, 8}}}));
}

TEST_F(BuilderTest, DeterministicFormerOutputsAreCommittedLate) {
  slots_.start(start_of(SlotId(2), 10, 12, 0));
  slots_.append({.slot = SlotId(2), .block_index = 0, .place = {PageId(50)}});
  StepPlan prompt;
  add_row(prompt, 2, 10, false);
  Batch batch = build(prompt, true);
  EXPECT_TRUE(batch.sequences[0].commit_all);
  advance(prompt, batch);
  for (const int32_t committed : {10, 10}) {
    StepPlan output;
    add_row(output, 2, 1, false);
    batch = build(output, true);
    EXPECT_FALSE(batch.sequences[0].commit_all);
    EXPECT_EQ(batch.sequences[0].committed, committed);
    advance(output, batch);
  }
  EXPECT_EQ(slots_[SlotId(2)].committed, 11);
}

TEST_F(BuilderTest, WithoutAStateThereIsNone) {
  SequenceStart start = start_of(SlotId(3), 10, 10, 0);
  start.state_pages.clear();
  slots_.start(start);
  slots_.append({.slot = SlotId(3), .block_index = 0, .place = {PageId(51)}});
  StepPlan plan;
  add_row(plan, 3, 10, false);
  EXPECT_EQ(build(plan).sequences[0].state_pages, nullptr);
}

// What is known of a position may be a range; what is known exactly must lie in it.
TEST_F(BuilderTest, ThePositionIsTheSlotsOwn) {
  StepPlan plan;
  add_row(plan, 1, 36, false);
  plan.rows[0].position = {60, 70};
  EXPECT_EQ(build(plan).sequences[0].position, 64);
}

// With two plans in flight a row may prove to begin before the boundary or after it; then a row beside it writes the
// checkpoint. What comes after it in the plan is written all the same.
TEST_F(BuilderTest, ACheckpointInDoubtIsWrittenWhereItIsReached) {
  StepPlan chunk;
  add_row(chunk, 0, 62, false);
  advance(chunk, build(chunk));
  StepPlan plan;
  add_row(plan, 0, 1, true);
  plan.rows[0].position = {61, 66};
  plan.checkpoints.push_back({SlotId(0), 60, 66, {{PageId(7)}, {PageId(8)}}});
  add_row(plan, 1, 64, false);
  plan.checkpoints.push_back(checkpoint(1, 128, {3, 4}));
  for (const int32_t length : {62, 63, 64, 66}) {
    slots_[SlotId(0)].length = length;
    const Batch batch = build(plan);
    EXPECT_EQ(checkpoints_of(batch, 0), length < 64 ? Checkpoints() : (Checkpoints{{64, {7, 8}}})) << length;
    EXPECT_EQ(checkpoints_of(batch, 1), (Checkpoints{{128, {3, 4}}})) << length;
  }
  plan.rows[0].position = {63, 64};  // the least doubt there is: one draft
  for (const int32_t length : {63, 64}) {
    slots_[SlotId(0)].length = length;
    EXPECT_EQ(std::ssize(checkpoints_of(build(plan), 0)), length - 63);
  }
}

// A GPU's host knows no drafts, and lengths as an upper bound: its kernels find out which checkpoints are reached.
TEST_F(BuilderTest, AGpusHostHasAllDraftsAndCheckpoints) {
  slots_ = Slots(4, 0, 16);
  slots_.start(start_of(SlotId(0), 62, 62, 0));
  for (int32_t block = 0; block < 2; ++block)
    slots_.append({.slot = SlotId(0), .block_index = block, .place = {PageId(30 + block)}});
  StepPlan plan;
  add_row(plan, 0, 62, false);
  advance(plan, build(plan));
  plan = {};
  add_row(plan, 0, 1, true);
  plan.rows[0].work = Verify{3};
  Batch batch = build(plan);
  EXPECT_EQ(batch.sequences[0].num_tokens, 4);
  EXPECT_EQ(batch.logit_rows.size(), 4u);
  advance(plan, batch);
  plan.rows[0].position = {63, 66};
  plan.checkpoints.push_back({SlotId(0), 62, 66, {{PageId(7)}, {PageId(8)}}});
  EXPECT_EQ(build(plan).sequences[0].position, 66);
  slots_.lower(SlotId(0), 3);
  batch = build(plan);
  EXPECT_EQ(batch.sequences[0].position, 63);
  EXPECT_EQ(checkpoints_of(batch, 0), (Checkpoints{{64, {7, 8}}}));
}

// Of a dcp group: which blocks lie here, and of a checkpoint the pages at the rank's own index.
TEST_F(BuilderTest, BlocksAndCheckpointsOfADcpGroup) {
  slots_ = Slots(4, 1000, 16, {}, {.index = 1, .size = 2});
  SequenceStart start = start_of(SlotId(0), 100, 100, 0);
  start.state_pages = {{PageId(3), 0}, {PageId(4), 0}, {PageId(5), 1}, {PageId(6), 1}};
  slots_.start(start);
  slots_.append({.slot = SlotId(0), .block_index = 0, .place = {PageId(30), 0}});
  slots_.append({.slot = SlotId(0), .block_index = 1, .place = {PageId(30), 1}});
  StepPlan plan;
  add_row(plan, 0, 100, false);
  plan.checkpoints = {{SlotId(0), 63, 64, {{PageId(7), 0}, {PageId(8), 0}, {PageId(17), 1}, {PageId(18), 1}}}};
  BatchBuilder builder(model_, false, 1);
  const Batch& batch = builder.build(plan, slots_);
  const SequenceRows& rows = batch.sequences[0];
  EXPECT_TRUE(batch.is_shared());
  EXPECT_EQ(tokens_here(rows, 100), 36);
  EXPECT_EQ(page_here(rows, 63), -1);
  EXPECT_EQ(page_here(rows, 64), 30);
  EXPECT_EQ(rows.state_pages[1], 6);
  EXPECT_EQ(checkpoints_of(batch, 0), (Checkpoints{{64, {17, 18}}}));
}

using BuilderDeathTest = BuilderTest;

TEST_F(BuilderDeathTest, APositionOutOfItsRangeIsABug) {
  for (const PositionRange range : {PositionRange{60, 63}, {65, 70}}) {
    StepPlan plan;
    add_row(plan, 1, 36, false);
    plan.rows[0].position = range;
    EXPECT_DEATH(build(plan), "expects a position in .*, the slot has 64");
  }
}

TEST_F(BuilderDeathTest, ACheckpointThatNoRowReachesIsABug) {
  StepPlan plan;
  add_row(plan, 0, 60, false);
  plan.checkpoints.push_back(checkpoint(0, 64, {7, 8}));
  EXPECT_DEATH(build(plan), "commits 60");
  plan.checkpoints[0] = checkpoint(1, 64, {7, 8});
  EXPECT_DEATH(build(plan), "no row writes");
}

TEST_F(BuilderDeathTest, CheckpointsOfARowAscendOverBlockBoundaries) {
  StepPlan plan;
  add_row(plan, 0, 256, false);
  for (const auto& [first, second] : {std::pair{128, 64}, {64, 64}, {64, 100}}) {
    plan.checkpoints = {checkpoint(0, first, {7, 8}), checkpoint(0, second, {7, 8})};
    EXPECT_DEATH(build(plan), "its checkpoint after (64|128) is in");
  }
}

}  // namespace
}  // namespace perigee

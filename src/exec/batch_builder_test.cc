#include "exec/batch_builder.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

// Says which form it is asked for; computes nothing.
class StillModel : public Model {
 public:
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(DType) const override { return {}; }
  Tensor forward(const Batch&, Ops&, const PagePool&) const override { return {}; }
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
  start.state_pages = {PageId(10 + slot.value), PageId(20 + slot.value)};
  return start;
}

using Checkpoints = std::vector<std::pair<int32_t, std::vector<int32_t>>>;  // position and two pages

Checkpoints checkpoints_of(const Batch& batch, size_t sequence) {
  Checkpoints out;
  for (const StateCheckpoint& checkpoint : batch.sequences[sequence].checkpoints)
    out.push_back({checkpoint.position, {checkpoint.pages[0], checkpoint.pages[1]}});
  return out;
}

class BuilderTest : public testing::Test {
 protected:
  BuilderTest() {
    for (const int32_t slot : {0, 1}) {
      slots_.start(start_of(SlotId(slot), 100, 100, 64 * slot));
      for (int32_t block = 0; block < 4; ++block)
        slots_.append({.slot = SlotId(slot), .block_index = block, .page = PageId(30 + 4 * slot + block)});
    }
  }

  // Adds a row of the slot at its length; a chunk when it has tokens of its own.
  void add_row(StepPlan& plan, int32_t slot, int32_t num_tokens, bool decode) const {
    PlanRow row;
    row.slot = SlotId(slot);
    row.sequence = SequenceId(slot + 100);
    row.num_tokens = num_tokens;
    row.position = slots_[SlotId(slot)].length;
    if (!decode) row.tokens_offset = static_cast<int32_t>(plan.tokens.size());
    row.sample = true;
    if (!decode) plan.tokens.insert(plan.tokens.end(), static_cast<size_t>(num_tokens), 5);
    plan.rows.push_back(row);
  }
  Batch build(const StepPlan& plan, bool deterministic = false) {
    builder_ = std::make_unique<BatchBuilder>(model_, deterministic);
    return builder_->build(plan, slots_);
  }
  void advance(const StepPlan& plan, const Batch& batch) {
    for (size_t i = 0; i < plan.rows.size(); ++i)
      slots_.advance(plan.rows[i].slot, plan.rows[i].num_tokens, batch.sequences[i].commit_all);
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
  const auto form = [&](int32_t position, int32_t tokens_offset, bool deterministic) {
    PlanRow row;
    row.num_tokens = 1;
    row.position = position;
    row.tokens_offset = tokens_offset;
    return form_of(row, admission, model_, deterministic);
  };
  EXPECT_EQ(form(64, 0, false), MlaForm::kExpanded);
  EXPECT_EQ(form(99, 0, false), MlaForm::kExpanded) << "a chunk of one token is a chunk";
  EXPECT_EQ(form(100, 0, false), MlaForm::kAbsorbed) << "outputs that a preemption threw away";
  EXPECT_EQ(form(130, -1, false), MlaForm::kAbsorbed);
  EXPECT_EQ(form(64, 0, true), MlaForm::kAbsorbed);
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
  plan.checkpoints.push_back({SlotId(1), 128, {PageId(7), PageId(8)}});
  Batch batch = build(plan);
  EXPECT_TRUE(batch.sequences[0].checkpoints.empty());
  EXPECT_EQ(checkpoints_of(batch, 1), (Checkpoints{{128, {7, 8}}}));
  plan.checkpoints.insert(plan.checkpoints.begin(), {{SlotId(0), 64, {PageId(3), PageId(4)}},
                                                     {SlotId(0), 192, {PageId(1), PageId(9)}},
                                                     {SlotId(0), 256, {PageId(5), PageId(2)}}});
  batch = build(plan);
  EXPECT_EQ(checkpoints_of(batch, 0), (Checkpoints{{64, {3, 4}}, {192, {1, 9}}, {256, {5, 2}}}));
  EXPECT_EQ(checkpoints_of(batch, 1), (Checkpoints{{128, {7, 8}}}));
}

TEST_F(BuilderTest, DeterministicFormerOutputsAreCommittedLate) {
  slots_.start(start_of(SlotId(2), 10, 12, 0));
  slots_.append({.slot = SlotId(2), .block_index = 0, .page = PageId(50)});
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
  slots_.append({.slot = SlotId(3), .block_index = 0, .page = PageId(51)});
  StepPlan plan;
  add_row(plan, 3, 10, false);
  EXPECT_EQ(build(plan).sequences[0].state_pages, nullptr);
}

using BuilderDeathTest = BuilderTest;

TEST_F(BuilderDeathTest, ACheckpointThatNoRowReachesIsABug) {
  StepPlan plan;
  add_row(plan, 0, 60, false);
  plan.checkpoints.push_back({SlotId(0), 64, {PageId(7), PageId(8)}});
  EXPECT_DEATH(build(plan), "commits 60");
  plan.checkpoints[0] = {SlotId(1), 64, {PageId(7), PageId(8)}};
  EXPECT_DEATH(build(plan), "no row writes");
}

TEST_F(BuilderDeathTest, CheckpointsOfARowAscendOverBlockBoundaries) {
  StepPlan plan;
  add_row(plan, 0, 256, false);
  const std::vector<PageId> pages = {PageId(7), PageId(8)};
  for (const auto& [first, second] : {std::pair{128, 64}, {64, 64}, {64, 100}}) {
    plan.checkpoints = {{SlotId(0), first, pages}, {SlotId(0), second, pages}};
    EXPECT_DEATH(build(plan), "its checkpoint after 64 is at|its checkpoint after 128 is at 64");
  }
}

}  // namespace
}  // namespace perigee

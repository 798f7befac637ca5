// One BatchBuilder over several steps, and what it asks the model.
#include <gtest/gtest.h>

#include "exec/batch_builder.h"

namespace perigee {
namespace {

// Notes what it is asked; computes nothing.
class AskedModel : public Model {
 public:
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat) const override { return {}; }
  ModelOutput forward(const Batch&, Ops&, const PagePool&) const override { return {}; }
  MlaForm choose_form(TokenKind kind_in, int64_t new_tokens_in, int64_t context_in) const override {
    kind = kind_in;
    new_tokens = new_tokens_in;
    context = context_in;
    return MlaForm::kAbsorbed;
  }

  mutable TokenKind kind = TokenKind::kOutput;
  mutable int64_t new_tokens = -1, context = -1;

 private:
  ModelInfo info_;
};

PlanRow chunk(int32_t position, int32_t num_tokens) {
  PlanRow row;
  row.slot = SlotId(0);
  row.sequence = SequenceId(1);
  row.position = PositionRange::at(position);
  row.work = Prefill{.num_tokens = num_tokens, .sample = true};
  return row;
}

TEST(BatchSteps, TheFormIsAskedForOnceByAdmission) {
  const AskedModel model;
  const Admission admission{.num_prompt_tokens = 100, .num_cached_tokens = 64, .num_tokens = 130};
  for (const int32_t position : {64, 80}) {  // however the chunks are cut
    form_of(chunk(position, 4), admission, model, false);
    EXPECT_EQ(model.kind, TokenKind::kPrompt);
    EXPECT_EQ(model.new_tokens, 66);
    EXPECT_EQ(model.context, 64);
  }
  form_of(chunk(100, 4), admission, model, false);
  EXPECT_EQ(model.kind, TokenKind::kOutput);
}

TEST(BatchSteps, AStepHasNothingOfTheStepBefore) {
  const AskedModel model;
  Slots slots(1, 0, 8);
  SequenceStart start;
  start.slot = SlotId(0);
  start.sequence = SequenceId(1);
  start.tokens = std::make_shared<const std::vector<int32_t>>(200, 5);
  start.num_prompt_tokens = 200;
  start.sampling = std::make_shared<const SamplingParams>();
  start.state_pages = {{PageId(1)}, {PageId(2)}};
  slots.start(start);
  for (int32_t block = 0; block < 4; ++block)
    slots.append({.slot = SlotId(0), .block_index = block, .place = {PageId(10 + block)}});
  BatchBuilder builder(model, false);
  for (int32_t step = 0; step < 2; ++step) {
    StepPlan plan;
    plan.rows.push_back(chunk(64 * step, 64));
    plan.tokens.assign(64, 5);
    plan.checkpoints.push_back({.slot = SlotId(0),
                                .lower = 64 * step,
                                .upper = 64 * step + 64,
                                .pages = {{PageId(20 + 2 * step)}, {PageId(21 + 2 * step)}}});
    const Batch& batch = builder.build(plan, slots);
    EXPECT_EQ(batch.tokens.size(), 64u);
    EXPECT_EQ(batch.logit_rows.size(), 1u);
    ASSERT_EQ(batch.sequences.size(), 1u);
    const SequenceRows& rows = batch.sequences[0];
    ASSERT_EQ(rows.checkpoints.size(), 1u);
    EXPECT_EQ(rows.checkpoints[0].position, 64 * step + 64);
    EXPECT_EQ(rows.checkpoints[0].pages[0], 20 + 2 * step);
    EXPECT_EQ(rows.checkpoints[0].pages[1], 21 + 2 * step);
    slots.advance(SlotId(0), 64, rows.commit_all);
  }
}

}  // namespace
}  // namespace perigee

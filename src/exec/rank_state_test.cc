// What the pages of a recurrent state hold when a sequence's first row runs.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/queue.h"
#include "exec/exec_testing.h"
#include "ops/ops.h"

namespace perigee {
namespace {

constexpr int32_t kPromptTokens = kBlockTokens + 1;

// Each page holds one unit. The model notes what is in them and writes its next numbers there.
class NotingModel : public Model {
 public:
  explicit NotingModel(std::vector<int>& found) : found_(found) {
    info_.vocab = 16;
    info_.max_positions = 1000;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override {
    return {CacheGroup::latent(1, 16, 0, format), CacheGroup::state(1, 3, 64 * latent_row_bytes(format, 16, 0), 128)};
  }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool& pool) const override {
    const StateLayer state = pool.state_layer(0);
    for (const SequenceRows& rows : batch.sequences)
      for (int64_t head = 0; head < 3; ++head) {
        uint8_t* unit = state.unit(rows.state_pages, head);
        EXPECT_TRUE(std::all_of(unit, unit + state.unit_bytes, [&](uint8_t byte) { return byte == *unit; }));
        found_.push_back(*unit);
        std::fill_n(unit, state.unit_bytes, static_cast<uint8_t>(++written_));
      }
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), info_.vocab);
    for (int64_t i = 0; i < logits.rows; ++i) std::fill_n(logits.row<float>(i), info_.vocab, 0.0f);
    return {.logits = logits};
  }

 private:
  ModelInfo info_;
  std::vector<int>& found_;
  mutable int written_ = 0;
};

// A sequence in slot 0, with a whole hit on its first block where there is a checkpoint.
StepPlan start_plan(int64_t step, const std::vector<Placement>& state, const std::vector<Placement>& checkpoint) {
  StepPlan plan = prompt_plan({}, std::vector<int32_t>(kPromptTokens, 5));
  plan.step = StepId(step);
  plan.appends.push_back({.slot = SlotId(0), .block_index = 1, .place = {PageId(1)}});
  plan.starts[0].state_pages = state;
  plan.starts[0].checkpoint = checkpoint;
  if (checkpoint.empty()) return plan;
  plan.starts[0].num_cached_tokens = kBlockTokens;
  plan.rows[0].position = PositionRange::at(kBlockTokens);
  plan.rows[0].work = Prefill{.num_tokens = 1, .sample = true};
  return plan;
}

TEST(RankState, BeginsAsTheCheckpointOrAsZeros) {
  std::vector<int> found;
  BoundedQueue<StepResult> results(8);
  RankConfig config = small_rank_config();
  config.make_model = [&](Ops&) { return std::make_unique<NotingModel>(found); };
  const auto rank = start_rank(config, results);
  ASSERT_EQ(rank->parts().state_pages(), 3);
  const std::vector<Placement> first = {{PageId(2)}, {PageId(3)}, {PageId(4)}};
  const std::vector<Placement> second = {{PageId(7)}, {PageId(6)}, {PageId(5)}};
  const auto found_after = [&](const StepPlan& plan) {
    found.clear();
    rank->submit(plan);
    CHECK(results.pop().has_value());
    return found;
  };
  EXPECT_EQ(found_after(start_plan(0, first, {})), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(found_after(start_plan(1, second, first)), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(found_after(start_plan(2, first, second)), (std::vector<int>{4, 5, 6}));
  EXPECT_EQ(found_after(start_plan(3, second, {})), (std::vector<int>{0, 0, 0})) << "nothing of who had these pages";
}

// A rank of a dcp group has pages of its own, in the state as in the checkpoint.
TEST(RankState, BeginsAsItsOwnPartOfACheckpoint) {
  std::vector<int> found;
  BoundedQueue<StepResult> results(8);
  RankConfig config = small_rank_config();
  config.rank = 1;
  config.size = config.limits.dcp_size = 2;
  config.make_model = [&](Ops&) { return std::make_unique<NotingModel>(found); };
  const auto rank = start_rank(config, results);
  const std::vector<Placement> first = {{PageId(2), 0}, {PageId(3), 0}, {PageId(4), 0},
                                        {PageId(8), 1}, {PageId(9), 1}, {PageId(10), 1}};
  const std::vector<Placement> second = {{PageId(8), 0}, {PageId(9), 0},  {PageId(10), 0},
                                         {PageId(7), 1}, {PageId(11), 1}, {PageId(12), 1}};
  rank->submit(start_plan(0, first, {}));
  ASSERT_TRUE(results.pop().has_value());
  EXPECT_EQ(found, (std::vector<int>{0, 0, 0}));
  rank->submit(start_plan(1, second, first));
  ASSERT_TRUE(results.pop().has_value());
  EXPECT_EQ(found, (std::vector<int>{0, 0, 0, 1, 2, 3}));
}

}  // namespace
}  // namespace perigee

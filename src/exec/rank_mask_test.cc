// Masked rows through a whole rank: only allowed ids come back, whenever the masks arrive, and nothing waits for
// ever.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/queue.h"
#include "exec/exec_testing.h"

namespace perigee {
namespace {

using std::chrono::milliseconds;
constexpr int32_t kNoMask = -1;

class RankMaskTest : public testing::Test {
 protected:
  RankMaskTest() {
    RankConfig config;
    config.load.path = "models/tiny-k2";
    config.load.num_threads = 1;
    config.cache_bytes = 8 << 20;
    config.limits.max_sequences = 4;
    auto made = RankThread::start(config, [this](StepResult& result) { results_.push_reserved(std::move(result)); });
    CHECK(made.ok(), made.error().message);
    rank_ = std::move(*made);
  }

  // Two sequences of one prompt each start in slots 0 and 1; both sample under a mask.
  StepPlan first_plan() {
    StepPlan plan{.step = StepId(0), .starts = {}, .appends = {}, .rows = {}, .tokens = {}};
    for (int32_t slot = 0; slot < 2; ++slot) {
      auto sampling = std::make_shared<SamplingParams>();
      sampling->temperature = 1.0f;
      sampling->seed = static_cast<uint64_t>(slot);
      SequenceStart start;
      start.slot = SlotId(slot);
      start.sequence = SequenceId(slot);
      start.tokens = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{300, 301, 302});
      start.num_prompt_tokens = 3;
      start.sampling = std::move(sampling);
      plan.starts.push_back(std::move(start));
      plan.appends.push_back({.slot = SlotId(slot), .block_index = 0, .place = {PageId(slot)}});
      PlanRow row = masked_row(slot);
      row.work = Prefill{.tokens_offset = 3 * slot, .num_tokens = 3, .sample = true};
      plan.rows.push_back(row);
      for (const int32_t id : {300, 301, 302}) plan.tokens.push_back(id);
    }
    return plan;
  }
  static StepPlan decode_plan(int64_t step) {
    StepPlan plan{.step = StepId(step), .starts = {}, .appends = {}, .rows = {}, .tokens = {}};
    for (int32_t slot = 0; slot < 2; ++slot) {
      PlanRow row = masked_row(slot);
      row.position = PositionRange::at(static_cast<int32_t>(2 + step));
      row.work = Decode();
      plan.rows.push_back(row);
    }
    plan.num_decode_rows = 2;
    return plan;
  }
  static PlanRow masked_row(int32_t slot) {
    PlanRow row;
    row.slot = SlotId(slot);
    row.sequence = SequenceId(slot);
    row.masked = true;
    return row;
  }

  // Slot s may sample allowed[s] alone; kNoMask: no entry for it.
  StepMasks masks(int64_t step, std::vector<int32_t> allowed) const {
    StepMasks out{.step = StepId(step), .rows = {}};
    for (size_t slot = 0; slot < allowed.size(); ++slot) {
      if (allowed[slot] == kNoMask) continue;
      RowMask mask{.slot = SlotId(static_cast<int32_t>(slot)), .words = {}};
      mask.words.resize(static_cast<size_t>((rank_->parts().model->info().vocab + 31) / 32));
      mask.words[static_cast<size_t>(allowed[slot] / 32)] = 1u << (allowed[slot] % 32);
      out.rows.push_back(std::move(mask));
    }
    return out;
  }
  std::vector<int32_t> ids_of_next_result() {
    std::vector<int32_t> ids;
    const std::optional<StepResult> result = results_.pop();
    for (const RowResult& row : result->rows) ids.insert(ids.end(), row.ids.begin(), row.ids.end());
    return ids;
  }

  BoundedQueue<StepResult> results_{8};  // outlives the rank
  std::unique_ptr<RankThread> rank_;
};

TEST_F(RankMaskTest, OnlyAllowedIdsComeBackWhereverTheMasksAre) {
  rank_->set_masks(masks(0, {17, 900}));  // before the plan
  rank_->submit(first_plan());
  EXPECT_EQ(ids_of_next_result(), (std::vector<int32_t>{17, 900}));

  rank_->submit(decode_plan(1));  // two plans in flight, both masks late, the later step's first
  rank_->submit(decode_plan(2));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(results_.size(), 0u) << "a masked row sampled without its mask";
  rank_->set_masks(masks(2, {33, 34}));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(results_.size(), 0u) << "a row took the mask of another step";
  rank_->set_masks(masks(1, {31, 32}));
  EXPECT_EQ(ids_of_next_result(), (std::vector<int32_t>{31, 32}));
  EXPECT_EQ(ids_of_next_result(), (std::vector<int32_t>{33, 34}));
}

TEST_F(RankMaskTest, ACancelledSequenceNeedsNoMask) {
  rank_->submit(first_plan());
  rank_->set_masks(masks(0, {kNoMask, 900}));
  const std::vector<int32_t> ids = ids_of_next_result();
  ASSERT_EQ(ids.size(), 2u);
  EXPECT_EQ(ids[1], 900);
  rank_->submit(decode_plan(1));
  rank_->set_masks(masks(1, {}));  // both have ended
  EXPECT_EQ(ids_of_next_result().size(), 2u);
}

TEST_F(RankMaskTest, ARankThatWaitsForMasksStillStops) {
  rank_->submit(first_plan());
  std::this_thread::sleep_for(milliseconds(50));
  rank_.reset();  // hangs here if the wait does not end
  EXPECT_EQ(results_.size(), 1u);
}

}  // namespace
}  // namespace perigee

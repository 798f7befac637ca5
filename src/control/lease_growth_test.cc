// Leases that grow while their prompt is computed, and nodes that fill each other.
#include <algorithm>
#include <utility>

#include "control/handover_testing.h"

namespace perigee {
namespace {

class LeaseGrowthTest : public EachModel {
 protected:
  static SchedulerConfig config() {
    SchedulerConfig config = EachModel::config();
    config.max_step_tokens = 128;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Models, LeaseGrowthTest, testing::Bool(), EachModel::name);

SequenceId submit_leased(SchedulerHarness& h, int64_t id, std::vector<int32_t> prompt) {
  Submit submit = request(id, std::move(prompt));
  submit.lease = LeaseWish::kFromStart;
  h.scheduler.submit(submit);
  return submit.sequence;
}

// (stage, blocks) of each report.
using Reports = std::vector<std::pair<LeaseStage, size_t>>;
Reports reports(SchedulerHarness& h) {
  Reports out;
  for (const LeaseGrowth& growth : h.scheduler.take_lease_growth())
    out.emplace_back(growth.stage, growth.lease->blocks.size());
  return out;
}

// Blocks are announced when the result is in that says they are written, not when they are planned.
TEST_P(LeaseGrowthTest, ByTheBlocksOfEachResult) {
  SchedulerHarness h(config());
  const SequenceId a = submit_leased(h, 1, tokens_from(0, 300));
  const StepPlan first = h.plan();
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kGrows, 0}}));
  const StepPlan second = h.plan();
  EXPECT_EQ(reports(h), Reports());
  h.apply(first);
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kGrows, 2}}));
  h.apply(second);
  std::vector<LeaseGrowth> growth = h.scheduler.take_lease_growth();
  ASSERT_EQ(growth.size(), 1u);
  EXPECT_EQ(growth[0].stage, LeaseStage::kGrows) << "the tail is to come";
  EXPECT_EQ(growth[0].full_blocks(), 4);
  EXPECT_EQ(growth[0].lease->blocks.size(), 4u);
  EXPECT_EQ(std::ssize(growth[0].lease->checkpoint), state_pages());
  for (size_t block = 0; block < 4; ++block) EXPECT_EQ(growth[0].lease->blocks[block], first.appends[block].place);
  const StepPlan third = h.plan();
  EXPECT_EQ(third.num_decode_rows, 0) << "43 tokens of the prompt in a chunk, and then the last one";
  h.apply(third);
  EXPECT_EQ(reports(h), Reports());
  h.run_to_end();
  growth = h.scheduler.take_lease_growth();
  ASSERT_EQ(growth.size(), 1u) << "its sequence has ended well";
  EXPECT_EQ(growth[0].stage, LeaseStage::kWhole);
  EXPECT_EQ(growth[0].lease->num_tokens, 299);
  EXPECT_EQ(growth[0].lease->blocks[4], first.appends[4].place);
  EXPECT_EQ(growth[0].lease->tail_state, first.starts[0].state_pages);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 5 + 2 * state_pages());
  h.scheduler.release(a);
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// The reader waits for the last token's row: it has a step of its own, between the chunks of another prompt.
TEST_P(LeaseGrowthTest, NoChunkSharesTheStepThatMakesItWhole) {
  SchedulerHarness h(config());
  submit_leased(h, 1, tokens_from(0, 100));
  h.scheduler.submit(request(2, tokens_from(5000, 400)));
  std::vector<std::vector<std::pair<int64_t, int32_t>>> rows;
  while (!h.scheduler.idle()) {
    const StepPlan plan = h.plan();
    rows.push_back(rows_of(plan));
    h.apply(plan);
  }
  ASSERT_GT(rows.size(), 3u);
  EXPECT_EQ(rows[0].front(), (std::pair<int64_t, int32_t>{1, 99}));
  EXPECT_EQ(rows[1], (std::vector<std::pair<int64_t, int32_t>>{{1, 1}}));
  EXPECT_EQ(rows[2].front().first, 2);
}

TEST_P(LeaseGrowthTest, OfACachedPromptItLacksOnlyTheTail) {
  SchedulerHarness h(config());
  h.scheduler.submit(request(1, tokens_from(0, 300)));
  h.run_to_end();
  submit_leased(h, 2, tokens_from(0, 300));
  h.step();
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kGrows, 0}, {LeaseStage::kGrows, 4}}));
  h.run_to_end();
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kWhole, 5}}));
}

TEST_P(LeaseGrowthTest, OfAShortPromptThereIsNone) {
  SchedulerHarness h(config());
  submit_leased(h, 1, tokens_from(0, 64));
  h.run_to_end();
  EXPECT_EQ(reports(h), Reports());
}

// What is leased stays where it is until it is let go, whatever becomes of its sequence.
TEST_P(LeaseGrowthTest, ASequenceThatEndsEarlyWithdrawsItAndLeavesItsPages) {
  SchedulerHarness h(config());
  const SequenceId a = submit_leased(h, 1, tokens_from(0, 300));
  h.step();
  reports(h);
  h.scheduler.cancel({a, FinishReason::kDeadline});
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kWithdrawn, 2}}));
  h.scheduler.drop_prefix_cache();
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 2);
  h.scheduler.release(a);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

TEST_P(LeaseGrowthTest, OfASequenceWhoseOutputIsNotFiniteNothingIsBelieved) {
  SchedulerHarness h(config());
  submit_leased(h, 1, tokens_from(0, 257));
  h.step();
  h.step();
  EXPECT_EQ(reports(h).back(), (std::pair{LeaseStage::kWhole, size_t{4}}));
  StepResult result = h.answer(h.plan());
  result.rows[0].finite = false;
  result.rows[0].ids.clear();
  h.apply(result);
  EXPECT_EQ(reports(h), (Reports{{LeaseStage::kFailed, 4}}));
}

TEST_P(LeaseGrowthTest, OneThatItsReaderHasLetGoGrowsNoMore) {
  SchedulerHarness h(config());
  const SequenceId a = submit_leased(h, 1, tokens_from(0, 300));
  h.step();
  reports(h);
  h.scheduler.release(a);
  h.run_to_end();
  EXPECT_EQ(reports(h), Reports());
  EXPECT_EQ(h.scheduler.gauges().leases, 0);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// Its reader would wait for pages here, while others here may wait for its reader.
TEST_P(LeaseGrowthTest, OneOfAPreemptedSequenceIsWithdrawn) {
  SchedulerConfig tight = config();
  tight.num_pages = GetParam() ? 13 : 7;
  tight.max_model_len = 400;
  tight.admission_reserve = nullptr;
  SchedulerHarness h(tight);
  h.scheduler.submit(request(1, tokens_from(5000, 127), 100));
  h.step();
  submit_leased(h, 2, tokens_from(0, GetParam() ? 320 : 257));
  Reports seen;
  for (int i = 0; i < 300 && !h.scheduler.idle(); ++i) {
    h.step();
    for (const auto& report : reports(h)) {
      seen.push_back(report);
      if (report.first != LeaseStage::kGrows) h.scheduler.release(SequenceId(2));
    }
  }
  EXPECT_GT(h.scheduler.gauges().preemptions, 0);
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().first, LeaseStage::kWithdrawn);
  EXPECT_EQ(std::count_if(seen.begin(), seen.end(), [](const auto& each) { return each.second == 0; }), 1) << "once";
  EXPECT_EQ(h.outcomes[SequenceId(2)].ids.size(), 1u);
}

// The reader cannot start from blocks without the checkpoint at their end, unless it has the tail, whose state is
// there.
TEST(LeaseGrowth, WithoutRoomForTheCheckpointItNeedsATail) {
  SchedulerConfig tight = hybrid_config();
  tight.max_step_tokens = 128;
  tight.num_pages = 5 + 3 + 2;
  tight.max_model_len = 320;
  for (const bool has_tail : {true, false}) {
    SchedulerHarness h(tight);
    submit_leased(h, 1, tokens_from(0, has_tail ? 300 : 257));
    h.run_to_end();
    const LeaseGrowth last = h.scheduler.take_lease_growth().back();
    EXPECT_EQ(last.stage, has_tail ? LeaseStage::kWhole : LeaseStage::kWithdrawn);
    EXPECT_TRUE(last.lease->checkpoint.empty());
    EXPECT_EQ(std::ssize(last.lease->tail_state), has_tail ? kTestStatePages : 0);
  }
}

// All pages are lent; the sequences that wait may hold leases of the node that reads them here.
TEST_P(LeaseGrowthTest, WhereOnlyOthersCanGoOnTheLastGivesItsLeaseBack) {
  SchedulerConfig tight = config();
  tight.num_pages = GetParam() ? 15 : 8;
  tight.max_model_len = 450;
  SchedulerHarness h(tight);
  submit_leased(h, 1, tokens_from(0, 257));
  h.run_to_end();
  for (int64_t id = 2; id <= 4; ++id) {
    Submit submit = request(id, tokens_from(1000 * static_cast<int32_t>(id), 400));
    submit.remote_blocks = 6;
    h.scheduler.submit(submit);
  }
  EXPECT_FALSE(h.has_plan());
  EXPECT_TRUE(h.scheduler.take_imports().empty()) << "the reader may be about to let it go";
  std::vector<int64_t> given_back;
  double last_s = h.now_s;
  for (int i = 0; i < 40; ++i) {
    h.now_s += 0.1;
    EXPECT_FALSE(h.has_plan());
    for (const Import& import : h.scheduler.take_imports()) {
      EXPECT_TRUE(import.empty());
      given_back.push_back(import.sequence.value);
      EXPECT_GT(h.now_s - std::exchange(last_s, h.now_s), 0.4) << "the other node has time to go on";
    }
  }
  EXPECT_EQ(given_back, (std::vector<int64_t>{4, 3, 2}));
  EXPECT_EQ(h.scheduler.gauges().leases_given_back, 3);
  h.scheduler.release(SequenceId(1));
  h.run_to_end();
  for (int64_t id = 2; id <= 4; ++id) EXPECT_EQ(h.outcomes[SequenceId(id)].ids.size(), 1u);
}

}  // namespace
}  // namespace perigee

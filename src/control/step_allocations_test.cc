// The step path allocates nothing: next_plan(), apply() and take_updates() of sequences that decode, in memory that was
// given back. What does allocate: admission and end of a sequence, a checkpoint that is written (its pages), prompt
// chunks and log-probabilities, and outputs beyond those that Scheduler::Impl::start() reserves, each time they double.
#include <gtest/gtest.h>

#include "base/test_allocations.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

constexpr int kSequences = 64;

// 64 sequences that decode, with two plans in flight.
class SteadyDecode {
 public:
  explicit SteadyDecode(int32_t state_pages) : h_(config(state_pages)) {
    for (int i = 0; i < kSequences; ++i) h_.submit(70, 900);
    while (h_.scheduler.gauges().waiting > 0) h_.step();
    plan_ = h_.plan();
    for (int i = 0; i < 10; ++i) step();
  }

  // What one step allocates; `had_checkpoints` where one was planned or came back.
  int64_t step(bool* had_checkpoints = nullptr) {
    const StepResult result = h_.answer(plan_);
    const bool wrote = !plan_.checkpoints.empty();
    const int64_t before = num_allocations();
    std::optional<StepPlan> next = h_.scheduler.next_plan(1);
    h_.scheduler.apply(result);
    h_.scheduler.take_updates(updates_);
    h_.scheduler.give_back(std::move(plan_));
    const int64_t allocated = num_allocations() - before;
    CHECK(next && next->rows.size() == kSequences && updates_.size() == kSequences, "not a step of all sequences");
    if (had_checkpoints != nullptr) *had_checkpoints = wrote || !next->checkpoints.empty();
    plan_ = std::move(*next);
    return allocated;
  }

 private:
  static SchedulerConfig config(int32_t state_pages) {
    SchedulerConfig config = small_config();
    config.num_pages = 4096;
    config.max_sequences = kSequences;
    config.max_step_tokens = 1024;
    config.state_pages = state_pages;
    return config;
  }

  SchedulerHarness h_;
  StepPlan plan_;
  std::vector<SequenceUpdate> updates_;
};

TEST(StepAllocations, NoneWhileSequencesDecode) {
  SteadyDecode decode(0);
  int64_t allocated = 0;
  for (int i = 0; i < 300; ++i) allocated += decode.step();
  EXPECT_EQ(allocated, 0) << "in 300 steps, with new blocks for all sequences";
}

TEST(StepAllocations, OfARecurrentModelOnlyForCheckpoints) {
  SteadyDecode decode(3);
  int num_with_checkpoints = 0;
  for (int i = 0; i < 600; ++i) {
    bool had_checkpoints = false;
    const int64_t allocated = decode.step(&had_checkpoints);
    num_with_checkpoints += had_checkpoints ? 1 : 0;
    EXPECT_TRUE(had_checkpoints || allocated == 0) << allocated << " in step " << i;
  }
  EXPECT_GT(num_with_checkpoints, 0);
  EXPECT_LT(num_with_checkpoints, 60);
}

}  // namespace
}  // namespace perigee

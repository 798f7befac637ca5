// What a preempted sequence keeps, and what it is given once.
#include <gtest/gtest.h>

#include "control/scheduler.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

using Request = SchedulerHarness::Request;

Request with_max_tokens(Request request, int32_t max_tokens) {
  request.sampling.max_tokens = max_tokens;
  return request;
}

// A long prompt in chunks of 4 tokens beside a sequence that grows until no page is left.
struct CrowdedPool {
  CrowdedPool() : h(config()) {
    grower = h.submit(60, 400);
    h.step();
  }
  static SchedulerConfig config() {
    SchedulerConfig config = small_config();
    config.num_pages = 20;
    config.max_step_tokens = 5;
    config.max_model_len = 1200;
    return config;
  }
  void run_to_preemption() {
    while (h.scheduler.gauges().preemptions == 0) h.step();
    CHECK(!h.outcomes[grower].finish, "nobody was preempted");
  }

  SchedulerHarness h;
  SequenceId grower;
};

TEST(SchedulerPreemption, PromptLogprobsComeOnceInSpiteOfIt) {
  CrowdedPool pool;
  Request request{.prompt = tokens_from(5000, 1000)};
  request.sampling.max_tokens = 2;
  request.sampling.prompt_logprobs = 0;
  const SequenceId sequence = pool.h.submit(std::move(request));
  pool.run_to_preemption();
  const size_t before = pool.h.outcomes[sequence].prompt_logprob_ids.size();
  EXPECT_GT(before, 0u);
  EXPECT_LT(before, 999u) << "in the middle of the prompt";
  pool.h.run_to_end();
  const std::vector<int32_t>& positions = pool.h.outcomes[sequence].prompt_logprob_ids;
  EXPECT_EQ(positions, tokens_from(1, 999));
}

TEST(SchedulerPreemption, CachedTokensAreThoseOfTheFirstAdmission) {
  CrowdedPool pool;
  const SequenceId sequence = pool.h.submit(with_max_tokens({.prompt = tokens_from(5000, 1000)}, 2));
  pool.run_to_preemption();
  StepPlan resumed;
  for (; resumed.starts.empty(); pool.h.apply(resumed)) resumed = pool.h.plan();
  EXPECT_EQ(resumed.starts[0].sequence, sequence);
  EXPECT_GT(resumed.starts[0].num_cached_tokens, 0) << "what it has computed is a hit";
  pool.h.run_to_end();
  EXPECT_EQ(pool.h.outcomes[sequence].num_cached_tokens, 0) << "but not one of its client's";
}

// In deterministic mode a recurrent model's outputs run again one by one, also where another prompt has left the same
// tokens in the cache as a chunk.
TEST(SchedulerPreemption, DeterministicOutputsAreNoHitsOfAnotherPromptsBlocks) {
  SchedulerConfig config = small_config();
  config.num_pages = 18;
  config.max_sequences = 2;
  config.state_pages = 3;
  config.checkpoint_interval_blocks = 0;
  config.checkpoint_rolling_blocks = 0;
  config.attention_alignment = 64;
  config.deterministic = true;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 100)}, 300));
  const SequenceId grower = h.submit(with_max_tokens({.prompt = tokens_from(5000, 100), .priority = -2}, 400));
  while (h.scheduler.gauges().preemptions == 0) h.step();
  ASSERT_FALSE(h.outcomes[a].finish);
  ASSERT_GT(h.outcomes[a].ids.size(), 230u);
  // Served before it: one that runs its tokens as a prompt, while the other slot is taken.
  std::vector<int32_t> known = tokens_from(0, 100);
  known.insert(known.end(), h.outcomes[a].ids.begin(), h.outcomes[a].ids.end());
  const auto num_known = static_cast<int32_t>(known.size());
  h.scheduler.cancel({grower, FinishReason::kCancelled});
  h.submit(with_max_tokens({.prompt = tokens_from(7000, 10), .priority = -1}, 60));
  known.resize(330);  // a prefix that ends shortly after a block, so that a checkpoint and its pages fit
  h.submit(with_max_tokens({.prompt = known, .priority = -1}, 1));
  StepPlan plan;
  while (plan.starts.empty() || plan.starts[0].sequence != a) {
    plan = h.plan();
    h.apply(plan);
  }
  EXPECT_EQ(static_cast<int32_t>(plan.starts[0].tokens->size()), num_known);
  EXPECT_LE(plan.starts[0].num_cached_tokens, 100) << "of its prompt alone";
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 300u);
}

TEST(SchedulerChunks, ARestThatFillsTheBudgetIsOneChunk) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 100;
  config.attention_alignment = 64;
  SchedulerHarness h(config);
  h.submit(100, 2);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 100);
}

// Each of its tokens takes a row of logits.
TEST(SchedulerChunks, PromptLogprobsComeInSmallChunks) {
  SchedulerConfig config = small_config();
  SchedulerHarness h(config);
  Request request{.prompt = tokens_from(0, 500)};
  request.sampling.prompt_logprobs = 0;
  h.submit(std::move(request));
  ASSERT_EQ(config.max_step_tokens, 512);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 256);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 244);
}

}  // namespace
}  // namespace perigee

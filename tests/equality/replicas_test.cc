// Groups of ranks that each hold the whole model answer like one rank, bit for bit, and all of them compute the same.
#include <gtest/gtest.h>

#include "harness.h"

namespace perigee {
namespace {

class EqualityOfReplicas : public testing::TestWithParam<TestModel> {};
INSTANTIATE_TEST_SUITE_P(Models, EqualityOfReplicas, testing::Values(tiny_k2(), hybrid_model()), name_of);

// Of several chunks and a single one, greedy and sampled, with and without penalties.
std::vector<Job> mixed_jobs() {
  Rng rng(5);
  std::vector<Job> jobs(10);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int64_t length = rng.between(1, i % 2 == 0 ? 200 : 20);
    for (int64_t t = 0; t < length; ++t) jobs[i].prompt.push_back(static_cast<int32_t>(rng.below(kVocab)));
    jobs[i].max_tokens = static_cast<int32_t>(rng.between(1, 24));
    jobs[i].temperature = i % 3 == 2 ? 0.8f : 0.0f;
    jobs[i].prompt_logprobs = i % 5 == 0 ? 1 : -1;
    jobs[i].penalties = i % 4 == 1;
  }
  return jobs;
}

TEST_P(EqualityOfReplicas, AnswerLikeOne) {
  EngineConfig config = base_config(GetParam());
  config.rank.limits.max_step_tokens = GetParam().budgets[1];
  config.rank.limits.max_sequences = 8;
  config.scheduling.prefix_caching = true;
  config.rank_timeouts.behind_s = 1e6;
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Reply> alone = run(*make_engine(config), jobs, true);
  for (const int32_t size : {2, 4}) {
    SCOPED_TRACE(str_cat(size, " ranks"));
    config.rank.size = size;  // config.selfcheck: results of all ranks are compared
    const std::vector<Reply> replies = run(*make_engine(config), jobs, true);
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(str_cat("job ", i));
      EXPECT_EQ(replies[i].error, "");
      EXPECT_EQ(replies[i].ids, alone[i].ids);
      EXPECT_TRUE(replies[i].logprobs == alone[i].logprobs);
      EXPECT_TRUE(replies[i].prompt_logprobs == alone[i].prompt_logprobs);
    }
  }
}

}  // namespace
}  // namespace perigee

// Plans through a whole rank of the reference backend: which logits are sampled, and which logprobs come back.
#include "exec/rank.h"

#include <gtest/gtest.h>

#include "base/queue.h"
#include "exec/exec_testing.h"

namespace perigee {
namespace {

// Runs a prompt as one chunk, then some decode rows; the results in their order.
std::vector<RowResult> run(const SamplingParams& sampling, int num_decodes = 0) {
  BoundedQueue<StepResult> results(8);
  const auto rank = start_rank(small_rank_config(), results);
  std::vector<RowResult> rows;
  for (int step = 0; step <= num_decodes; ++step) {
    rank->submit(step == 0 ? prompt_plan(sampling) : decode_plan(step));
    std::optional<StepResult> result = results.pop();
    CHECK(result->rows.size() == 1, result->device_lost);
    rows.push_back(std::move(result->rows[0]));
  }
  return rows;
}

SamplingParams greedy() {
  SamplingParams sampling;
  sampling.temperature = 0;
  return sampling;
}

TEST(Rank, PromptLogprobsDoNotChangeWhatIsSampled) {
  const int32_t id = run(greedy())[0].ids[0];
  SamplingParams sampling = greedy();
  sampling.prompt_logprobs = 0;
  EXPECT_EQ(run(sampling)[0].ids[0], id);
}

TEST(Rank, PromptAndOutputHaveTheirOwnNumbersOfLogprobs) {
  SamplingParams sampling = greedy();
  sampling.logprobs = 0;
  sampling.prompt_logprobs = 2;
  const RowResult row = run(sampling)[0];
  ASSERT_EQ(row.logprobs.size(), 1u) << "0 asks for the sampled token's";
  EXPECT_EQ(row.logprobs[0].id, row.ids[0]);
  EXPECT_EQ(row.logprobs[0].rank, 1);
  EXPECT_TRUE(row.logprobs[0].top.empty());
  const std::vector<int32_t> prompt = test_prompt();
  ASSERT_EQ(row.prompt_logprobs.size(), prompt.size() - 1) << "none of the first, and none past the last";
  for (size_t i = 0; i < row.prompt_logprobs.size(); ++i) {
    EXPECT_EQ(row.prompt_logprobs[i].id, prompt[i + 1]);
    EXPECT_EQ(row.prompt_logprobs[i].top.size(), 2u);
  }
}

TEST(Rank, WithoutLogprobsThereAreNone) {
  const RowResult row = run(greedy())[0];
  EXPECT_TRUE(row.logprobs.empty());
  EXPECT_TRUE(row.prompt_logprobs.empty());
}

// The logprobs of the prompt are those that its tokens have as outputs.
TEST(Rank, AnOutputHasTheSameLogprobAsPromptToken) {
  SamplingParams sampling = greedy();
  sampling.logprobs = 0;
  const std::vector<RowResult> rows = run(sampling, 3);
  sampling.prompt_logprobs = 0;
  std::vector<int32_t> longer = test_prompt();
  for (const RowResult& row : rows) longer.push_back(row.ids[0]);
  BoundedQueue<StepResult> results(8);
  const auto rank = start_rank(small_rank_config(), results);
  rank->submit(prompt_plan(sampling, longer));
  const RowResult whole = results.pop()->rows[0];
  for (size_t i = 0; i < rows.size(); ++i)
    EXPECT_NEAR(whole.prompt_logprobs[test_prompt().size() - 1 + i].logprob, rows[i].logprobs[0].logprob, 1e-3f) << i;
}

TEST(Rank, TheSmallestCacheHoldsTwoBlocksAndAState) {
  for (const char* model : {"heads16", "kimi_linear"}) {
    SCOPED_TRACE(model);
    RankConfig config = small_rank_config(model);
    BoundedQueue<StepResult> results(8);
    const auto large = start_rank(config, results);
    const int64_t page_bytes = large->parts().layout.page_bytes();
    const int32_t least = 2 + large->parts().state_pages();
    config.cache_bytes = least * page_bytes;
    EXPECT_EQ(start_rank(config, results)->parts().num_pages, least);
    --config.cache_bytes;
    const auto refused = RankThread::start(config, [](StepResult&) {});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().field, "kv-cache-memory-bytes");
  }
}

}  // namespace
}  // namespace perigee

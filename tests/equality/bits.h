// What the equality suites share that compare bits: jobs of random ids, and the comparison.
#pragma once

#include "harness.h"

namespace perigee {

inline std::vector<int32_t> random_ids(Rng& rng, int64_t count, int32_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocab)));
  return ids;
}

inline std::vector<Job> make_jobs(uint64_t seed, int count, int max_prompt, int32_t vocab) {
  Rng rng(seed);
  const std::vector<int32_t> shared = random_ids(rng, 300, vocab);
  std::vector<Job> jobs;
  for (int i = 0; i < count; ++i) {
    Job job;
    const auto from_shared = static_cast<size_t>(rng.below(shared.size()));
    job.prompt.assign(shared.begin(), shared.begin() + static_cast<std::ptrdiff_t>(from_shared));
    job.prompt = joined(std::move(job.prompt), random_ids(rng, rng.between(1, max_prompt), vocab));
    job.max_tokens = static_cast<int32_t>(rng.between(1, 32));
    job.temperature = i % 3 == 2 ? 0.8f : 0.0f;
    job.prompt_logprobs = i % 5 == 0 ? 1 : -1;
    jobs.push_back(std::move(job));
  }
  return jobs;
}

inline void expect_same_bits(const std::vector<TokenLogprobs>& a, const std::vector<TokenLogprobs>& b, size_t job) {
  ASSERT_EQ(a.size(), b.size()) << "job " << job;
  for (size_t t = 0; t < a.size(); ++t) {
    ASSERT_EQ(a[t].id, b[t].id) << "job " << job << " token " << t;
    ASSERT_EQ(a[t].logprob, b[t].logprob) << "job " << job << " token " << t;
    ASSERT_EQ(a[t].top, b[t].top) << "job " << job << " token " << t;
  }
}

inline void expect_identical(const std::vector<Reply>& a, const std::vector<Reply>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].error, "") << "job " << i;
    expect_same_bits(a[i].prompt_logprobs, b[i].prompt_logprobs, i);
    expect_same_bits(a[i].logprobs, b[i].logprobs, i);  // where they left each other, before tokens differ
    EXPECT_TRUE(a[i].ids == b[i].ids) << "job " << i;
  }
}

}  // namespace perigee

// Cached or cold, chunked or whole, preempted or not: the same replies to task prompts, up to the tie rule of DESIGN
// D10 and to the end of text. What the models say after that is so little determined that 1e-7 in a state becomes 0.07
// in a log-probability, and bf16 more.
#include "tasks.h"

#include "model/layer_weights.h"

namespace perigee {
namespace {

// The jobs twice; the second time their own prompts are cached, whose salts keep them apart.
void expect_cached_as_cold(Engine& engine, const std::vector<Job>& jobs, int32_t least_cached) {
  const std::vector<Reply> cold = run(engine, jobs, true), cached = run(engine, jobs, true);
  for (size_t i = 0; i < jobs.size(); ++i) {
    ASSERT_EQ(cold[i].cached, 0) << "job " << i;
    ASSERT_GT(cached[i].cached, least_cached) << "job " << i;
  }
  print("cached against cold", jobs, compare(engine, jobs, cold, cached));
}

class EqualityOnTasks : public testing::TestWithParam<TestModel> {
 protected:
  EngineConfig config_ = base_config(GetParam());
};

TEST_P(EqualityOnTasks, CachedAsColdUpToTies) {
  config_.scheduling.prefix_caching = true;
  const auto engine = make_engine(config_);
  expect_cached_as_cold(*engine, task_jobs(GetParam(), *engine, num_jobs(10, 60)), 127);
}

// Whole, or cut into chunks that other sequences' tokens fill up.
TEST_P(EqualityOnTasks, ChunkedAsWholeUpToTies) {
  config_.rank.limits.max_step_tokens = 4096;
  const auto large = make_engine(config_);
  config_.rank.limits.max_step_tokens = 96;
  const auto small = make_engine(config_);
  const std::vector<Job> jobs = task_jobs(GetParam(), *large, num_jobs(5, 20));
  const std::vector<Reply> whole = run(*large, jobs, true), chunked = run(*small, jobs, true);
  ASSERT_GT(small->stats().steps, large->stats().steps + 20) << "hardly any was cut: the test says nothing";
  print("chunked against whole", jobs, compare(*large, jobs, whole, chunked));
}

// After more than kOneFormTokens cached tokens a short rest is absorbed where a cold start expands.
TEST_P(EqualityOnTasks, CachedAsColdUpToTiesOnLongContexts) {
  config_.scheduling.prefix_caching = true;
  const auto engine = make_engine(config_);
  std::vector<Job> jobs;
  for (Job& part : task_jobs(GetParam(), *engine, num_jobs(12, 60))) {
    if (jobs.empty() || jobs.back().prompt.size() > kOneFormTokens + 128)
      jobs.emplace_back(std::move(part));
    else
      jobs.back().prompt = joined(std::move(jobs.back().prompt), part.prompt);
  }
  if (jobs.back().prompt.size() <= kOneFormTokens + 128) jobs.pop_back();
  ASSERT_GE(jobs.size(), 2u);
  expect_cached_as_cold(*engine, jobs, kOneFormTokens);
}

// Two sequences at a time whose prompts fill the cache and nearly their newest page: the second one is preempted soon
// after it began to answer, and answers on later. Each comparison reaches beyond the preemption.
TEST_P(EqualityOnTasks, PreemptedAsNotUpToTies) {
  const auto roomy = make_engine(config_);
  const std::vector<Job> all = task_jobs(GetParam(), *roomy, 200);
  std::map<size_t, std::vector<Job>> crowding;  // by pages of the prompt
  for (const Job& job : all)
    if (const size_t left = 63 - (job.prompt.size() + 63) % 64; left >= 2 && left < 16)
      crowding[(job.prompt.size() + 63) / 64].push_back(job);
  const auto& [num_pages, jobs_of_one_size] = *std::max_element(
      crowding.begin(), crowding.end(), [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::vector<Job> jobs = jobs_of_one_size;
  jobs.resize(std::min(jobs.size(), num_jobs(6, 40)));
  config_.scheduling.prefix_caching = true;
  const auto crowded = make_engine(with_cache_of(config_, *roomy, 2 * static_cast<int32_t>(num_pages) + 1));
  const std::vector<Reply> whole = run(*roomy, jobs, true), preempted = run(*crowded, jobs, true);
  print("preempted against not", jobs, compare(*roomy, jobs, whole, preempted));
  size_t num_preempted = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Reply& reply = preempted[i];
    if (reply.preemptions.back() == 0) continue;
    ++num_preempted;
    const auto common = std::mismatch(whole[i].ids.begin(), whole[i].ids.end(), reply.ids.begin(), reply.ids.end());
    const auto again =
        std::find_if(reply.preemptions.begin(), reply.preemptions.end(), [](int32_t n) { return n > 0; });
    EXPECT_GT(common.second - reply.ids.begin(), again - reply.preemptions.begin() + 4)
        << "job " << i << " is hardly compared after its preemption";
  }
  std::printf("%zu of %zu replies were preempted, all of them compared after that\n", num_preempted, jobs.size());
  EXPECT_GE(num_preempted, jobs.size() / 2) << "hardly any was preempted: the test says nothing";
}

INSTANTIATE_TEST_SUITE_P(, EqualityOnTasks, testing::ValuesIn(on_all_devices()), name_of);

}  // namespace
}  // namespace perigee

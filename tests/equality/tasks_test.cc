// Cached or cold, chunked or whole, preempted or not: the same replies to task prompts, up to the tie rule of DESIGN
// D10 and to the end of text. What the models say after that is so little determined that 1e-7 in a state becomes 0.07
// in a log-probability, and bf16 more.
#include <cstdio>
#include <fstream>

#include "base/json.h"
#include "harness.h"
#include "model/layer_weights.h"
#include "text/tokenizer.h"

namespace perigee {
namespace {

// Held-out questions in the form the model was trained on; five shots at random, so prompts share only their
// beginnings.
std::vector<Job> task_jobs(const TestModel& model, const Engine& engine, size_t count) {
  const auto tokenizer = Tokenizer::load(model.folder);
  CHECK(tokenizer.ok(), tokenizer.error().message);
  std::ifstream file("tests/data/tiny_tasks/gsm_5shot_a.jsonl");
  std::vector<Job> jobs;
  for (std::string line; jobs.size() < count && std::getline(file, line);) {
    const auto row = parse_json(line);
    CHECK(row.ok(), row.error().message);
    jobs.push_back({.prompt = (*tokenizer)->encode(row->find("prompt")->as_string(), SpecialsIn::kRecognised),
                    .max_tokens = 48,
                    .stop_ids = engine.model().eos_ids,
                    .cache_salt = std::to_string(jobs.size())});
  }
  CHECK(jobs.size() == count);
  return jobs;
}

size_t num_jobs(size_t usually, size_t in_a_soak) {
  return soak_requested() ? in_a_soak : usually;
}

struct Tally {
  size_t tokens = 0, after_ties = 0, flips = 0;
  float most_apart = 0;
};

// Compares two runs of the jobs. A reply that leaves the other one at a tie goes on from there as `reference` does when
// it is given the same beginning. Of the replies at most one in four may do that: more would be no ties.
Tally compare(Engine& reference, std::vector<Job> jobs, std::vector<Reply> whole, std::vector<Reply> other) {
  Tally tally;
  const size_t most_flips = jobs.size() / 4;
  for (int round = 0; !jobs.empty(); ++round) {
    std::vector<Job> rest;
    std::vector<Reply> rest_of_other;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(str_cat("job ", i, " of round ", round));
      const Likeness likeness = compare_greedy(whole[i], other[i]);
      (round == 0 ? tally.tokens : tally.after_ties) += likeness.tokens;
      tally.most_apart = std::max(tally.most_apart, likeness.most_apart);
      if (!likeness.parts) continue;
      ++tally.flips;
      const auto taken = static_cast<std::ptrdiff_t>(likeness.tokens) + 1;
      if (taken == std::ssize(other[i].ids)) continue;
      rest.push_back(jobs[i]);
      rest.back().prompt.insert(rest.back().prompt.end(), other[i].ids.begin(), other[i].ids.begin() + taken);
      rest.back().max_tokens -= static_cast<int32_t>(taken);
      rest_of_other.emplace_back();
      rest_of_other.back().ids.assign(other[i].ids.begin() + taken, other[i].ids.end());
      rest_of_other.back().logprobs.assign(other[i].logprobs.begin() + taken, other[i].logprobs.end());
    }
    jobs = std::move(rest);
    other = std::move(rest_of_other);
    if (!jobs.empty()) whole = run(reference, jobs, true);
  }
  EXPECT_LE(tally.flips, most_flips);
  return tally;
}

void print(const char* what, const std::vector<Job>& jobs, const Tally& tally) {
  std::printf("%s: %zu requests, %zu tokens, at most %.4f apart; %zu flips at ties, %zu tokens after them\n", what,
              jobs.size(), tally.tokens, static_cast<double>(tally.most_apart), tally.flips, tally.after_ties);
}

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

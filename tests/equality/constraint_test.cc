// A reply under a constraint does not depend on drafts, chunks, ranks' shares of blocks, preemption or the cache: bit
// for bit, as without a constraint; and a free one beside it is what it is without.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "bits.h"
#include "control/constraint_testing.h"
#include "pairwise.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

constexpr int32_t kEnd = 5;

// Every other one is constrained. Prompts repeat themselves, and so do replies, so that lookup finds drafts.
std::vector<Job> jobs_of(int32_t num_prompt) {
  Rng rng(23);
  std::vector<Job> jobs(6);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::vector<int32_t> phrase = random_ids(rng, 7, kVocab);
    while (std::ssize(jobs[i].prompt) < num_prompt) jobs[i].prompt = joined(std::move(jobs[i].prompt), phrase);
    jobs[i].prompt.resize(static_cast<size_t>(num_prompt));
    jobs[i].max_tokens = 50;
    jobs[i].temperature = i >= 4 ? 0.8f : 0.0f;
    jobs[i].penalties = i == 2;
    if (i % 2 == 1) continue;
    jobs[i].stop_ids = {kEnd};
    jobs[i].constraint = std::make_shared<SumConstraint>(kVocab, kEnd, static_cast<int32_t>(i), i == 0 ? 60 : 30);
  }
  jobs[0].max_tokens = 61;  // no more than the shortest reply takes
  return jobs;
}

void expect_obeyed(const std::vector<Job>& jobs, const std::vector<Reply>& replies) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(replies[i].error, "") << i;
    if (jobs[i].constraint == nullptr) continue;
    EXPECT_EQ(static_cast<const SumConstraint&>(*jobs[i].constraint).first_fault(replies[i].ids), -1) << i;
    EXPECT_EQ(replies[i].finish, FinishReason::kStop) << i;
  }
}

std::vector<Device> devices() {
  std::vector<Device> all = {Device::kCpu};
  if (select_device(0).ok()) all.push_back(Device::kCuda);
  return all;
}

class Constraints : public testing::TestWithParam<Device> {
 protected:
  static EngineConfig config_of(TestModel model) {
    model.device = GetParam();
    EngineConfig config = base_config(model);
    config.rank.limits.deterministic = true;
    return config;
  }
};

TEST_P(Constraints, LeaveFreeRequestsAlone) {
  const auto engine = make_engine(config_of(tiny_k2()));
  const std::vector<Job> jobs = jobs_of(40);
  std::vector<Job> free;
  for (const Job& job : jobs)
    if (job.constraint == nullptr) free.push_back(job);
  const std::vector<Reply> beside = run(*engine, jobs, true), alone = run(*engine, free, true);
  expect_obeyed(jobs, beside);
  expect_identical(alone, {beside[1], beside[3], beside[5]});
}

// Settings in which each two values of two of these occur together; in a soak, all.
TEST_P(Constraints, GiveTheSameInEverySetting) {
  struct Drafts {
    int32_t most;
    const char* model;
  };
  constexpr std::array<Drafts, 5> kDrafts = {{{0, ""}, {1, ""}, {3, ""}, {3, "-eagle3-mla"}, {kMaxDrafts, ""}}};
  constexpr std::array<std::pair<int32_t, int32_t>, 3> kRanks = {{{1, 1}, {2, 1}, {2, 2}}};  // tp, dcp
  const bool one_gpu = GetParam() == Device::kCuda && list_gpus().size() < 2;
  const int num_groups = one_gpu ? 1 : static_cast<int>(kRanks.size());
  const std::vector<int> factors = {kDrafts.size(), num_groups, 2, 2, 2, 2};
  const std::vector<Job> jobs = jobs_of(4 * 64 - 4);
  std::map<std::string, std::vector<Reply>> plain;  // by model and ranks
  int64_t accepted = 0;
  int num_preempted = 0;
  for (const Combination& c : soak_requested() ? full_product(factors) : pairwise_cover(factors)) {
    const Drafts& drafts = kDrafts[static_cast<size_t>(c[0])];
    TestModel model = c[5] != 0 ? hybrid_model() : tiny_k2();
    std::tie(model.tp, model.dcp) = kRanks[static_cast<size_t>(c[1])];
    const bool chunked = c[2] != 0, cached = c[3] != 0, crowded = c[4] != 0;
    const std::string text =
        fmt::format("{}, {} drafts {}, tp {} x dcp {}{}{}{}", model.name, drafts.most, drafts.model, model.tp,
                    model.dcp, chunked ? ", chunked" : "", cached ? ", cached" : "", crowded ? ", preempted" : "");
    SCOPED_TRACE(text);
    fmt::print("{}\n", text);
    EngineConfig config = config_of(model);
    std::vector<Reply>& wanted = plain[fmt::format("{} {} {}", model.name, model.tp, model.dcp)];
    if (wanted.empty()) {
      wanted = run(*make_engine(config), jobs, true);
      expect_obeyed(jobs, wanted);
    }
    config.rank.limits.num_drafts = drafts.most;
    config.rank.ngram = {.least = 1, .most = 3};
    if (*drafts.model != '\0') config.rank.draft_model = model.folder + drafts.model;
    config.scheduling.prefix_caching = cached;
    if (chunked) config.rank.limits.max_step_tokens = 96;
    if (crowded) {
      EngineConfig alone = config;
      alone.rank.size = alone.rank.limits.dcp_size = 1;
      alone.rank.layout = RankLayout::kReplicated;
      config = with_cache_of(config, *make_engine(alone), model.dcp == 1 ? 9 : 14);
    }
    const auto engine = make_engine(config);
    if (cached) run(*engine, {jobs.back()}, false);
    const std::vector<Reply> replies = run(*engine, jobs, true);
    expect_identical(wanted, replies);
    for (const Reply& reply : replies) num_preempted += reply.preemptions.empty() ? 0 : reply.preemptions.back();
    accepted += engine->stats().scheduler.speculation.accepted();
    if (testing::Test::HasFailure()) return;
  }
  fmt::print("{} drafts accepted, {} preemptions\n", accepted, num_preempted);
  EXPECT_GT(accepted, 100);
  EXPECT_GT(num_preempted, 3);
}

INSTANTIATE_TEST_SUITE_P(, Constraints, testing::ValuesIn(devices()),
                         [](const auto& info) { return std::string(info.param == Device::kCuda ? "Cuda" : "Cpu"); });

}  // namespace
}  // namespace perigee

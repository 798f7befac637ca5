// Groups of ranks that each have their shards answer like one rank with all of the model: on the f32 reference with
// nearly the same log-probabilities, in bf16 up to the tie rule of DESIGN D10. Sums over ranks round otherwise than the
// sums of one.
#include <cmath>
#include <cstdio>

#include "pairwise.h"
#include "tasks.h"

namespace perigee {
namespace {

class TensorParallelEquality : public testing::TestWithParam<TestModel> {
 protected:
  EngineConfig config_ = base_config(GetParam());
};

EngineConfig of_ranks(EngineConfig config, int32_t size) {
  config.rank.size = size;
  config.rank.layout = RankLayout::kTensorParallel;
  config.rank_timeouts.behind_s = 1e6;
  return config;
}

// How a group runs: its size and whether prompts are cut into chunks, come a second time, and sequences are preempted.
struct Setting {
  int32_t ranks = 2;
  bool chunked = false, cached = false, crowded = false;
};

std::vector<Setting> settings() {
  constexpr std::array<int32_t, 3> kRanks = {2, 4, 8};
  const std::vector<int> factors = {soak_requested() ? 3 : 2, 2, 2, 2};
  std::vector<Setting> out;
  for (const Combination& c : soak_requested() ? full_product(factors) : pairwise_cover(factors))
    out.push_back(
        {.ranks = kRanks[static_cast<size_t>(c[0])], .chunked = c[1] != 0, .cached = c[2] != 0, .crowded = c[3] != 0});
  return out;
}

int32_t num_preemptions(const std::vector<Reply>& replies) {
  int32_t sum = 0;
  for (const Reply& reply : replies) sum += reply.preemptions.back();
  return sum;
}

// Questions of which the newest `length` tokens are asked.
std::vector<Job> ends_of_tasks(std::vector<Job> jobs, size_t length) {
  for (Job& job : jobs) {
    CHECK(job.prompt.size() >= length);
    job.prompt.erase(job.prompt.begin(), job.prompt.end() - static_cast<std::ptrdiff_t>(length));
    job.max_tokens = 24;
  }
  return jobs;
}

// Prompts end four tokens before their last page does: of two that fill a cache of one page more, one gives way at its
// fifth output.
TEST_P(TensorParallelEquality, TaskRepliesUpToTies) {
  constexpr int32_t kPromptPages = 2;
  const auto one = make_engine(config_);
  const std::vector<Job> jobs =
      ends_of_tasks(task_jobs(GetParam(), *one, num_jobs(4, 24)), kPromptPages * kBlockTokens - 4);
  const std::vector<Reply> wanted = run(*one, jobs, true);
  for (const Setting& setting : settings()) {
    EngineConfig config = of_ranks(config_, setting.ranks);
    config.scheduling.prefix_caching = setting.cached;
    config.rank.limits.max_step_tokens = setting.chunked ? GetParam().budgets[1] : 2048;
    if (setting.crowded) config = with_cache_of(config, *one, 2 * kPromptPages + 1);
    const std::string what = str_cat(setting.ranks, " ranks", setting.chunked ? ", chunked" : "",
                                     setting.cached ? ", cached" : "", setting.crowded ? ", preempted" : "");
    SCOPED_TRACE(what);
    const auto group = make_engine(config);
    std::vector<Reply> replies = run(*group, jobs, true);
    if (setting.cached) replies = run(*group, jobs, true);
    print(what.c_str(), jobs, compare(*one, jobs, wanted, replies));
    EXPECT_EQ(num_preemptions(replies) > 0, setting.crowded) << "the test says nothing of preemption";
  }
}

// To the bit for a given number of ranks, whatever runs beside a request and however it is cut.
TEST_P(TensorParallelEquality, DeterministicWhateverRunsBeside) {
  config_.rank.limits.deterministic = true;
  const EngineConfig config = of_ranks(config_, 2);
  const auto roomy = make_engine(config);
  const std::vector<Job> jobs = task_jobs(GetParam(), *roomy, num_jobs(4, 24), "gsm_0shot");
  const std::vector<Reply> alone = run(*roomy, jobs, false);
  EngineConfig small = config;
  small.rank.limits.max_step_tokens = GetParam().budgets[1];
  small.scheduling.prefix_caching = true;
  const std::vector<Reply> beside = run(*make_engine(small), jobs, true);
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(str_cat("job ", i));
    EXPECT_EQ(alone[i].error + beside[i].error, "");
    EXPECT_EQ(alone[i].ids, beside[i].ids);
    EXPECT_TRUE(alone[i].logprobs == beside[i].logprobs);
  }
}

// Largest and mean difference of log-probabilities of the same tokens.
struct Apart {
  double most = 0, sum = 0;
  int64_t count = 0;
  void add(const std::vector<TokenLogprobs>& a, const std::vector<TokenLogprobs>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t t = 0; t < a.size(); ++t) {
      ASSERT_EQ(a[t].id, b[t].id);
      const double apart = std::fabs(static_cast<double>(a[t].logprob) - static_cast<double>(b[t].logprob));
      most = std::max(most, apart);
      sum += apart;
      ++count;
    }
  }
};

// Every way to sample, in f32: chunked, cached and preempted.
class TensorParallelOnRef : public TensorParallelEquality {
 protected:
  TensorParallelOnRef() { config_.rank.device = Device::kRef; }
};

TEST_P(TensorParallelOnRef, EveryWayToSample) {
  const auto one = make_engine(config_);
  std::vector<Job> jobs = task_jobs(GetParam(), *one, num_jobs(6, 24), "gsm_0shot");
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].max_tokens = 12;
    jobs[i].temperature = i % 3 == 2 ? 0.8f : 0;
    jobs[i].penalties = i % 3 != 0;
    jobs[i].prompt_logprobs = i % 2 == 0 ? 1 : -1;
  }
  const std::vector<Reply> wanted = run(*one, jobs, true);
  for (const int32_t size : {2, 4}) {
    SCOPED_TRACE(str_cat(size, " ranks"));
    EngineConfig config = of_ranks(config_, size);
    config.rank.limits.max_step_tokens = GetParam().budgets[1];
    config.scheduling.prefix_caching = size == 4;
    const std::vector<Reply> replies = run(*make_engine(config), jobs, true);
    Apart apart;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(str_cat("job ", i));
      ASSERT_EQ(replies[i].error, "");
      ASSERT_EQ(replies[i].ids, wanted[i].ids);
      apart.add(replies[i].logprobs, wanted[i].logprobs);
      apart.add(replies[i].prompt_logprobs, wanted[i].prompt_logprobs);
    }
    std::printf("%d ranks: %lld log-probabilities, %.2g apart on average, at most %.2g\n", size,
                static_cast<long long>(apart.count), apart.sum / static_cast<double>(apart.count), apart.most);
    EXPECT_LE(apart.sum / static_cast<double>(apart.count), 1e-5);
    EXPECT_LE(apart.most, 1e-4);
  }
}

// Ids of a request's choices, by choice.
std::map<int32_t, std::vector<int32_t>> choices_of(Engine& engine, const EngineRequest& request) {
  std::mutex mutex;
  std::condition_variable done;
  std::map<int32_t, std::vector<int32_t>> choices;
  int32_t finished = 0;
  const auto sink = [&](OutputChunk&& chunk) {
    const std::lock_guard lock(mutex);
    auto& ids = choices[chunk.choice];
    ids.insert(ids.end(), chunk.ids.begin(), chunk.ids.end());
    finished += chunk.finish.has_value() ? 1 : 0;
    done.notify_all();
  };
  CHECK(engine.submit(request, sink).ok());
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return finished == request.n; });
  return choices;
}

// Without log-probabilities: of greedy requests only the largest logits are exchanged.
TEST_P(TensorParallelOnRef, SeveralChoicesAndNothingReported) {
  const auto one = make_engine(config_), group = make_engine(of_ranks(config_, 4));
  for (const float temperature : {0.0f, 1.0f}) {
    EngineRequest request = request_of(task_jobs(GetParam(), *one, 1, "gsm_0shot")[0]);
    request.sampling.max_tokens = 12;
    request.sampling.temperature = temperature;
    request.sampling.logprobs = -1;
    request.n = 3;
    EXPECT_EQ(choices_of(*one, request), choices_of(*group, request)) << "temperature " << temperature;
  }
}

TEST(TensorParallelSizes, OneThatDoesNotDivideIsRefusedBeforeWeightsAreRead) {
  EngineConfig config = of_ranks(base_config(tiny_k2()), 3);
  config.rank.load.progress = [](const char*, int64_t, int64_t) { ADD_FAILURE() << "weights are read"; };
  const auto engine = Engine::create(config);
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.error().field, "tensor-parallel-size");
  EXPECT_NE(
      engine.error().message.find("do not divide among 3 ranks; every tensor of this model divides among 1, 2, 4, 8"),
      std::string::npos)
      << engine.error().message;
}

INSTANTIATE_TEST_SUITE_P(, TensorParallelEquality, testing::Values(tiny_k2(), hybrid_model()), name_of);
INSTANTIATE_TEST_SUITE_P(, TensorParallelOnRef, testing::Values(tiny_k2(), hybrid_model()), name_of);

}  // namespace
}  // namespace perigee

// Groups of ranks that each have their shards answer like one rank with all of the model: on the f32 reference with
// nearly the same log-probabilities, in bf16 up to the tie rule of DESIGN D10. Sums over ranks round otherwise than the
// sums of one.
#include <cmath>
#include <cstdio>

#include "bits.h"
#include "pairwise.h"
#include "tasks.h"
#include "tensor/cuda/gpus.h"

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

// How a group runs: its size, its cache, and whether prompts are cut into chunks, come a second time, sequences are
// preempted, and ranks have whole experts.
struct Setting {
  int32_t ranks = 2;
  size_t cache = 0;  // of kCaches
  bool chunked = false, cached = false, crowded = false, whole_experts = false;
};

// How a request is asked for. Two choices are greedy, so the same.
struct Ask {
  bool cancelled = false, twice = false, penalties = false, reported = false;
};

std::vector<Combination> combinations(const std::vector<int>& num_values) {
  return soak_requested() ? full_product(num_values) : pairwise_cover(num_values);
}

// GPU ranks: as far as there are GPUs.
std::vector<Setting> settings(Device device) {
  const bool gpu = device == Device::kCuda;
  std::vector<int32_t> ranks = {2};
  for (const int32_t more : {4, 8})
    if (!gpu || std::ssize(list_gpus()) >= more) ranks.push_back(more);
  std::vector<Setting> out;
  for (const Combination& c : combinations({static_cast<int>(ranks.size()), kCaches.size(), 2, 2, 2, 2}))
    out.push_back({.ranks = ranks[static_cast<size_t>(c[0])],
                   .cache = static_cast<size_t>(c[1]),
                   .chunked = c[2] != 0,
                   .cached = c[3] != 0,
                   .crowded = c[4] != 0,
                   .whole_experts = c[5] != 0});
  return out;
}

std::vector<Ask> asks() {
  std::vector<Ask> out;
  for (const Combination& c : combinations({2, 2, 2, 2}))
    out.push_back({.cancelled = c[0] != 0, .twice = c[1] != 0, .penalties = c[2] != 0, .reported = c[3] != 0});
  return out;
}

std::string text_of(const Setting& s) {
  return fmt::format("{} ranks, {} cache{}{}{}{}", s.ranks, latent_format_name(kCaches[s.cache]),
                     s.whole_experts ? ", whole experts" : "", s.chunked ? ", chunked" : "", s.cached ? ", cached" : "",
                     s.crowded ? ", preempted" : "");
}

std::string text_of(const Ask& a) {
  return fmt::format("{}{}{}{}", a.reported ? "log-probabilities" : "ids alone", a.twice ? ", two choices" : "",
                     a.penalties ? ", penalties" : "", a.cancelled ? ", cancelled" : "");
}

constexpr float kPresence = 0.7f,
                kFrequency = 0.4f;  // a penalty that depends on a logit's sign moves no log-probability

EngineRequest request_of(const Job& job, const Ask& ask) {
  EngineRequest request = request_of(job);
  request.sampling.logprobs = ask.reported ? 20 : -1;
  request.sampling.prompt_logprobs = ask.reported ? 0 : -1;
  if (ask.penalties) request.sampling.presence_penalty = kPresence, request.sampling.frequency_penalty = kFrequency;
  if (ask.cancelled) request.sampling.max_tokens = 60, request.sampling.stop_ids.clear();
  request.n = ask.twice ? 2 : 1;
  return request;
}

// Job i as ask i says. A reply for each choice.
using Replies = std::vector<std::vector<Reply>>;
Replies run(Engine& engine, const std::vector<Job>& jobs, const std::vector<Ask>& how) {
  constexpr size_t kCancelAfter = 3;
  std::mutex mutex;
  std::condition_variable changed;
  Replies replies(jobs.size());
  std::vector<RequestId> ids;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const EngineRequest request = request_of(jobs[i], how[i]);
    replies[i].resize(static_cast<size_t>(request.n));
    const auto id = engine.submit(request, [&, i](OutputChunk&& chunk) {
      const std::lock_guard lock(mutex);
      Reply& reply = replies[i][static_cast<size_t>(chunk.choice)];
      add(std::move(chunk), reply);
      changed.notify_all();
    });
    CHECK(id.ok(), id.error().message);
    ids.push_back(*id);
  }
  std::unique_lock lock(mutex);
  const auto all = [&](size_t i, auto&& holds) { return std::all_of(replies[i].begin(), replies[i].end(), holds); };
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!how[i].cancelled) continue;
    changed.wait(lock, [&] {
      return all(i, [](const Reply& reply) { return reply.ids.size() >= kCancelAfter || reply.finish; });
    });
    lock.unlock();
    engine.cancel(ids[i]);
    lock.lock();
  }
  for (size_t i = 0; i < jobs.size(); ++i)
    changed.wait(lock, [&] { return all(i, [](const Reply& reply) { return reply.finish.has_value(); }); });
  return replies;
}

// With the most likely tokens in the order that penalties give them.
Reply penalised(Reply reply) {
  std::map<int32_t, int32_t> counts;
  for (size_t t = 0; t < reply.ids.size(); ++t) {
    auto& top = reply.logprobs[t].top;
    for (auto& [id, logprob] : top)
      if (const int32_t count = counts[id]; count > 0) logprob -= kPresence + kFrequency * static_cast<float>(count);
    std::stable_sort(top.begin(), top.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    ++counts[reply.ids[t]];
  }
  return reply;
}

// What one rank answers, plain and under penalties.
struct Wanted {
  std::vector<Reply> plain, under_penalties;
  // Of a GPU, plain: on the reference, and with prompts in chunks, whose rows read an fp8 cache where others do not.
  std::vector<Reply> of_ref, chunked;
};

Wanted wanted_of(Engine& one, const std::vector<Job>& jobs) {
  Wanted wanted;
  for (const bool penalties : {false, true}) {
    const std::vector<Ask> how(jobs.size(), {.penalties = penalties, .reported = true});
    for (std::vector<Reply>& choices : run(one, jobs, how))
      if (penalties)
        wanted.under_penalties.push_back(penalised(std::move(choices[0])));
      else
        wanted.plain.push_back(std::move(choices[0]));
  }
  return wanted;
}

// Mean difference of prompts' log-probabilities.
struct PromptsApart {
  double sum = 0;
  int64_t count = 0;
  void add(const Reply& a, const Reply& b) {
    for (size_t t = 0; t < b.prompt_logprobs.size(); ++t, ++count)
      sum += std::fabs(static_cast<double>(a.prompt_logprobs.at(t).logprob) - b.prompt_logprobs[t].logprob);
  }
  void add(const PromptsApart& other) {
    sum += other.sum;
    count += other.count;
  }
  double mean() const { return sum / static_cast<double>(count); }
};

struct Sums : Tally {
  size_t replies = 0, cancelled = 0;
  PromptsApart prompts;
  int64_t preemptions = 0;
};

std::vector<Reply> answers(const EngineConfig& config, const std::vector<Job>& jobs) {
  std::vector<Reply> out;
  for (std::vector<Reply>& choices : run(*make_engine(config), jobs, std::vector<Ask>(jobs.size(), {.reported = true})))
    out.push_back(std::move(choices[0]));
  return out;
}

void compare(Reply one, Reply other, const Ask& ask, Sums& sums) {
  if (ask.cancelled) {
    const size_t both = std::min(one.ids.size(), other.ids.size());
    one.ids.resize(both);
    other.ids.resize(both);
  }
  ASSERT_FALSE(other.ids.empty()) << other.error;
  ASSERT_EQ(other.logprobs.empty() && other.prompt_logprobs.empty(), !ask.reported);
  if (!ask.reported) other.logprobs = one.logprobs;
  const Likeness likeness = compare_greedy(one, other);
  ++sums.replies;
  sums.tokens += likeness.tokens;
  sums.flips += likeness.parts ? 1 : 0;
  sums.most_apart = std::max(sums.most_apart, likeness.most_apart);
  sums.cancelled += other.finish == FinishReason::kCancelled ? 1 : 0;
  sums.preemptions += other.preemptions.back();
  sums.prompts.add(one, other);
}

// The newest `length` tokens of questions.
std::vector<Job> ends_of_tasks(std::vector<Job> jobs, size_t length) {
  for (Job& job : jobs) {
    CHECK(job.prompt.size() >= length);
    job.prompt.erase(job.prompt.begin(), job.prompt.end() - static_cast<std::ptrdiff_t>(length));
  }
  return jobs;
}

// Prompts end four tokens before a page does: of two that fill a cache of one page more, one gives way at its fifth
// output.
TEST_P(TensorParallelEquality, TaskRepliesUpToTies) {
  // Of prompts' log-probabilities; 0.016 where a near tie of two experts is decided otherwise. A GPU computes around
  // attention in bf16, which moves them more: there a group is about as far from the reference as one rank is.
  // The prompts of a setting are few: all settings together say more.
  constexpr double kMeanApart = 0.05, kFurther = 1.5, kFurtherInAll = 1.25;
  PromptsApart all_ones_from_ref, all_groups_from_ref;
  const std::vector<Ask> how = asks();
  for (const Ask& ask : how) std::printf("asked: %s\n", text_of(ask).c_str());
  std::array<std::unique_ptr<Engine>, kCaches.size()> one;  // by cache
  std::array<Wanted, kCaches.size()> wanted;
  std::vector<Job> jobs;
  const std::vector<Setting> all = settings(GetParam().device);
  for (size_t cache = 0; cache < kCaches.size(); ++cache) {
    if (std::none_of(all.begin(), all.end(), [&](const Setting& s) { return s.cache == cache; })) continue;
    config_.rank.load.cache = kCaches[cache];
    one[cache] = make_engine(config_);
    jobs = ends_of_tasks(task_jobs(GetParam(), *one[cache], how.size()), kBlockTokens - 4);
    for (Job& job : jobs) job.max_tokens = 10;
    wanted[cache] = wanted_of(*one[cache], jobs);
    if (GetParam().device != Device::kCuda) continue;
    EngineConfig other = config_;
    other.rank.limits.max_step_tokens = GetParam().budgets[0];
    wanted[cache].chunked = answers(other, jobs);
    other = config_;
    other.rank.device = Device::kRef;
    wanted[cache].of_ref = answers(other, jobs);
  }
  for (const Setting& setting : all) {
    EngineConfig config = of_ranks(config_, setting.ranks);
    config.rank.load.cache = kCaches[setting.cache];
    config.rank.whole_experts = setting.whole_experts;
    config.scheduling.prefix_caching = setting.cached;
    config.rank.limits.max_step_tokens = setting.chunked ? GetParam().budgets[0] : 2048;
    if (setting.crowded) config = with_cache_of(config, *one[setting.cache], 3);
    SCOPED_TRACE(text_of(setting));
    const auto group = make_engine(config);
    if (setting.cached) run(*group, jobs, how);
    const Replies replies = run(*group, jobs, how);
    Sums sums;
    PromptsApart one_from_ref, group_from_ref;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(fmt::format("job {}: {}", i, text_of(how[i])));
      const Wanted& of_one = wanted[setting.cache];
      for (const Reply& reply : replies[i]) {
        compare(how[i].penalties ? of_one.under_penalties[i] : of_one.plain[i], reply, how[i], sums);
        if (of_one.of_ref.empty() || !how[i].reported) continue;
        one_from_ref.add(of_one.of_ref[i], setting.chunked ? of_one.chunked[i] : of_one.plain[i]);
        group_from_ref.add(of_one.of_ref[i], reply);
      }
    }
    const double prompts_apart = sums.prompts.mean();
    std::printf(
        "%s: %zu replies, %zu tokens, at most %.2g apart, prompts %.2g on average; %zu flips at ties, %zu cancelled\n",
        text_of(setting).c_str(), sums.replies, sums.tokens, static_cast<double>(sums.most_apart), prompts_apart,
        sums.flips, sums.cancelled);
    EXPECT_LE(sums.flips, sums.replies / 4);
    if (one_from_ref.count > 0) {
      std::printf("from the reference: one rank %.2g, the group %.2g\n", one_from_ref.mean(), group_from_ref.mean());
      EXPECT_LE(group_from_ref.mean(), kFurther * one_from_ref.mean());
      all_ones_from_ref.add(one_from_ref);
      all_groups_from_ref.add(group_from_ref);
    } else {
      EXPECT_LE(prompts_apart, kMeanApart);
    }
    EXPECT_EQ(sums.preemptions > 0, setting.crowded) << "the test says nothing of preemption";
  }
  if (all_ones_from_ref.count > 0) {
    EXPECT_LE(all_groups_from_ref.mean(), kFurtherInAll * all_ones_from_ref.mean());
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
    config.rank.whole_experts = size == 2;
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

// Whatever carries the data of GPU ranks, and in whatever form sums are taken.
TEST(TensorParallelOnGpus, HasTheSameBitsByEveryCarrier) {
  if (list_gpus().size() < 2) GTEST_SKIP() << "fewer than 2 GPUs";
  for (const TestModel& model : {tiny_k2(), hybrid_model()}) {
    SCOPED_TRACE(model.name);
    EngineConfig config = of_ranks(base_config(on_gpu(model, model.name)), 2);
    config.rank.limits.deterministic = true;
    config.rank.limits.max_step_tokens = model.budgets[2];
    const std::vector<Job> jobs = make_jobs(8, 12, 300, kVocab);
    const std::vector<Reply> replies = run(*make_engine(config), jobs, true);
    // Sums in two shots: each rank keeps the residual of its own rows (Ops::gather_residual).
    for (const CollectiveOptions& options : {CollectiveOptions{.carrier = Carrier::kPeer, .one_shot_bytes = 0},
                                             CollectiveOptions{.carrier = Carrier::kHost, .one_shot_bytes = {}},
                                             CollectiveOptions{.carrier = Carrier::kNccl, .one_shot_bytes = {}}}) {
      SCOPED_TRACE(str_cat("carrier ", static_cast<int>(options.carrier)));
      config.rank.collectives = options;
      const auto engine = Engine::create(config);
      if (!engine.ok() && options.carrier == Carrier::kNccl) {
        std::printf("not compared: %s\n", engine.error().message.c_str());
        continue;
      }
      ASSERT_TRUE(engine.ok()) << engine.error().message;
      expect_identical(run(**engine, jobs, true), replies);
    }
  }
}

std::vector<TestModel> models_of_groups() {
  return list_gpus().size() > 1 ? on_all_devices() : std::vector<TestModel>{tiny_k2(), hybrid_model()};
}

INSTANTIATE_TEST_SUITE_P(, TensorParallelEquality, testing::ValuesIn(models_of_groups()), name_of);
INSTANTIATE_TEST_SUITE_P(, TensorParallelOnRef, testing::Values(tiny_k2(), hybrid_model()), name_of);

}  // namespace
}  // namespace perigee

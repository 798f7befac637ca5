// A request's tokens and log-probabilities must not depend on how the engine happened to run it (INV-6): bit for bit.
//
// On the bundled models, attention alone and hybrid: together or alone, chunked or whole, whatever the number of
// threads, and cached or cold; in deterministic mode preempted or not, too, and on a GPU as well, where there is one.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "bits.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

// Held by so many ranks, of which dcp share the blocks of a sequence.
TestModel of_ranks(TestModel model, const char* name, int32_t tp, int32_t dcp) {
  model.name = name;
  model.tp = tp;
  model.dcp = dcp;
  return model;
}

int num_same(const std::vector<Reply>& a, const std::vector<Reply>& b) {
  int same = 0;
  for (size_t i = 0; i < a.size(); ++i)
    same += a[i].ids == b[i].ids && a[i].logprobs == b[i].logprobs && a[i].prompt_logprobs == b[i].prompt_logprobs;
  return same;
}

// After a difference, for one that does not come again: which side is off, and whether its engine stays off (what it
// holds, weights above all) or not (what happened in one step).
void print_suspects(Engine& alone, Engine& crowded, const std::vector<Job>& jobs, const std::vector<Reply>& wanted,
                    const std::vector<Reply>& got) {
  const std::vector<Reply> alone_again = run(alone, jobs, false), crowded_again = run(crowded, jobs, true);
  std::printf(
      "of %zu replies the same: %d at first, %d alone and alone again, %d crowded and crowded again, %d both again\n",
      jobs.size(), num_same(wanted, got), num_same(wanted, alone_again), num_same(got, crowded_again),
      num_same(alone_again, crowded_again));
}

// Some sequence was preempted after it began to answer, with penalties one and without.
void expect_preempted_midway(const std::vector<Job>& jobs, const std::vector<Reply>& replies) {
  int with = 0, without = 0;
  for (size_t i = 0; i < jobs.size(); ++i)
    if (replies[i].preemptions.front() < replies[i].preemptions.back()) ++(jobs[i].penalties ? with : without);
  std::printf("preempted midway: %d with penalties, %d without\n", with, without);
  EXPECT_GT(with, 0) << "the test says nothing of penalties";
  EXPECT_GT(without, 0) << "the test says nothing of replies without penalties";
}

// Prompts that end four tokens before their last page does. In a cache of one page more than two of them take, of two
// that run the second one gives way at its fifth output. Every other pair has penalties.
std::vector<Job> crowding_jobs(int32_t num_pages) {
  Rng rng(2);
  std::vector<Job> jobs(soak_requested() ? 24 : 4);
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].prompt = random_ids(rng, 64 * num_pages - 4, kVocab);
    jobs[i].max_tokens = 24;
    jobs[i].temperature = i % 3 == 2 ? 0.8f : 0.0f;
    jobs[i].penalties = i % 4 < 2;
    jobs[i].prompt_logprobs = i % 4 == 2 ? 1 : -1;
  }
  return jobs;
}

size_t num_jobs() {
  return soak_requested() ? 24 : 7;
}

class Equality : public testing::TestWithParam<TestModel> {
 protected:
  void SetUp() override {
    static std::map<std::string, std::vector<Reply>> replies;
    std::vector<Reply>& known = replies[GetParam().name];
    if (known.empty()) known = run(*make_engine(base_config(GetParam())), jobs, false);
    alone = known;
  }
  const std::vector<Job> jobs = make_jobs(1, static_cast<int>(num_jobs()), 400, kVocab);
  std::vector<Reply> alone;
};

TEST_P(Equality, TogetherAsAloneOnAnyNumberOfThreads) {
  for (const int threads : {2, 3}) {
    EngineConfig config = base_config(GetParam());
    config.rank.load.num_threads = threads;
    SCOPED_TRACE(threads);
    expect_identical(alone, run(*make_engine(config), jobs, true));
  }
}

TEST_P(Equality, AnyChunkSize) {
  for (const int32_t budget : GetParam().budgets) {
    EngineConfig config = base_config(GetParam());
    config.rank.limits.max_step_tokens = budget;
    SCOPED_TRACE(budget);
    expect_identical(alone, run(*make_engine(config), jobs, true));
  }
}

// Random ids: the router is unsure everywhere, so that the last bit of a cached row would show. None differs (ADR
// 0005).
TEST_P(Equality, CachedAsCold) {
  EngineConfig config = base_config(GetParam());
  config.scheduling.prefix_caching = true;
  config.scheduling.checkpoint_interval_blocks = 1;
  const auto engine = make_engine(config);
  for (const bool again : {false, true}) {
    SCOPED_TRACE(again);
    const std::vector<Reply> cached = run(*engine, jobs, true);
    expect_identical(alone, cached);
    int64_t hits = 0;
    for (const Reply& reply : cached) hits += reply.cached;
    ASSERT_GT(hits, again ? 80 * std::ssize(jobs) : -1) << "nothing was cached: the test says nothing";
  }
}

// On random ids as well, where each token comes from attention alone: former outputs run again in the form in which
// decode steps gave them. A chunk of delta attention rounds otherwise than single tokens do. A sequence that comes
// again brings its penalties.
TEST(EqualityOfLatentAttention, PreemptedAsNot) {
  const std::vector<Job> jobs = crowding_jobs(4);
  EngineConfig config = base_config(tiny_k2());
  const auto roomy = make_engine(config);
  config.scheduling.prefix_caching = true;
  const auto crowded = make_engine(with_cache_of(config, *roomy, 2 * 4 + 1));
  const std::vector<Reply> whole = run(*roomy, jobs, true), preempted = run(*crowded, jobs, true);
  expect_identical(whole, preempted);
  expect_preempted_midway(jobs, preempted);
}

// Deterministic: attention is cut every 512 tokens, and two jobs pass the first cut.
class EqualityOfDeterministic : public testing::TestWithParam<TestModel> {
 protected:
  EqualityOfDeterministic() {
    config.rank.limits.deterministic = true;
    Rng rng(5);
    for (const int length : {490, 505}) jobs.push_back({.prompt = random_ids(rng, length, kVocab)});
    for (size_t i = 1; i < jobs.size(); i += 2) jobs[i].penalties = true;
  }
  EngineConfig config = base_config(GetParam());
  std::vector<Job> jobs = make_jobs(1, static_cast<int>(num_jobs()) - 2, 400, kVocab);
};

TEST_P(EqualityOfDeterministic, CachedAsCold) {
  const std::vector<Reply> cold = run(*make_engine(config), jobs, false);
  config.scheduling.prefix_caching = true;
  const auto engine = make_engine(config);
  for (const bool again : {false, true}) {
    SCOPED_TRACE(again);
    const std::vector<Reply> cached = run(*engine, jobs, true);
    expect_identical(cold, cached);
    int64_t hits = 0;
    for (const Reply& reply : cached) hits += reply.cached;
    ASSERT_GT(hits, again ? 40 * std::ssize(jobs) : -1) << "nothing was cached: the test says nothing";
  }
}

// In small chunks and preempted, whatever the moment at which each request comes and each sequence gives way; beyond
// the first cut of attention. Of a dcp group the rank with the first block lacks a page before the others do.
TEST_P(EqualityOfDeterministic, ChunkedAndPreemptedAtAnyTime) {
  jobs = crowding_jobs(8);
  const auto alone = make_engine(config);
  config.scheduling.prefix_caching = true;
  config.rank.limits.max_step_tokens = 96;
  const auto like = make_engine(base_config(of_ranks(GetParam(), "", 1, 1)));
  const auto crowded = make_engine(with_cache_of(config, *like, 2 * 8 + GetParam().dcp));
  const std::vector<Reply> wanted = run(*alone, jobs, false);
  for (int turn = 0; turn < (soak_requested() ? 20 : 2); ++turn) {
    SCOPED_TRACE(turn);
    const std::vector<Reply> preempted = run(*crowded, jobs, true);
    expect_identical(wanted, preempted);
    if (HasFailure()) return print_suspects(*alone, *crowded, jobs, wanted, preempted);
    expect_preempted_midway(jobs, preempted);
  }
}

// A prompt that leaves another one at any block boundary goes on from there with the bits of a cold start.
TEST_P(EqualityOfDeterministic, HitAtEveryBlockBoundary) {
  constexpr int32_t kBlocks = 7;
  EngineConfig config = base_config(GetParam());
  config.rank.limits.deterministic = true;
  Rng rng(3);
  const std::vector<int32_t> base = random_ids(rng, kBlocks * 64 + 9, kVocab);
  std::vector<Job> branches;
  for (int32_t b = 0; b <= kBlocks; ++b) {
    const std::vector<int32_t> kept(base.begin(), base.begin() + b * 64);
    branches.push_back({.prompt = joined(kept, random_ids(rng, 1 + 23 * b, kVocab)), .max_tokens = 12});
  }
  const std::vector<Reply> cold = run(*make_engine(config), branches, false);
  config.scheduling.prefix_caching = true;
  config.scheduling.checkpoint_interval_blocks = 1;
  const auto engine = make_engine(config);
  run(*engine, {{.prompt = base, .max_tokens = 3}}, false);
  const std::vector<Reply> cached = run(*engine, branches, false);
  for (size_t b = 0; b < branches.size(); ++b) EXPECT_EQ(cached[b].cached, static_cast<int32_t>(b) * 64);
  expect_identical(cold, cached);
}

// The next turn of a conversation goes on from what decode steps left: the same up to rounding as a cold prompt.
TEST_P(Equality, ANextTurnGoesOnFromItsOutputs) {
  EngineConfig config = base_config(GetParam());
  config.rank.device = Device::kRef;
  config.scheduling.prefix_caching = true;
  config.scheduling.checkpoint_interval_blocks = 0;
  config.scheduling.checkpoint_rolling_blocks = 1;
  Rng rng(4);
  const auto engine = make_engine(config);
  const std::vector<Reply> turn = run(*engine, {{.prompt = random_ids(rng, 100, kVocab), .max_tokens = 120}}, false);
  Rng again(4);
  const std::vector<int32_t> prompt = joined(random_ids(again, 100, kVocab), turn[0].ids);
  const std::vector<Job> next = {{.prompt = joined(prompt, random_ids(again, 20, kVocab)), .max_tokens = 8}};
  const std::vector<Reply> cached = run(*engine, next, false);
  EXPECT_EQ(cached[0].cached, 192) << "of 219 tokens that have cache entries";
  config.scheduling.prefix_caching = false;
  const std::vector<Reply> cold = run(*make_engine(config), next, false);
  ASSERT_EQ(cached[0].ids, cold[0].ids);
  for (size_t t = 0; t < cold[0].ids.size(); ++t)
    EXPECT_NEAR(cached[0].logprobs[t].logprob, cold[0].logprobs[t].logprob, 1e-3) << t;
}

TEST_P(EqualityOfDeterministic, SeveralChoicesAsSingleRequests) {
  EngineConfig config = base_config(GetParam());
  config.rank.limits.deterministic = true;
  const auto cold = make_engine(config);
  config.scheduling.prefix_caching = true;  // the other choices go on from what the first one's prompt left
  const auto engine = make_engine(config);
  EngineRequest request = request_of(jobs[2]);
  request.sampling.temperature = 1.0f;
  request.n = 3;
  std::mutex mutex;
  std::condition_variable done;
  std::map<int32_t, std::vector<int32_t>> choices;
  int finished = 0;
  const uint64_t seed = request.sampling.seed;
  CHECK(engine
            ->submit(request,
                     [&](OutputChunk&& chunk) {
                       std::lock_guard lock(mutex);
                       auto& ids = choices[chunk.choice];
                       ids.insert(ids.end(), chunk.ids.begin(), chunk.ids.end());
                       finished += chunk.finish.has_value();
                       done.notify_all();
                     })
            .ok());
  {
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return finished == 3; });
  }
  for (int32_t i = 0; i < 3; ++i) {
    EngineRequest single = request;
    single.n = 1;
    single.sampling.seed = seed + static_cast<uint64_t>(i);
    Collector collector;
    CHECK(cold->submit(single, collector.sink(0)).ok());
    EXPECT_EQ(collector.wait(1)[0].ids, choices[i]) << "choice " << i;
  }
}

TestModel with_cache(LatentFormat format, TestModel model, const char* name) {
  model.cache = format;
  model.budgets = {64};
  model.name = name;
  return model;
}

// To the bit, also where a rounding that falls otherwise upstream would become one of e4m3, and where ranks share the
// blocks of a sequence.
std::vector<TestModel> deterministic_models() {
  std::vector<TestModel> models = on_all_devices();
  models.push_back(with_cache(LatentFormat::kF8E4M3, tiny_k2(), "TinyK2Fp8"));
  models.push_back(of_ranks(with_cache(LatentFormat::kF8Tiles, tiny_k2(), ""), "TinyK2TilesDcp", 2, 2));
  models.push_back(of_ranks(hybrid_model(), "HybridDcp", 2, 2));
  if (soak_requested()) {
    models.push_back(of_ranks(tiny_k2(), "TinyK2Dcp", 2, 2));
    models.push_back(of_ranks(tiny_k2(), "TinyK2Dcp4", 8, 4));
    models.push_back(of_ranks(with_cache(LatentFormat::kF8E4M3, tiny_k2(), ""), "TinyK2Fp8Dcp", 2, 2));
    models.push_back(with_cache(LatentFormat::kF8Tiles, tiny_k2(), "TinyK2Tiles"));
  }
  if (select_device(0).ok())
    models.push_back(with_cache(LatentFormat::kF8E4M3, on_gpu(tiny_k2(), ""), "TinyK2CudaFp8"));
  if (std::ssize(list_gpus()) > 1) {
    models.push_back(of_ranks(on_gpu(tiny_k2(), ""), "TinyK2CudaDcp", 2, 2));
    models.push_back(
        of_ranks(with_cache(LatentFormat::kF8Tiles, on_gpu(tiny_k2(), ""), ""), "TinyK2CudaTilesDcp", 2, 2));
    models.push_back(of_ranks(on_gpu(hybrid_model(), ""), "HybridCudaDcp", 2, 2));
  }
  return models;
}

INSTANTIATE_TEST_SUITE_P(, Equality,
                         testing::Values(tiny_k2(), with_cache(LatentFormat::kF8E4M3, tiny_k2(), "TinyK2Fp8"),
                                         hybrid_model()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(, EqualityOfDeterministic, testing::ValuesIn(deterministic_models()), name_of);

}  // namespace
}  // namespace perigee

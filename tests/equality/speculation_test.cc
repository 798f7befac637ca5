// A request's tokens and log-probabilities do not depend on speculation: bit for bit on a CPU, and on a GPU in
// deterministic mode, where a verify row rounds as the decode rows would that it stands for. Sampled as well as greedy,
// since each place draws as it would alone.
//
// Drafts by prompt lookup repeat what one token or a few were followed by, and the bundled drafts read texts that they
// were not trained on: so most are wrong, and of some a part is right.
#include <gtest/gtest.h>

#include <cstdio>

#include "bits.h"
#include "exec/cuda/gpu_memory.h"
#include "exec/host_device.h"
#include "pairwise.h"
#include "tasks.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

// With a draft that is bundled with it: with latent attention, or Llama's.
constexpr const char* kLatents = "-eagle3-mla";
constexpr const char* kLlama = "-eagle3";
TestModel with_draft(TestModel model, const char* name, int32_t tp = 1, int32_t dcp = 1, const char* kind = kLatents) {
  model.name = name;
  model.draft = model.folder + kind;
  model.tp = tp;
  model.dcp = dcp;
  return model;
}

TestModel with_cache(TestModel model, LatentFormat cache, std::optional<LatentFormat> draft_cache = {}) {
  model.cache = cache;
  model.draft_cache = draft_cache;
  return model;
}

TestModel of_ranks(TestModel model, const char* name, int32_t tp, int32_t dcp) {
  model.name = name;
  model.tp = tp;
  model.dcp = dcp;
  return model;
}

// Replies long enough to repeat themselves; every other pair has penalties, which each place must count.
std::vector<Job> repeating_jobs(size_t count, int32_t num_prompt) {
  Rng rng(11);
  std::vector<Job> jobs(count);
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int32_t> phrase = random_ids(rng, 9, kVocab);
    while (std::ssize(jobs[i].prompt) < num_prompt) jobs[i].prompt = joined(std::move(jobs[i].prompt), phrase);
    jobs[i].prompt.resize(static_cast<size_t>(num_prompt));
    jobs[i].prompt.back() = static_cast<int32_t>(i);
    jobs[i].max_tokens = 60;
    jobs[i].temperature = i % 3 == 2 ? 0.8f : 0.0f;
    jobs[i].penalties = i % 4 < 2;
  }
  return jobs;
}

// Both happened, and the sums agree.
void expect_drafted(const Engine& engine) {
  const SpeculationTotals totals = engine.stats().scheduler.speculation;
  std::printf("rows %lld, drafts %lld, accepted %lld\n", static_cast<long long>(totals.rows),
              static_cast<long long>(totals.drafts), static_cast<long long>(totals.accepted()));
  EXPECT_GT(totals.accepted(), 0) << "no draft was right: the test says nothing";
  EXPECT_LT(totals.accepted(), totals.drafts) << "no draft was wrong: the test says nothing";
  EXPECT_LE(totals.drafts, totals.rows * engine.num_drafts());
}

class EqualityOfDrafts : public testing::TestWithParam<TestModel> {
 protected:
  EqualityOfDrafts() {
    const std::vector<Job> more = repeating_jobs(6, 70);
    jobs.insert(jobs.end(), more.begin(), more.end());
    // Of a dcp group, else where blocks lie depends on when others came; of a GPU, else bits depend on who runs beside.
    config.rank.limits.deterministic = GetParam().dcp > 1 || GetParam().device == Device::kCuda;
  }
  EngineConfig with_drafts(EngineConfig with, int32_t num_drafts) const {
    with.rank.limits.num_drafts = num_drafts;
    with.rank.ngram = {.least = 1, .most = 3};
    with.rank.draft_model = GetParam().draft;
    with.rank.draft_cache = GetParam().draft_cache;
    return with;
  }
  std::vector<Job> jobs = make_jobs(7, 4, 200, kVocab);
  EngineConfig config = base_config(GetParam());
};

TEST_P(EqualityOfDrafts, AsWithout) {
  const std::vector<Reply> plain = run(*make_engine(config), jobs, true);
  for (const int32_t num_drafts : {1, 3, kMaxDrafts}) {
    SCOPED_TRACE(num_drafts);
    const auto engine = make_engine(with_drafts(config, num_drafts));
    expect_identical(plain, run(*engine, jobs, true));
    expect_drafted(*engine);
    if (HasFailure()) return;
  }
}

// A stop id may come among accepted drafts; what follows it is dropped.
TEST_P(EqualityOfDrafts, StopsWhereItWouldWithout) {
  std::vector<Reply> plain = run(*make_engine(config), jobs, true);
  for (size_t i = 0; i < jobs.size(); ++i)
    jobs[i].stop_ids = {plain[i].ids[plain[i].ids.size() / 2], plain[i].ids.back()};
  plain = run(*make_engine(config), jobs, true);
  const auto engine = make_engine(with_drafts(config, 3));
  const std::vector<Reply> replies = run(*engine, jobs, true);
  expect_identical(plain, replies);
  int stopped = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_EQ(replies[i].finish, plain[i].finish) << i;
    stopped += replies[i].finish == FinishReason::kStop ? 1 : 0;
  }
  EXPECT_GT(stopped, 5);
}

using EqualityOfDraftsOnOneRank = EqualityOfDrafts;

// In small chunks, with pages for two sequences only; the last one again from the cache.
TEST_P(EqualityOfDraftsOnOneRank, ChunkedPreemptedAndCached) {
  config.rank.limits.deterministic = true;
  const std::vector<Job> crowd = repeating_jobs(4, 4 * 64 - 4);
  const std::vector<Reply> plain = run(*make_engine(config), crowd, true);
  const EngineConfig drafting = with_drafts(config, 3);
  EngineConfig tight = with_cache_of(drafting, *make_engine(drafting), 2 * 4 + 1);
  tight.scheduling.prefix_caching = true;
  tight.rank.limits.max_step_tokens = 96;
  const auto engine = make_engine(tight);
  const std::vector<Reply> replies = run(*engine, crowd, true);
  expect_identical(plain, replies);
  int preempted = 0;
  for (const Reply& reply : replies) preempted += reply.preemptions.back();
  EXPECT_GT(preempted, 0);
  for (const bool again : {false, true}) {
    const std::vector<Reply> last = run(*engine, {crowd.back()}, false);
    expect_identical({plain.back()}, last);
    EXPECT_GE(last[0].cached, again ? 128 : 0);
  }
  expect_drafted(*engine);
}

// Of a recurrent model: in decode, too, where a plan does not know which of its rows comes to the block's end.
TEST_P(EqualityOfDraftsOnOneRank, KeepsCheckpoints) {
  config.scheduling.prefix_caching = true;
  config.scheduling.checkpoint_rolling_blocks = 1;
  std::vector<Job> long_ones = repeating_jobs(3, 70);
  for (Job& job : long_ones) job.max_tokens = 200;
  const auto without = make_engine(config), with = make_engine(with_drafts(config, 3));
  const std::vector<Reply> plain = run(*without, long_ones, false), replies = run(*with, long_ones, false);
  expect_identical(plain, replies);
  for (size_t i = 0; i < long_ones.size(); ++i) {
    long_ones[i].prompt = joined(long_ones[i].prompt, replies[i].ids);
    long_ones[i].max_tokens = 4;
  }
  const std::vector<Reply> again = run(*without, long_ones, false), next = run(*with, long_ones, false);
  for (size_t i = 0; i < next.size(); ++i) {
    EXPECT_EQ(next[i].error, "");
    EXPECT_EQ(next[i].cached, again[i].cached) << i;
  }
  EXPECT_GE(next[0].cached, config.rank.limits.deterministic ? 64 : 128);
}

// How a drafting engine and its requests differ from those without drafts.
struct Setting {
  std::string text;
  TestModel model;
  std::optional<LatentFormat> draft_cache;
  Eagle3::Layer layer = Eagle3::Layer::kDivided;
  bool chunked = false, cached = false, crowded = false, cancelled = false;
};

// On a GPU: of those that fit, each rank has one of its own.
std::vector<Setting> settings(Device device) {
  struct Draft {
    const char* name;
    TestModel model;
    std::optional<LatentFormat> cache;
    Eagle3::Layer layer = Eagle3::Layer::kDivided;
  };
  constexpr auto kWhole = Eagle3::Layer::kWhole;
  const std::vector<Draft> drafts = {
      {"ngram", tiny_k2(), {}},
      {"latents", with_draft(tiny_k2(), ""), {}},
      {"latents, bf16", with_draft(tiny_k2(), ""), LatentFormat::kBF16},
      {"latents, fp8", with_draft(tiny_k2(), ""), LatentFormat::kF8E4M3},
      {"latents, whole", with_draft(tiny_k2(), ""), {}, kWhole},
      {"Llama's, fp8", with_draft(tiny_k2(), "", 1, 1, kLlama), {}},
      {"Llama's, bf16", with_draft(tiny_k2(), "", 1, 1, kLlama), LatentFormat::kBF16},
      {"Llama's, whole", with_draft(tiny_k2(), "", 1, 1, kLlama), {}, kWhole},
      {"ngram of the hybrid", hybrid_model(), {}},
      {"latents of the hybrid", with_draft(hybrid_model(), ""), {}},
      {"latents of the hybrid, whole, 656 bytes", with_draft(hybrid_model(), ""), LatentFormat::kF8Tiles, kWhole}};
  constexpr std::array<std::pair<int32_t, int32_t>, 4> kRanks = {{{1, 1}, {2, 1}, {2, 2}, {4, 4}}};  // tp, dcp
  const int num_gpus = static_cast<int>(list_gpus().size());
  const auto num_ranks = std::count_if(kRanks.begin(), kRanks.end(), [&](const auto& ranks) {
    return device != Device::kCuda || ranks.first <= num_gpus;
  });  // the first ones
  const std::vector<int> factors = {
      static_cast<int>(drafts.size()), static_cast<int>(kCaches.size()), static_cast<int>(num_ranks), 2, 2, 2, 2};
  std::vector<Setting> out;
  for (const Combination& c : soak_requested() ? full_product(factors) : pairwise_cover(factors)) {
    const Draft& draft = drafts[static_cast<size_t>(c[0])];
    const auto [tp, dcp] = kRanks[static_cast<size_t>(c[2])];
    Setting s{.model = of_ranks(draft.model, "", tp, dcp), .draft_cache = draft.cache, .layer = draft.layer};
    s.model.device = device;
    s.model.cache = kCaches[static_cast<size_t>(c[1])];
    s.chunked = c[3] != 0, s.cached = c[4] != 0, s.crowded = c[5] != 0, s.cancelled = c[6] != 0;
    s.text = fmt::format("{}, {} cache, tp {} x dcp {}{}{}{}{}", draft.name, latent_format_name(*s.model.cache), tp,
                         dcp, s.chunked ? ", chunked" : "", s.cached ? ", cached" : "", s.crowded ? ", preempted" : "",
                         s.cancelled ? ", cancelled" : "");
    out.push_back(std::move(s));
  }
  return out;
}

// Every third job is cancelled once it has three ids, in whatever row that is.
std::vector<Reply> run_cancelling(Engine& engine, const std::vector<Job>& jobs) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Reply> replies;
  };
  const auto state = std::make_shared<State>();  // the engine's thread may still hold it afterwards
  state->replies.resize(jobs.size());
  std::vector<RequestId> ids;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto id = engine.submit(request_of(jobs[i]), [state, i](OutputChunk&& chunk) {
      const std::lock_guard lock(state->mutex);
      add(std::move(chunk), state->replies[i]);
      state->changed.notify_all();
    });
    CHECK(id.ok(), id.error().message);
    ids.push_back(*id);
  }
  for (size_t i = 0; i < jobs.size(); i += 3) {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->replies[i].ids.size() >= 3 || state->replies[i].finish; });
    lock.unlock();
    engine.cancel(ids[i]);
  }
  std::unique_lock lock(state->mutex);
  for (size_t i = 0; i < jobs.size(); ++i)
    state->changed.wait(lock, [&] { return state->replies[i].finish.has_value(); });
  return state->replies;
}

// As far as a cancelled one has come.
void expect_beginnings(std::vector<Reply> plain, const std::vector<Reply>& replies) {
  for (size_t i = 0; i < plain.size(); ++i) {
    ASSERT_LE(replies[i].ids.size(), plain[i].ids.size()) << i;
    EXPECT_TRUE(replies[i].finish == FinishReason::kCancelled || replies[i].ids.size() == plain[i].ids.size()) << i;
    plain[i].ids.resize(replies[i].ids.size());
    plain[i].logprobs.resize(replies[i].ids.size());
  }
  expect_identical(plain, replies);
}

// A cache of so many blocks, on all ranks of a dcp group together, beside the states of two sequences.
EngineConfig with_blocks(EngineConfig config, int32_t blocks) {
  RankConfig rank = config.rank;
  rank.load.ranks = rank.shard();
  const auto parts = rank.device == Device::kCuda ? size_gpu_parts(rank) : size_host_parts(rank);
  CHECK(parts.ok(), parts.error().message);
  const int64_t pages = blocks / rank.limits.dcp_size + 2 * parts->state_pages();
  config.rank.cache_bytes = pages * parts->layout.bytes_per_page();
  config.scheduling.max_model_len = blocks * kBlockTokens;
  return config;
}

// Settings in which each two values of two of these occur together; in a soak, all: drafts, caches, groups of ranks,
// prompts in chunks or not, from the cache or not, preempted or not, cancelled in the middle or not.
void expect_as_without(Device device) {
  const std::vector<Job> jobs = repeating_jobs(4, 4 * 64 - 4);
  std::map<std::string, std::vector<Reply>> plain;  // by model, cache and ranks
  int64_t rows = 0, accepted = 0;
  int num_preempted = 0;
  for (const Setting& s : settings(device)) {
    SCOPED_TRACE(s.text);
    fmt::print("{}\n", s.text);
    EngineConfig config = base_config(s.model);
    config.rank.limits.deterministic = true;
    std::vector<Reply>& wanted =
        plain[fmt::format("{} {} {} {}", s.model.folder, latent_format_name(*s.model.cache), s.model.tp, s.model.dcp)];
    if (wanted.empty()) wanted = run(*make_engine(config), jobs, true);
    config.rank.limits.num_drafts = 3;
    config.rank.ngram = {.least = 1, .most = 3};
    config.rank.draft_model = s.model.draft;
    config.rank.draft_cache = s.draft_cache;
    config.rank.draft_layer = s.layer;
    config.scheduling.prefix_caching = s.cached;
    if (s.chunked) config.rank.limits.max_step_tokens = 96;
    // Admitted with a block more than their prompts have, not all that run have room for one.
    if (s.crowded) config = with_blocks(config, s.model.dcp == 1 ? 9 : s.model.dcp == 2 ? 14 : 16);
    const auto engine = make_engine(config);
    if (s.cached) run(*engine, {jobs.back()}, false);
    std::vector<Reply> replies;
    if (s.cancelled) {
      replies = run_cancelling(*engine, jobs);
      expect_beginnings(wanted, replies);
    } else {
      replies = run(*engine, jobs, true);
      expect_identical(wanted, replies);
    }
    for (const Reply& reply : replies) num_preempted += reply.preemptions.empty() ? 0 : reply.preemptions.back();
    const SpeculationTotals totals = engine->stats().scheduler.speculation;
    rows += totals.rows;
    accepted += totals.accepted();
    if (testing::Test::HasFailure()) return;
  }
  fmt::print("{} rows, {} drafts accepted, {} preemptions\n", rows, accepted, num_preempted);
  EXPECT_GT(accepted, 100);
  EXPECT_GT(num_preempted, 3);
}

TEST(SettingsOfDrafts, AreAsWithout) {
  expect_as_without(Device::kCpu);
}

TEST(SettingsOfDrafts, AreAsWithoutCuda) {
  if (list_gpus().empty()) GTEST_SKIP() << "no GPU";
  expect_as_without(Device::kCuda);
}

// Each rank has the whole layer of a draft whose cache lies in its target's blocks: what it drafts is what ranks draft
// that have a share each, but for near ties.
TEST(WholeDrafts, WithLatentsAreAcceptedAsOften) {
  const TestModel model = with_draft(tiny_k2(), "", 2);
  double lengths[2] = {};
  for (const Eagle3::Layer layer : {Eagle3::Layer::kDivided, Eagle3::Layer::kWhole}) {
    EngineConfig config = base_config(model);
    config.rank.limits.num_drafts = 3;
    config.rank.draft_model = model.draft;
    config.rank.draft_layer = layer;
    const auto engine = make_engine(config);
    run(*engine, task_jobs(model, *engine, 6), true);
    const SpeculationTotals totals = engine->stats().scheduler.speculation;
    lengths[static_cast<int>(layer)] = 1 + static_cast<double>(totals.accepted()) / static_cast<double>(totals.rows);
  }
  fmt::print("mean length: {:.3f} divided, {:.3f} whole\n", lengths[0], lengths[1]);
  EXPECT_GE(lengths[0], 2.5);
  EXPECT_NEAR(lengths[0], lengths[1], 0.05);
}

// On the questions that a model was trained for its own draft is right most of the time, and no less where ranks share
// the cache: a draft reads its whole text.
void expect_accepted(Device device, std::initializer_list<int32_t> sizes) {
  std::vector<TestModel> models = {
      with_draft(tiny_k2(), "tiny-k2"), with_draft(hybrid_model(), "tiny-kimi-linear"),
      with_draft(tiny_k2(), "tiny-k2, whole"),
      with_cache(with_draft(tiny_k2(), "tiny-k2, in fp8"), LatentFormat::kBF16, LatentFormat::kF8E4M3)};
  for (const char* name : {"tiny-k2, Llama's", "tiny-k2, Llama's, whole"})
    models.push_back(with_draft(tiny_k2(), name, 1, 1, kLlama));
  for (TestModel& model : models) {
    model.device = device;
    double alone = 0;
    for (const int32_t ranks : sizes) {
      EngineConfig config = base_config(of_ranks(model, model.name, ranks, ranks));
      if (std::string_view(model.name).ends_with("whole")) config.rank.draft_layer = Eagle3::Layer::kWhole;
      config.rank.limits.num_drafts = 3;
      config.rank.draft_model = model.draft;
      config.rank.draft_cache = model.draft_cache;
      config.rank.limits.deterministic = device == Device::kCuda;
      const auto engine = make_engine(config);
      run(*engine, task_jobs(model, *engine, 10), true);
      const SpeculationTotals totals = engine->stats().scheduler.speculation;
      const auto rows = static_cast<double>(totals.rows);
      const double length = 1 + static_cast<double>(totals.accepted()) / rows;
      fmt::print("{}, {} ranks: {} rows, accepted by place {:.3f} {:.3f} {:.3f}, mean length {:.2f}\n", model.name,
                 ranks, totals.rows, static_cast<double>(totals.accepted_at[0]) / rows,
                 static_cast<double>(totals.accepted_at[1]) / rows, static_cast<double>(totals.accepted_at[2]) / rows,
                 length);
      EXPECT_GE(length, 2.5) << model.name;
      if (ranks == 1) alone = length;
      EXPECT_NEAR(length, alone, 0.05) << model.name << " of " << ranks << " ranks";
    }
  }
}

TEST(BundledDrafts, AreAccepted) {
  expect_accepted(Device::kCpu, {1, 2});
}

// The drafts of the GPU are those of the CPU but for near ties.
TEST(BundledDrafts, AreAcceptedCuda) {
  if (list_gpus().empty()) GTEST_SKIP() << "no GPU";
  if (list_gpus().size() > 1) return expect_accepted(Device::kCuda, {1, 2});
  expect_accepted(Device::kCuda, {1});
}

// In the default mode a GPU rounds otherwise for other numbers of rows.
TEST(BundledDrafts, LeaveGreedyRepliesAloneCuda) {
  if (list_gpus().empty()) GTEST_SKIP() << "no GPU";
  for (const TestModel& model : {with_draft(tiny_k2(), "tiny-k2"), with_draft(hybrid_model(), "tiny-kimi-linear"),
                                 with_draft(tiny_k2(), "tiny-k2, Llama's", 1, 1, kLlama)}) {
    EngineConfig config = base_config(on_gpu(model, model.name));
    const auto plain = make_engine(config);
    config.rank.limits.num_drafts = 3;
    config.rank.draft_model = model.draft;
    const auto drafting = make_engine(config);
    const std::vector<Job> jobs = task_jobs(model, *plain, 10);
    const std::vector<Reply> wanted = run(*plain, jobs, true), got = run(*drafting, jobs, true);
    size_t flips = 0;
    for (size_t i = 0; i < jobs.size(); ++i) flips += compare_greedy(wanted[i], got[i]).parts ? 1 : 0;
    fmt::print("{}: {} of {} greedy replies part at a near tie\n", model.name, flips, jobs.size());
    EXPECT_LE(flips, jobs.size() / 10);
    expect_drafted(*drafting);
  }
}

// On one GPU, where there is one.
std::vector<TestModel> on_one_rank() {
  std::vector<TestModel> models = {tiny_k2(), hybrid_model(), with_draft(tiny_k2(), "TinyK2Eagle"),
                                   with_draft(hybrid_model(), "HybridEagle"),
                                   with_draft(tiny_k2(), "TinyK2Llama", 1, 1, kLlama)};
  if (list_gpus().empty()) return models;
  for (const TestModel& model :
       {on_gpu(tiny_k2(), "TinyK2Cuda"), on_gpu(hybrid_model(), "HybridCuda"),
        on_gpu(with_draft(tiny_k2(), ""), "TinyK2EagleCuda"), on_gpu(with_draft(hybrid_model(), ""), "HybridEagleCuda"),
        on_gpu(with_cache(with_draft(tiny_k2(), ""), LatentFormat::kF8E4M3), "TinyK2CudaFp8"),
        on_gpu(with_cache(tiny_k2(), LatentFormat::kF8Tiles), "TinyK2CudaTiles"),
        on_gpu(with_draft(tiny_k2(), "", 1, 1, kLlama), "TinyK2LlamaCuda"),
        on_gpu(with_cache(with_draft(tiny_k2(), "", 1, 1, kLlama), LatentFormat::kF8E4M3, LatentFormat::kBF16),
               "TinyK2LlamaCudaBf16")})
    models.push_back(model);
  return models;
}

std::vector<TestModel> on_ranks() {
  std::vector<TestModel> models = on_one_rank();
  for (const TestModel& model : {of_ranks(tiny_k2(), "TinyK2Tp", 2, 1), of_ranks(hybrid_model(), "HybridDcp", 2, 2),
                                 with_draft(tiny_k2(), "TinyK2EagleTpDcp", 2, 2)})
    models.push_back(model);
  if (std::ssize(list_gpus()) < 2) return models;
  for (const TestModel& model :
       {on_gpu(of_ranks(hybrid_model(), "", 2, 2), "HybridCudaDcp"),
        on_gpu(with_draft(tiny_k2(), "", 2, 1), "TinyK2EagleCudaTp"),
        on_gpu(with_draft(tiny_k2(), "", 2, 1, kLlama), "TinyK2LlamaCudaTp"),
        on_gpu(with_draft(tiny_k2(), "", 2, 2, kLlama), "TinyK2LlamaCudaTpDcp"),
        on_gpu(with_cache(with_draft(tiny_k2(), "", 2, 2), LatentFormat::kBF16, LatentFormat::kF8E4M3),
               "TinyK2EagleCudaDcpFp8Draft"),
        on_gpu(with_draft(hybrid_model(), "", 2, 2), "HybridEagleCudaDcp")})
    models.push_back(model);
  return models;
}

INSTANTIATE_TEST_SUITE_P(, EqualityOfDrafts, testing::ValuesIn(on_ranks()), name_of);
INSTANTIATE_TEST_SUITE_P(, EqualityOfDraftsOnOneRank, testing::ValuesIn(on_one_rank()), name_of);

}  // namespace
}  // namespace perigee

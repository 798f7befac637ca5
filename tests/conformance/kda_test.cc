// Kimi Delta Attention of every backend: against the recurrence in double, resumed anywhere, and with commits deferred.
//
// Bound: ||backend - double|| / ||double|| <= 1e-5; of the CUDA backend, whose outputs are bf16, see its KdaBackend.
#include <gtest/gtest.h>

#include <memory>

#include "base/soak.h"
#include "kda_backends.h"
#include "kda_judge.h"

namespace perigee {
namespace {

constexpr KdaInputStyle kStyles[] = {KdaInputStyle::kPlain, KdaInputStyle::kCorrelatedKeys,
                                     KdaInputStyle::kGatesNearZero, KdaInputStyle::kGatesNearMinusInfinity,
                                     KdaInputStyle::kMixedGates};

// ||got - wanted||^2 and ||wanted||^2 added up.
struct Error {
  double error = 0, norm = 0;
  void add_states(const std::vector<float>& units, const std::vector<double>& wanted) {  // without convolution tails
    for (size_t i = 0; i < units.size(); i += 128 * 128 + 9 * 128) {
      add({units.begin() + static_cast<std::ptrdiff_t>(i), units.begin() + static_cast<std::ptrdiff_t>(i) + 128 * 128},
          {wanted.begin() + static_cast<std::ptrdiff_t>(i),
           wanted.begin() + static_cast<std::ptrdiff_t>(i) + 128 * 128});
    }
  }
  void add(const std::vector<float>& got, const std::vector<double>& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << i;
      error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
      norm += wanted[i] * wanted[i];
    }
  }
  double relative() const { return std::sqrt(error / norm); }
};

struct Judged {
  std::vector<std::vector<double>> rows;
  std::vector<double> units;
};

Judged judge(const KdaWorld& world, uint64_t sequence, int32_t length) {
  KdaJudge judge(world.weights);
  KdaRows rows;
  for (int32_t t = 0; t < length; ++t) world.append(rows, sequence, t);
  Judged out;
  for (int32_t t = 0; t < length; ++t) out.rows.push_back(judge.run(rows, t));
  out.units = judge.units();
  return out;
}

std::string name_of(const KdaBackend& backend, int64_t heads, int32_t length, KdaInputStyle style) {
  return str_cat(backend.name, ", ", heads, " heads, ", length, " tokens, style ", static_cast<int>(style));
}

void expect_near_judge(const KdaBackend& backend, int64_t heads, int32_t length, KdaInputStyle style,
                       bool step = true) {
  SCOPED_TRACE(name_of(backend, heads, length, style));
  const KdaWorld world(heads, style);
  const Judged wanted = judge(world, 0, length);
  // All at once, in chunk form; then token by token.
  KdaMemory whole = backend.memory(world), stepped = backend.memory(world);
  const auto rows = run_kda(backend, world, whole, {{.num_tokens = length, .commit_all = true}});
  Error prefill, decode, state, stepped_state;
  for (size_t t = 0; t < rows.size(); ++t) prefill.add(rows[t], wanted.rows[t]);
  for (int32_t t = 0; t < length && step; ++t) {
    const auto row =
        run_kda(backend, world, stepped, {{.position = t, .num_tokens = 1, .committed = std::max(t - 1, 0)}});
    decode.add(row[0], wanted.rows[static_cast<size_t>(t)]);
  }
  state.add_states(whole.units(whole.pages(0)), wanted.units);
  EXPECT_LE(prefill.relative(), backend.output_bound);
  EXPECT_LE(state.relative(), backend.state_bound);
  if (!step) return;
  run_kda(backend, world, stepped, {{.position = length, .num_tokens = 1, .committed = length - 1}});
  stepped_state.add_states(stepped.units(stepped.pages(0)), wanted.units);
  EXPECT_LE(decode.relative(), backend.output_bound);
  EXPECT_LE(stepped_state.relative(), backend.stepped_state_bound);
}

TEST(Kda, EqualsTheRecurrenceInDouble) {
  const std::vector<int32_t> lengths =
      ends_if_sanitized({1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129});
  for (const KdaBackend& backend : kda_backends())
    for (const KdaInputStyle style :
         few_if_gpu_sanitizer<KdaInputStyle>({std::begin(kStyles), std::end(kStyles)}, {KdaInputStyle::kMixedGates})) {
      for (const int32_t length : few_if_gpu_sanitizer(lengths, {1, 5, 34})) {
        expect_near_judge(backend, 1, length, style);
      }
      for (const int64_t heads : few_if_gpu_sanitizer<int64_t>({3, 8}, {3}))
        expect_near_judge(backend, heads, gpu_sanitizer() ? 40 : 129, style);
    }
}

TEST(Kda, EqualsTheRecurrenceInDoubleWithManyHeads) {
  const int32_t length = gpu_sanitizer() ? 34 : 66;
  for (const KdaBackend& backend : kda_backends()) expect_near_judge(backend, 32, length, KdaInputStyle::kPlain);
}

TEST(Kda, EqualsTheRecurrenceInDoubleOverLongContexts) {
  for (const KdaBackend& backend : kda_backends()) {
    if (gpu_sanitizer()) {  // more chunks than one launch takes
      expect_near_judge(backend, 1, 2100, KdaInputStyle::kPlain, false);
      continue;
    }
    for (const KdaInputStyle style : kStyles) expect_near_judge(backend, 1, kSanitized ? 513 : 4097, style);
  }
}

// Two ways to the same bits, compared as bits.
void expect_same(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

TEST(Kda, ResumesAtAnyToken) {
  constexpr int32_t kLength = 150;
  for (const KdaBackend& backend : kda_backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(1, KdaInputStyle::kPlain);
    const Judged wanted = judge(world, 0, kLength);
    KdaMemory whole = backend.memory(world);
    const auto rows = run_kda(backend, world, whole, {{.num_tokens = kLength, .commit_all = true}});
    for (int32_t split = 1; split < kLength; split += gpu_sanitizer() ? 37 : 1) {
      KdaMemory memory = backend.memory(world);
      auto got = run_kda(backend, world, memory, {{.num_tokens = split, .commit_all = true}});
      const auto rest =
          run_kda(backend, world, memory,
                  {{.position = split, .num_tokens = kLength - split, .committed = split, .commit_all = true}});
      got.insert(got.end(), rest.begin(), rest.end());
      Error error;
      for (size_t t = 0; t < got.size(); ++t) error.add(got[t], wanted.rows[t]);
      EXPECT_LE(error.relative(), backend.output_bound) << "cut at " << split;
      if (split % 64 != 0) continue;  // pieces that begin at multiples of 64 are the same pieces
      for (size_t t = 0; t < got.size(); ++t) expect_same(got[t], rows[t]);
      expect_same(memory.units(memory.pages(0)), whole.units(whole.pages(0)));
    }
  }
}

// Prefills and decodes in any order and size.
TEST(Kda, AnyMixtureOfRunsIsNearTheJudge) {
  constexpr int32_t kLength = 400;
  for (const KdaBackend& backend : kda_backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(2, KdaInputStyle::kMixedGates);
    const Judged wanted = judge(world, 0, kLength);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Rng rng(seed);
      KdaMemory memory = backend.memory(world);
      Error error;
      for (int32_t position = 0, committed = 0; position < kLength;) {
        const bool prefill = rng.chance(0.5);
        const auto n =
            static_cast<int32_t>(std::min<int64_t>(rng.between(1, prefill ? 100 : kKdaRing), kLength - position));
        const auto rows =
            run_kda(backend, world, memory,
                    {{.position = position, .num_tokens = n, .committed = committed, .commit_all = prefill}});
        for (int32_t t = 0; t < n; ++t)
          error.add(rows[static_cast<size_t>(t)], wanted.rows[static_cast<size_t>(position + t)]);
        committed = prefill ? position + n : position;
        position += n;
      }
      EXPECT_LE(error.relative(), backend.output_bound) << seed;
    }
  }
}

// A sequence whose last tokens are rejected at random, beside one that never sees a wrong token.
class DeferredCommit {
 public:
  DeferredCommit(const KdaBackend& backend, const KdaWorld& world)
      : backend_(backend), world_(world), memory_(backend.memory(world)), never_(backend.memory(world)) {
    run_kda(backend, world, memory_, {{.num_tokens = kPrompt, .commit_all = true}});
    run_kda(backend, world, never_, {{.num_tokens = kPrompt, .commit_all = true}});
  }

  // KdaFeeds up to K + 1 tokens of which some count (none, where a step ends late), then compares.
  void round(Rng& rng) {
    const auto n = static_cast<int32_t>(rng.between(1, kKdaRing));
    const auto count = static_cast<int32_t>(rng.between(rng.chance(0.1) ? 0 : 1, n));
    const int32_t checkpoint = (committed_ / 16 + 1) * 16;
    const auto rows = run_kda(backend_, world_, memory_,
                              {{.position = position_,
                                .num_tokens = n,
                                .committed = committed_,
                                .checkpoints = {checkpoint},
                                .first_wrong = position_ + count}});
    if (position_ >= checkpoint) checkpoint_ = memory_.units(memory_.checkpoint(0));
    if (position_ > checkpoint) expect_same(checkpoint_, never_at_checkpoint_);  // else step_never() comes there
    committed_ = position_;
    for (int32_t t = 0; t < count; ++t, ++position_) expect_same(rows[static_cast<size_t>(t)], step_never());
  }

  // The state at the position, on both sides.
  void finish() {
    run_kda(backend_, world_, memory_, {{.position = position_, .num_tokens = 1, .committed = committed_}});
    step_never();
    expect_same(memory_.units(memory_.pages(0)), never_.units(never_.pages(0)));
  }

 private:
  static constexpr int32_t kPrompt = 21;

  // The token at position_, fed alone; the one before is committed by it.
  std::vector<float> step_never() {
    auto rows = run_kda(backend_, world_, never_,
                        {{.position = position_, .num_tokens = 1, .committed = std::max(position_ - 1, kPrompt)}});
    if (position_ % 16 == 0) {
      never_at_checkpoint_ = never_.units(never_.pages(0));
      if (position_ == committed_) expect_same(checkpoint_, never_at_checkpoint_);
    }
    return rows[0];
  }

  const KdaBackend& backend_;
  const KdaWorld& world_;
  KdaMemory memory_, never_;
  int32_t position_ = kPrompt, committed_ = kPrompt;
  std::vector<float> checkpoint_, never_at_checkpoint_;  // the states at the last multiple of 16, on both sides
};

TEST(Kda, RejectedTokensNeverWere) {
  const int rounds = gpu_sanitizer() ? 10 : kSanitized ? 500 : soak_requested() ? 100'000 : 10'000;
  for (const KdaBackend& backend : kda_backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(1, KdaInputStyle::kMixedGates);
    DeferredCommit pair(backend, world);
    Rng rng(7);
    for (int i = 0; i < rounds && !testing::Test::HasFatalFailure(); ++i) pair.round(rng);
    pair.finish();
  }
}

TEST(Kda, RejectedTokensNeverWereInManyHeads) {
  for (const KdaBackend& backend : kda_backends())
    for (const int64_t heads : {3, 32}) {
      SCOPED_TRACE(str_cat(backend.name, " ", heads));
      const KdaWorld world(heads, KdaInputStyle::kGatesNearZero);
      DeferredCommit pair(backend, world);
      Rng rng(8);
      for (int i = 0; i < (gpu_sanitizer() ? 4 : 60) && !testing::Test::HasFatalFailure(); ++i) pair.round(rng);
      pair.finish();
    }
}

// Wherever the chunk begins and ends, however many there are, in one launch's pieces of a long chunk or across them.
TEST(Kda, CheckpointsOfPrefillAreTheStateThere) {
  struct Case {
    int32_t position, end;
    std::vector<int32_t> at;
  };
  std::vector<Case> cases = {{0, 192, {64}},
                             {0, 192, {192}},
                             {0, 192, {64, 128, 192}},
                             {37, 300, {64, 192}},
                             {37, 300, {128, 192, 256}},
                             {64, 200, {128, 192}},
                             {63, 65, {64}}};
  if (!kSanitized && !gpu_sanitizer()) cases.push_back({0, 4500, {1984, 2048, 2112, 4096}});
  for (const KdaBackend& backend : kda_backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(2, KdaInputStyle::kPlain);
    for (const Case& c : cases) {
      SCOPED_TRACE(str_cat(c.position, " to ", c.end));
      KdaMemory memory = backend.memory(world), plain = backend.memory(world);
      for (KdaMemory* m : {&memory, &plain})
        if (c.position > 0) run_kda(backend, world, *m, {{.num_tokens = c.position, .commit_all = true}});
      KdaFeed run{
          .position = c.position, .num_tokens = c.end - c.position, .committed = c.position, .commit_all = true};
      const auto rows_without = run_kda(backend, world, plain, {run});
      run.checkpoints = c.at;
      const auto rows = run_kda(backend, world, memory, {run});
      for (size_t t = 0; t < rows.size(); ++t) expect_same(rows[t], rows_without[t]);
      expect_same(memory.units(memory.pages(0)), plain.units(plain.pages(0)));
      for (size_t i = 0; i < c.at.size(); ++i) {
        const int32_t at = c.at[i];
        const std::vector<float> saved = memory.units(memory.checkpoint(0, static_cast<int32_t>(i)));
        KdaMemory until = backend.memory(world), resumed = backend.memory(world);
        if (c.position > 0) run_kda(backend, world, until, {{.num_tokens = c.position, .commit_all = true}});
        run_kda(backend, world, until,
                {{.position = c.position, .num_tokens = at - c.position, .committed = c.position, .commit_all = true}});
        expect_same(saved, until.units(until.pages(0)));
        // Another sequence goes on from the checkpoint.
        resumed.load_units(resumed.pages(0), saved);
        const KdaFeed rest{.position = at, .num_tokens = c.end - at, .committed = at, .commit_all = true};
        if (rest.num_tokens == 0) continue;
        const auto rest_rows = run_kda(backend, world, resumed, {rest});
        for (size_t t = 0; t < rest_rows.size(); ++t)
          expect_same(rest_rows[t], rows[static_cast<size_t>(at - c.position) + t]);
        expect_same(resumed.units(resumed.pages(0)), memory.units(memory.pages(0)));
      }
    }
    // Those that lie elsewhere are left alone.
    KdaMemory memory = backend.memory(world), without = backend.memory(world);
    run_kda(backend, world, memory, {{.num_tokens = 70, .commit_all = true, .checkpoints = {128, 192}}});
    run_kda(backend, world, without, {{.num_tokens = 70, .commit_all = true}});
    EXPECT_TRUE(memory == without);
  }
}

// One checkpoint among the tokens that a prefill replays, the others among its own.
TEST(Kda, CheckpointsOfAReplayAndItsPrefill) {
  for (const KdaBackend& backend : kda_backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(2, KdaInputStyle::kPlain);
    KdaMemory memory = backend.memory(world), steps = backend.memory(world);
    for (KdaMemory* m : {&memory, &steps}) {
      run_kda(backend, world, *m, {{.num_tokens = 62, .commit_all = true}});
      run_kda(backend, world, *m, {{.position = 62, .num_tokens = 3, .committed = 62}});
    }
    run_kda(backend, world, memory,
            {{.position = 65, .num_tokens = 130, .committed = 62, .commit_all = true, .checkpoints = {64, 128, 192}}});
    run_kda(backend, world, steps, {{.position = 64, .num_tokens = 1, .committed = 62}});
    expect_same(memory.units(memory.checkpoint(0, 0)), steps.units(steps.pages(0)));
    for (const int32_t index : {1, 2}) {
      KdaMemory until = backend.memory(world);
      run_kda(backend, world, until, {{.num_tokens = 62, .commit_all = true}});
      run_kda(backend, world, until, {{.position = 62, .num_tokens = 3, .committed = 62}});
      run_kda(backend, world, until,
              {{.position = 65, .num_tokens = 64 * index - 1, .committed = 62, .commit_all = true}});
      expect_same(memory.units(memory.checkpoint(0, index)), until.units(until.pages(0)));
    }
  }
}

// Prefill, replay with prefill, verify and decode rows in one batch, on one to three threads, are what each is alone;
// nothing else is written.
TEST(Kda, SequencesOfABatchDoNotMeet) {
  const std::vector<KdaFeed> prompts = {{.sequence = 0, .num_tokens = 64, .commit_all = true, .checkpoints = {64}},
                                        {.sequence = 1, .num_tokens = 5, .commit_all = true},
                                        {.sequence = 2, .num_tokens = 130, .commit_all = true},
                                        {.sequence = 3, .num_tokens = 1, .commit_all = true}};
  const std::vector<KdaFeed> next = {{.sequence = 0,
                                      .position = 64,
                                      .num_tokens = 100,
                                      .committed = 64,
                                      .commit_all = true,
                                      .checkpoints = {128, 192}},
                                     {.sequence = 1, .position = 5, .num_tokens = 4, .committed = 5},
                                     {.sequence = 2, .position = 130, .num_tokens = 1, .committed = 130},
                                     {.sequence = 3, .position = 1, .num_tokens = 3, .committed = 1}};
  const std::vector<KdaFeed> last = {
      {.sequence = 0, .position = 164, .num_tokens = 1, .committed = 164},
      {.sequence = 1, .position = 9, .num_tokens = 4, .committed = 5, .checkpoints = {7}},
      {.sequence = 2, .position = 131, .num_tokens = 2, .committed = 130, .checkpoints = {131}},
      {.sequence = 3, .position = 3, .num_tokens = 40, .committed = 1, .commit_all = true, .checkpoints = {2}}};
  std::vector<KdaBackend> all = kda_backends();
  for (const int threads : {1, 2, 3}) {
    if (!gpu_sanitizer())
      all.push_back(cpu_backend(str_cat("best on ", threads, " threads"), isa_under_test(), threads));
  }
  std::vector<std::vector<float>> of_one_thread;
  for (const KdaBackend& backend : all) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(5, KdaInputStyle::kPlain);
    KdaMemory together = backend.memory(world, 4), apart = backend.memory(world, 4);
    std::vector<std::vector<float>> rows;
    for (const auto& runs : {prompts, next, last}) {
      rows = run_kda(backend, world, together, runs);
      size_t row = 0;
      for (const KdaFeed& alone : runs) {
        for (const auto& one : run_kda(backend, world, apart, {alone})) expect_same(one, rows[row++]);
      }
    }
    EXPECT_TRUE(together == apart);
    if (!backend.name.starts_with("best")) continue;
    if (of_one_thread.empty()) of_one_thread = rows;
    for (size_t r = 0; r < rows.size(); ++r) expect_same(rows[r], of_one_thread.at(r));
  }
}

TEST(Kda, AllocatesNothingOnceWarm) {
  const Isa best = isa_under_test();
  ThreadPool pool(2);
  Arena arena, scratch;
  const KdaBackend backend{.name = "cpu",
                           .attend =
                               [&](const auto& in, const auto& w, const auto& batch, const auto& state) {
                                 return cpu::kda_attend({pool, arena, scratch, best}, in, w, batch, state);
                               },
                           .begin_step = [&] { arena.reset(); }};
  const KdaWorld world(4, KdaInputStyle::kPlain);
  KdaMemory memory = backend.memory(world);
  run_kda(backend, world, memory, {{.num_tokens = 100, .commit_all = true}});
  const int64_t growths = arena.num_growths() + scratch.num_growths();
  run_kda(backend, world, memory, {{.position = 100, .num_tokens = 100, .committed = 100, .commit_all = true}});
  run_kda(backend, world, memory, {{.position = 200, .num_tokens = 4, .committed = 200}});
  run_kda(backend, world, memory, {{.position = 204, .num_tokens = 1, .committed = 200}});
  EXPECT_EQ(arena.num_growths() + scratch.num_growths(), growths);
}

TEST(Kda, ConvolutionTapsAreStackedByTap) {
  const std::vector<float> q = {1, 2, 3, 4, 5, 6, 7, 8}, k = {11, 12, 13, 14, 15, 16, 17, 18},
                           v = {21, 22, 23, 24, 25, 26, 27, 28};
  const auto raw = [](const std::vector<float>& m) {
    return RawMatrix{.format = WeightFormat::kF32, .out = 2, .in = 4, .data = m.data()};
  };
  const std::vector<float> taps = {1, 5, 11, 15, 21, 25, 2, 6, 12, 16, 22, 26,
                                   3, 7, 13, 17, 23, 27, 4, 8, 14, 18, 24, 28};
  EXPECT_EQ(kda_conv_taps(raw(q), raw(k), raw(v)), taps);
}

// A KDA layer from hidden states, with projections: outputs of one prefill.
std::vector<float> run_layer(Ops& ops, const KdaWorld& world, int32_t num_tokens) {
  constexpr int64_t kHidden = 96;
  const int64_t heads = world.weights.shape.heads;
  std::vector<std::vector<uint16_t>> kept;
  const auto matrix = [&](int64_t out, int64_t in) {
    kept.emplace_back();
    const float spread = 3.4f / std::sqrt(static_cast<float>(in));
    for (int64_t i = 0; i < out * in; ++i)
      kept.back().push_back(f32_to_bf16(spread * (random_unit(kept.size(), static_cast<uint64_t>(i)) - 0.5f)));
    return ops.pack_linear(RawMatrix{.format = WeightFormat::kBF16, .out = out, .in = in, .data = kept.back().data()});
  };
  KdaWeights w = world.weights;
  w.qkv = matrix(3 * heads * 128, kHidden);
  w.gates = matrix(2 * 128 + heads, kHidden);
  w.f_b = matrix(heads * 128, 128);
  w.g_b = matrix(heads * 128, 128);
  for (VectorWeight* v : {&w.conv, &w.a, &w.dt_bias, &w.o_norm}) *v = ops.pack_vector(*v);
  const KdaMemory memory(w.shape, 1, kKdaRing, ops.on_device() ? &ops : nullptr);
  const SequenceRows rows{.num_tokens = num_tokens, .state_pages = memory.pages(0), .commit_all = true};
  Batch batch;
  batch.sequences = {&rows, 1};
  ops.begin_step();
  const PlacedBatch placed(batch, ops, memory.pages_each());
  std::vector<uint16_t> narrow;
  std::vector<float> wide;
  for (int64_t i = 0; i < num_tokens * kHidden; ++i) {
    narrow.push_back(f32_to_bf16(2 * random_unit(99, static_cast<uint64_t>(i)) - 1));
    wide.push_back(bf16_to_f32(narrow.back()));
  }
  const Tensor x = ops.arena().tensor(ops.wide_dtype(), num_tokens, kHidden);
  const bool f32 = x.dtype == DType::kF32;
  ops.copy(x.data, f32 ? static_cast<void*>(wide.data()) : narrow.data(), wide.size() * (f32 ? 4 : 2));
  const Tensor y = ops.kda(x, w, placed.batch(), memory.layer);
  std::vector<float> out(static_cast<size_t>(y.rows * y.cols));
  if (y.dtype == DType::kF32) {
    ops.copy(out.data(), y.data, out.size() * 4);
    return out;
  }
  std::vector<uint16_t> bits(out.size());
  ops.copy(bits.data(), y.data, bits.size() * 2);
  std::transform(bits.begin(), bits.end(), out.begin(), bf16_to_f32);
  return out;
}

// Every path against ref.
TEST(Kda, LayerIsThatOfRef) {
  for (const auto& [heads, num_tokens] : {std::pair<int64_t, int32_t>{3, 37}, {8, 37}, {8, 5}}) {
    const KdaWorld world(heads, KdaInputStyle::kPlain);
    const std::vector<float> wanted = run_layer(*make_ref_ops(), world, num_tokens);
    ASSERT_EQ(wanted.size(), static_cast<size_t>(num_tokens * heads * 128));
    std::vector<Result<std::unique_ptr<Ops>>> all;
    if (!gpu_sanitizer())
      for (const Isa isa : isas_under_test()) all.push_back(make_cpu_ops({.num_threads = 2, .isa = isa}));
    if (heads % 8 == 0)
      all.push_back(
          make_cuda_ops({.separate_arrays = gpu_sanitizer(),
                         .no_library = gpu_sanitizer_of_own_kernels()}));  // whose rows begin at multiples of 16 bytes
    for (const auto& ops : all) {
      if (!ops.ok()) continue;
      Error error;
      error.add(run_layer(**ops, world, num_tokens), {wanted.begin(), wanted.end()});
      EXPECT_LE(error.relative(), (*ops)->wide_dtype() == DType::kF32 ? 1e-4 : 1e-2) << (*ops)->name();
    }
  }
}

// Sequences of length 0, whose pages are nowhere, between others: on a device, where a step's rows fill a bucket.
TEST(Kda, PaddingIsPassedOver) {
  auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
  if (!ops.ok()) GTEST_SKIP() << ops.error().message;
  const KdaBackend backend = cuda_backend(std::move(*ops));
  const KdaWorld world(8, KdaInputStyle::kPlain);
  KdaMemory plain = backend.memory(world, 3), padded = backend.memory(world, 3);
  for (KdaMemory* memory : {&plain, &padded})
    run_kda(backend, world, *memory,
            {{.sequence = 0, .num_tokens = 40, .commit_all = true},
             {.sequence = 1, .num_tokens = 7, .commit_all = true},
             {.sequence = 2, .num_tokens = 1, .commit_all = true}});
  const KdaFeed next[] = {{.sequence = 0, .position = 40, .num_tokens = 2, .committed = 40},
                          {.sequence = 1, .position = 7, .num_tokens = 1, .committed = 7},
                          {.sequence = 2, .position = 1, .num_tokens = 50, .committed = 1, .commit_all = true}};
  const KdaFeed padding{.position = -1, .num_tokens = 1};
  const auto wanted = run_kda(backend, world, plain, {next[0], next[1], next[2]});
  const auto got = run_kda(backend, world, padded, {next[0], padding, next[1], next[2], padding});
  ASSERT_EQ(got.size(), wanted.size() + 2);
  for (size_t r = 0; r < wanted.size(); ++r) expect_same(got[r < 2 ? r : r + 1], wanted[r]);
  EXPECT_TRUE(padded == plain);
}

}  // namespace
}  // namespace perigee

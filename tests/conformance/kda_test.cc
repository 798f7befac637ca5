// Kimi Delta Attention of every backend: against the recurrence in double, resumed anywhere, and with commits deferred.
//
// Bound: ||backend - double|| / ||double|| <= 1e-5.
#include "ops/cpu/kda.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "base/soak.h"
#include "kda_judge.h"
#include "kda_world.h"

namespace perigee {
namespace {

constexpr int32_t kRing = 4;
constexpr KdaInputStyle kStyles[] = {KdaInputStyle::kPlain, KdaInputStyle::kCorrelatedKeys,
                                     KdaInputStyle::kGatesNearZero, KdaInputStyle::kGatesNearMinusInfinity,
                                     KdaInputStyle::kMixedGates};

// One way to run the op.
struct Backend {
  std::string name;
  DType wide = DType::kF32;
  std::function<Tensor(const KdaInputs&, const KdaWeights&, const Batch&, const StateLayer&)> attend;
  std::function<void()> begin_step;
};

Backend ops_backend(const std::string& name, std::shared_ptr<Ops> ops) {
  return {.name = name,
          .wide = ops->wide_dtype(),
          .attend = [ops](const auto& in, const auto& w, const auto& batch,
                          const auto& state) { return ops->kda_attend(in, w, batch, state); },
          .begin_step = [ops] { ops->begin_step(); }};
}

// The CPU backend's function itself; its memory is full of NaN before every eighth step.
Backend cpu_backend(const std::string& name, Isa isa, int num_threads) {
  struct Machine {
    explicit Machine(int n) : pool(n) {}
    ThreadPool pool;
    Arena arena, scratch;
    int64_t steps = 0;
    void begin_step() {
      for (Arena* memory : {&arena, &scratch}) {
        memory->reset();
        if (steps % 8 == 0) std::memset(memory->allocate(1 << 20), 0xFF, 1 << 20);
        memory->reset();
      }
      ++steps;
    }
  };
  auto m = std::make_shared<Machine>(num_threads);
  return {.name = name,
          .attend =
              [m, isa](const auto& in, const auto& w, const auto& batch, const auto& state) {
                const CpuContext cpu{m->pool, m->arena, m->scratch, isa};
                return cpu::kda_attend(cpu, in, w, batch, state);
              },
          .begin_step = [m] { m->begin_step(); }};
}

std::vector<Backend> backends() {
  std::vector<Backend> out = {ops_backend("ref", make_ref_ops())};
  const Result<Isa> best = detect_isa({});
  if (best.ok()) out.push_back(cpu_backend("avx2", Isa::kAvx2, 2));
  if (best.ok() && *best != Isa::kAvx2) out.push_back(cpu_backend("avx512", Isa::kAvx512, 2));
  return out;
}

// Some new tokens of one sequence.
struct Feed {
  uint64_t sequence = 0;
  int32_t position = 0, num_tokens = 0, committed = 0;
  bool commit_all = false;
  int32_t checkpoint = -1;
  int32_t first_wrong = 1 << 30;  // tokens from this position on are other ones than those that count
};

// Runs a batch; -> outputs as f32 [rows][h * 128].
std::vector<std::vector<float>> run(const Backend& backend, const KdaWorld& world, KdaMemory& memory,
                                    const std::vector<Feed>& runs) {
  KdaRows rows;
  std::vector<SequenceRows> sequences;
  for (const Feed& r : runs) {
    const auto slot = static_cast<int32_t>(r.sequence);
    sequences.push_back(
        {.first_row = static_cast<int32_t>(rows.b.size()) / static_cast<int32_t>(world.weights.shape.heads),
         .num_tokens = r.num_tokens,
         .position = r.position,
         .state_pages = memory.pages(slot),
         .slot = slot,
         .committed = r.committed,
         .commit_all = r.commit_all,
         .checkpoint_position = r.checkpoint,
         .checkpoint_pages = memory.checkpoint(slot)});
    for (int32_t t = r.position; t < r.position + r.num_tokens; ++t) {
      world.append(rows, r.sequence, t, t >= r.first_wrong ? static_cast<uint64_t>(r.position) + 1 : 0);
    }
  }
  Batch batch;
  batch.sequences = sequences;
  backend.begin_step();
  const Tensor out = backend.attend(world.inputs(rows, backend.wide), world.weights, batch, memory.layer);
  std::vector<std::vector<float>> result(static_cast<size_t>(out.rows));
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) {
      result[static_cast<size_t>(r)].push_back(out.dtype == DType::kF32 ? out.row<float>(r)[c]
                                                                        : bf16_to_f32(out.row<uint16_t>(r)[c]));
    }
  }
  return result;
}

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

std::string name_of(const Backend& backend, int64_t heads, int32_t length, KdaInputStyle style) {
  return str_cat(backend.name, ", ", heads, " heads, ", length, " tokens, style ", static_cast<int>(style));
}

void expect_near_judge(const Backend& backend, int64_t heads, int32_t length, KdaInputStyle style) {
  SCOPED_TRACE(name_of(backend, heads, length, style));
  const KdaWorld world(heads, style);
  const Judged wanted = judge(world, 0, length);
  // All at once, in chunk form; then token by token.
  KdaMemory whole(world.weights.shape, 1, kRing), stepped(world.weights.shape, 1, kRing);
  const auto rows = run(backend, world, whole, {{.num_tokens = length, .commit_all = true}});
  Error prefill, decode, state, stepped_state;
  for (size_t t = 0; t < rows.size(); ++t) prefill.add(rows[t], wanted.rows[t]);
  for (int32_t t = 0; t < length; ++t) {
    const auto row = run(backend, world, stepped, {{.position = t, .num_tokens = 1, .committed = std::max(t - 1, 0)}});
    decode.add(row[0], wanted.rows[static_cast<size_t>(t)]);
  }
  run(backend, world, stepped, {{.position = length, .num_tokens = 1, .committed = length - 1}});
  state.add_states(whole.units(whole.pages(0)), wanted.units);
  stepped_state.add_states(stepped.units(stepped.pages(0)), wanted.units);
  EXPECT_LE(prefill.relative(), 1e-5);
  EXPECT_LE(decode.relative(), 1e-5);
  EXPECT_LE(state.relative(), 1e-5);
  EXPECT_LE(stepped_state.relative(), 1e-5);
}

TEST(Kda, EqualsTheRecurrenceInDouble) {
  for (const Backend& backend : backends())
    for (const KdaInputStyle style : kStyles) {
      for (const int32_t length :
           ends_if_sanitized({1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129})) {
        expect_near_judge(backend, 1, length, style);
      }
      for (const int64_t heads : {3, 8}) expect_near_judge(backend, heads, 129, style);
    }
}

TEST(Kda, EqualsTheRecurrenceInDoubleWithManyHeads) {
  for (const Backend& backend : backends()) expect_near_judge(backend, 32, 66, KdaInputStyle::kPlain);
}

TEST(Kda, EqualsTheRecurrenceInDoubleOverLongContexts) {
  for (const Backend& backend : backends())
    for (const KdaInputStyle style : kStyles) expect_near_judge(backend, 1, kSanitized ? 513 : 4097, style);
}

// Two ways to the same bits, compared as bits.
void expect_same(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

TEST(Kda, ResumesAtAnyToken) {
  constexpr int32_t kLength = 150;
  for (const Backend& backend : backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(1, KdaInputStyle::kPlain);
    const Judged wanted = judge(world, 0, kLength);
    KdaMemory whole(world.weights.shape, 1, kRing);
    const auto rows = run(backend, world, whole, {{.num_tokens = kLength, .commit_all = true}});
    for (int32_t split = 1; split < kLength; ++split) {
      KdaMemory memory(world.weights.shape, 1, kRing);
      auto got = run(backend, world, memory, {{.num_tokens = split, .commit_all = true}});
      const auto rest =
          run(backend, world, memory,
              {{.position = split, .num_tokens = kLength - split, .committed = split, .commit_all = true}});
      got.insert(got.end(), rest.begin(), rest.end());
      Error error;
      for (size_t t = 0; t < got.size(); ++t) error.add(got[t], wanted.rows[t]);
      EXPECT_LE(error.relative(), 1e-5) << "cut at " << split;
      if (split % 64 != 0) continue;  // pieces that begin at multiples of 64 are the same pieces
      for (size_t t = 0; t < got.size(); ++t) expect_same(got[t], rows[t]);
      expect_same(memory.units(memory.pages(0)), whole.units(whole.pages(0)));
    }
  }
}

// Prefills and decodes in any order and size.
TEST(Kda, AnyMixtureOfRunsIsNearTheJudge) {
  constexpr int32_t kLength = 400;
  for (const Backend& backend : backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(2, KdaInputStyle::kMixedGates);
    const Judged wanted = judge(world, 0, kLength);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Rng rng(seed);
      KdaMemory memory(world.weights.shape, 1, kRing);
      Error error;
      for (int32_t position = 0, committed = 0; position < kLength;) {
        const bool prefill = rng.chance(0.5);
        const auto n =
            static_cast<int32_t>(std::min<int64_t>(rng.between(1, prefill ? 100 : kRing), kLength - position));
        const auto rows = run(backend, world, memory,
                              {{.position = position, .num_tokens = n, .committed = committed, .commit_all = prefill}});
        for (int32_t t = 0; t < n; ++t)
          error.add(rows[static_cast<size_t>(t)], wanted.rows[static_cast<size_t>(position + t)]);
        committed = prefill ? position + n : position;
        position += n;
      }
      EXPECT_LE(error.relative(), 1e-5) << seed;
    }
  }
}

// A sequence whose last tokens are rejected at random, beside one that never sees a wrong token.
class DeferredCommit {
 public:
  DeferredCommit(const Backend& backend, const KdaWorld& world)
      : backend_(backend),
        world_(world),
        memory_(world.weights.shape, 1, kRing),
        never_(world.weights.shape, 1, kRing) {
    run(backend, world, memory_, {{.num_tokens = kPrompt, .commit_all = true}});
    run(backend, world, never_, {{.num_tokens = kPrompt, .commit_all = true}});
  }

  // Feeds up to K + 1 tokens of which some count (none, where a step ends late), then compares.
  void round(Rng& rng) {
    const auto n = static_cast<int32_t>(rng.between(1, kRing));
    const auto count = static_cast<int32_t>(rng.between(rng.chance(0.1) ? 0 : 1, n));
    const int32_t checkpoint = (committed_ / 16 + 1) * 16;
    const auto rows = run(backend_, world_, memory_,
                          {{.position = position_,
                            .num_tokens = n,
                            .committed = committed_,
                            .checkpoint = checkpoint,
                            .first_wrong = position_ + count}});
    if (position_ >= checkpoint) checkpoint_ = memory_.units(memory_.checkpoint(0));
    if (position_ > checkpoint) expect_same(checkpoint_, never_at_checkpoint_);  // else step_never() comes there
    committed_ = position_;
    for (int32_t t = 0; t < count; ++t, ++position_) expect_same(rows[static_cast<size_t>(t)], step_never());
  }

  // The state at the position, on both sides.
  void finish() {
    run(backend_, world_, memory_, {{.position = position_, .num_tokens = 1, .committed = committed_}});
    step_never();
    expect_same(memory_.units(memory_.pages(0)), never_.units(never_.pages(0)));
  }

 private:
  static constexpr int32_t kPrompt = 21;

  // The token at position_, fed alone; the one before is committed by it.
  std::vector<float> step_never() {
    auto rows = run(backend_, world_, never_,
                    {{.position = position_, .num_tokens = 1, .committed = std::max(position_ - 1, kPrompt)}});
    if (position_ % 16 == 0) {
      never_at_checkpoint_ = never_.units(never_.pages(0));
      if (position_ == committed_) expect_same(checkpoint_, never_at_checkpoint_);
    }
    return rows[0];
  }

  const Backend& backend_;
  const KdaWorld& world_;
  KdaMemory memory_, never_;
  int32_t position_ = kPrompt, committed_ = kPrompt;
  std::vector<float> checkpoint_, never_at_checkpoint_;  // the states at the last multiple of 16, on both sides
};

TEST(Kda, RejectedTokensNeverWere) {
  const int rounds = kSanitized ? 500 : soak_requested() ? 100'000 : 10'000;
  for (const Backend& backend : backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(1, KdaInputStyle::kMixedGates);
    DeferredCommit pair(backend, world);
    Rng rng(7);
    for (int i = 0; i < rounds && !testing::Test::HasFatalFailure(); ++i) pair.round(rng);
    pair.finish();
  }
}

TEST(Kda, RejectedTokensNeverWereInManyHeads) {
  for (const Backend& backend : backends())
    for (const int64_t heads : {3, 32}) {
      SCOPED_TRACE(str_cat(backend.name, " ", heads));
      const KdaWorld world(heads, KdaInputStyle::kGatesNearZero);
      DeferredCommit pair(backend, world);
      Rng rng(8);
      for (int i = 0; i < 60 && !testing::Test::HasFatalFailure(); ++i) pair.round(rng);
      pair.finish();
    }
}

TEST(Kda, CheckpointsOfPrefillAreTheStateThere) {
  for (const Backend& backend : backends()) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(2, KdaInputStyle::kPlain);
    for (const int32_t at : {64, 128, 192}) {
      KdaMemory memory(world.weights.shape, 1, kRing), until(world.weights.shape, 1, kRing);
      const auto rows = run(backend, world, memory, {{.num_tokens = 192, .commit_all = true, .checkpoint = at}});
      run(backend, world, until, {{.num_tokens = at, .commit_all = true}});
      expect_same(memory.units(memory.checkpoint(0)), until.units(until.pages(0)));
      // Another sequence goes on from the checkpoint.
      KdaMemory resumed(world.weights.shape, 1, kRing);
      resumed.load_units(resumed.pages(0), memory.units(memory.checkpoint(0)));
      const Feed rest{.position = at, .num_tokens = 192 - at, .committed = at, .commit_all = true};
      if (rest.num_tokens == 0) continue;
      const auto rest_rows = run(backend, world, resumed, {rest});
      for (size_t t = 0; t < rest_rows.size(); ++t) expect_same(rest_rows[t], rows[static_cast<size_t>(at) + t]);
      expect_same(resumed.units(resumed.pages(0)), memory.units(memory.pages(0)));
    }
    // One that lies elsewhere is left alone.
    KdaMemory memory(world.weights.shape, 1, kRing), without(world.weights.shape, 1, kRing);
    run(backend, world, memory, {{.num_tokens = 70, .commit_all = true, .checkpoint = 128}});
    run(backend, world, without, {{.num_tokens = 70, .commit_all = true}});
    EXPECT_TRUE(memory == without);
  }
}

// Prefill, replay with prefill, verify and decode rows in one batch, on one to three threads, are what each is alone;
// nothing else is written.
TEST(Kda, SequencesOfABatchDoNotMeet) {
  const std::vector<Feed> prompts = {{.sequence = 0, .num_tokens = 64, .commit_all = true, .checkpoint = 64},
                                     {.sequence = 1, .num_tokens = 5, .commit_all = true},
                                     {.sequence = 2, .num_tokens = 130, .commit_all = true},
                                     {.sequence = 3, .num_tokens = 1, .commit_all = true}};
  const std::vector<Feed> next = {
      {.sequence = 0, .position = 64, .num_tokens = 100, .committed = 64, .commit_all = true, .checkpoint = 128},
      {.sequence = 1, .position = 5, .num_tokens = 4, .committed = 5},
      {.sequence = 2, .position = 130, .num_tokens = 1, .committed = 130},
      {.sequence = 3, .position = 1, .num_tokens = 3, .committed = 1}};
  const std::vector<Feed> last = {
      {.sequence = 0, .position = 164, .num_tokens = 1, .committed = 164},
      {.sequence = 1, .position = 9, .num_tokens = 4, .committed = 5, .checkpoint = 7},
      {.sequence = 2, .position = 131, .num_tokens = 2, .committed = 130, .checkpoint = 131},
      {.sequence = 3, .position = 3, .num_tokens = 40, .committed = 1, .commit_all = true, .checkpoint = 2}};
  std::vector<Backend> all = backends();
  const Result<Isa> best = detect_isa({});
  for (const int threads : {1, 2, 3}) {
    if (best.ok()) all.push_back(cpu_backend(str_cat("best on ", threads, " threads"), *best, threads));
  }
  std::vector<std::vector<float>> of_one_thread;
  for (const Backend& backend : all) {
    SCOPED_TRACE(backend.name);
    const KdaWorld world(5, KdaInputStyle::kPlain);
    KdaMemory together(world.weights.shape, 4, kRing), apart(world.weights.shape, 4, kRing);
    std::vector<std::vector<float>> rows;
    for (const auto& runs : {prompts, next, last}) {
      rows = run(backend, world, together, runs);
      size_t row = 0;
      for (const Feed& alone : runs) {
        for (const auto& one : run(backend, world, apart, {alone})) expect_same(one, rows[row++]);
      }
    }
    EXPECT_TRUE(together == apart);
    if (!backend.name.starts_with("best")) continue;
    if (of_one_thread.empty()) of_one_thread = rows;
    for (size_t r = 0; r < rows.size(); ++r) expect_same(rows[r], of_one_thread.at(r));
  }
}

TEST(Kda, AllocatesNothingOnceWarm) {
  const Result<Isa> best = detect_isa({});
  if (!best.ok()) GTEST_SKIP() << best.error().message;
  ThreadPool pool(2);
  Arena arena, scratch;
  const Backend backend{.name = "cpu",
                        .attend =
                            [&](const auto& in, const auto& w, const auto& batch, const auto& state) {
                              return cpu::kda_attend({pool, arena, scratch, *best}, in, w, batch, state);
                            },
                        .begin_step = [&] { arena.reset(); }};
  const KdaWorld world(4, KdaInputStyle::kPlain);
  KdaMemory memory(world.weights.shape, 1, kRing);
  run(backend, world, memory, {{.num_tokens = 100, .commit_all = true}});
  const int64_t growths = arena.num_growths() + scratch.num_growths();
  run(backend, world, memory, {{.position = 100, .num_tokens = 100, .committed = 100, .commit_all = true}});
  run(backend, world, memory, {{.position = 200, .num_tokens = 4, .committed = 200}});
  run(backend, world, memory, {{.position = 204, .num_tokens = 1, .committed = 200}});
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

// The whole layer from hidden states, with projections: every CPU path against ref.
TEST(Kda, LayerIsThatOfRef) {
  constexpr int64_t kHeads = 3, kHidden = 96, kTokens = 37;
  const KdaWorld world(kHeads, KdaInputStyle::kPlain);
  const auto run_layer = [&](Ops& ops) {
    std::vector<std::vector<uint16_t>> kept;
    const auto matrix = [&](int64_t out, int64_t in) {
      kept.emplace_back();
      const float spread = 3.4f / std::sqrt(static_cast<float>(in));
      for (int64_t i = 0; i < out * in; ++i) {
        kept.back().push_back(f32_to_bf16(spread * (random_unit(kept.size(), static_cast<uint64_t>(i)) - 0.5f)));
      }
      return ops.pack_linear(
          RawMatrix{.format = WeightFormat::kBF16, .out = out, .in = in, .data = kept.back().data()});
    };
    KdaWeights w = world.weights;
    w.qkv = matrix(3 * kHeads * 128, kHidden);
    w.gates = matrix(2 * 128 + kHeads, kHidden);
    w.f_b = matrix(kHeads * 128, 128);
    w.g_b = matrix(kHeads * 128, 128);
    KdaMemory memory(w.shape, 1, kRing);
    const SequenceRows rows{.num_tokens = kTokens, .state_pages = memory.pages(0), .commit_all = true};
    Batch batch;
    batch.sequences = {&rows, 1};
    ops.begin_step();
    const Tensor x = ops.arena().tensor(ops.wide_dtype(), kTokens, kHidden);
    for (int64_t i = 0; i < kTokens * kHidden; ++i) {
      const uint16_t value = f32_to_bf16(2 * random_unit(99, static_cast<uint64_t>(i)) - 1);
      if (x.dtype == DType::kF32)
        x.row<float>(0)[i] = bf16_to_f32(value);
      else
        x.row<uint16_t>(0)[i] = value;
    }
    const Tensor y = ops.kda(x, w, batch, memory.layer);
    std::vector<float> out;
    for (int64_t i = 0; i < y.rows * y.cols; ++i) {
      out.push_back(y.dtype == DType::kF32 ? y.row<float>(0)[i] : bf16_to_f32(y.row<uint16_t>(0)[i]));
    }
    return out;
  };
  const std::vector<float> wanted = run_layer(*make_ref_ops());
  ASSERT_EQ(wanted.size(), static_cast<size_t>(kTokens * kHeads * 128));
  for (const CpuOptions& options : {CpuOptions{.num_threads = 2}, CpuOptions{.num_threads = 2, .allow_amx = false},
                                    CpuOptions{.num_threads = 2, .allow_amx = false, .allow_avx512 = false}}) {
    auto ops = make_cpu_ops(options);
    if (!ops.ok()) continue;
    Error error;
    error.add(run_layer(**ops), {wanted.begin(), wanted.end()});
    EXPECT_LE(error.relative(), (*ops)->wide_dtype() == DType::kF32 ? 1e-4 : 1e-2) << (*ops)->name();
  }
}

}  // namespace
}  // namespace perigee

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

// The CPU backend's function itself, with memory full of NaN.
Backend cpu_backend(const std::string& name, Isa isa, int num_threads) {
  struct Machine {
    explicit Machine(int n) : pool(n) {}
    ThreadPool pool;
    Arena arena, scratch;
  };
  auto m = std::make_shared<Machine>(num_threads);
  for (Arena* arena : {&m->arena, &m->scratch}) std::memset(arena->allocate(8 << 20), 0xFF, 8 << 20);
  return {.name = name,
          .attend =
              [m, isa](const auto& in, const auto& w, const auto& batch, const auto& state) {
                const CpuContext cpu{m->pool, m->arena, m->scratch, isa};
                return cpu::kda_attend(cpu, in, w, batch, state);
              },
          .begin_step = [m] { m->arena.reset(); }};
}

std::vector<Backend> backends() {
  std::vector<Backend> out = {ops_backend("ref", make_ref_ops())};
  const Result<Isa> best = detect_isa({});
  if (best.ok()) out.push_back(cpu_backend("avx2", Isa::kAvx2, 2));
  if (best.ok() && *best != Isa::kAvx2) out.push_back(cpu_backend("avx512", Isa::kAvx512, 2));
  return out;
}

// Some new tokens of one sequence.
struct Run {
  uint64_t sequence = 0;
  int32_t position = 0, num_tokens = 0, committed = 0;
  bool commit_all = false;
  int32_t checkpoint = -1;
  int32_t first_wrong = 1 << 30;  // tokens from this position on are other ones than those that count
};

// Runs a batch; -> outputs as f32 [rows][h * 128].
std::vector<std::vector<float>> run(const Backend& backend, const KdaWorld& world, KdaMemory& memory,
                                    const std::vector<Run>& runs) {
  KdaRows rows;
  std::vector<SequenceRows> sequences;
  for (const Run& r : runs) {
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
      for (const int32_t length : {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129}) {
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
    for (const KdaInputStyle style : kStyles) expect_near_judge(backend, 1, 4097, style);
}

}  // namespace
}  // namespace perigee

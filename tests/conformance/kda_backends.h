// The ways to run Kimi Delta Attention that the tests compare, and how they feed them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/soak.h"
#include "kda_world.h"
#include "ops/cpu/kda.h"
#include "ops/cpu/test_isa.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/place_batch.h"

namespace perigee {

inline constexpr int32_t kKdaRing = 4;
// One way to run the op.
struct KdaBackend {
  std::string name;
  DType wide = DType::kF32;
  std::function<Tensor(const KdaInputs&, const KdaWeights&, const Batch&, const StateLayer&)> attend;
  std::function<void()> begin_step;
  std::shared_ptr<Ops> device;  // null: the host
  double output_bound = 1e-5, state_bound = 1e-5, stepped_state_bound = 1e-5;

  KdaMemory memory(const KdaWorld& world, int32_t num_sequences = 1) const {
    return KdaMemory(world.weights.shape, num_sequences, kKdaRing, device.get());
  }
};

inline KdaBackend ops_backend(const std::string& name, std::shared_ptr<Ops> ops) {
  return {.name = name,
          .wide = ops->wide_dtype(),
          .attend = [ops](const auto& in, const auto& w, const auto& batch,
                          const auto& state) { return ops->kda_attend(in, w, batch, state); },
          .begin_step = [ops] { ops->begin_step(); }};
}

// The CPU backend's function itself; its memory is full of NaN before every eighth step.
inline KdaBackend cpu_backend(const std::string& name, Isa isa, int num_threads) {
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

inline Tensor upload_tensor(Ops& ops, const Tensor& host) {
  const Tensor there = ops.arena().tensor(host.dtype, host.rows, host.cols);
  ops.copy(there.data, host.data, static_cast<size_t>(host.rows * host.cols * dtype_bytes(host.dtype)));
  return there;
}

inline bool same_values(const VectorWeight& a, const VectorWeight& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// The CUDA backend with inputs brought there; its memory is full of NaN before every eighth step. Products of the chunk
// form have 16 bits, outputs 8.
inline KdaBackend cuda_backend(std::shared_ptr<Ops> ops) {
  struct Machine {
    KdaWeights of, packed;  // the weights that lie there
    int64_t steps = 0;
  };
  auto m = std::make_shared<Machine>();
  return {.name = "cuda",
          .wide = ops->wide_dtype(),
          .attend =
              [ops, m](const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
                if (!(same_values(m->of.conv, w.conv) && same_values(m->of.a, w.a) &&
                      same_values(m->of.dt_bias, w.dt_bias))) {
                  m->of = m->packed = w;
                  for (VectorWeight* v : {&m->packed.conv, &m->packed.a, &m->packed.dt_bias, &m->packed.o_norm})
                    *v = ops->pack_vector(*v);
                }
                const auto heads = static_cast<int32_t>(w.shape.heads);
                const PlacedBatch placed(batch, *ops, (state.first_unit + heads - 1) / state.units_per_page + 1);
                const KdaInputs there{upload_tensor(*ops, in.qkv), upload_tensor(*ops, in.a), upload_tensor(*ops, in.b),
                                      upload_tensor(*ops, in.z)};
                return ops->kda_attend(there, m->packed, placed.batch(), state);
              },
          .begin_step =
              [ops, m] {
                ops->begin_step();
                if (m->steps++ % 8 != 0) return;
                const std::vector<uint8_t> ones(4 << 20, 0xFF);
                ops->copy(ops->arena().allocate(ones.size()), ones.data(), ones.size());
                ops->begin_step();
              },
          .device = ops,
          .output_bound = 1e-2,
          .state_bound = 1e-4};
}

// All there are; CUDA alone under a checker of its accesses, and with PERIGEE_ONLY_CUDA in the environment, for a
// machine lent by the minute.
inline std::vector<KdaBackend> kda_backends() {
  if (gpu_sanitizer() || std::getenv("PERIGEE_ONLY_CUDA") != nullptr) {
    auto ops = make_cuda_ops({.separate_arrays = gpu_sanitizer(), .no_library = gpu_sanitizer_of_own_kernels()});
    CHECK(ops.ok(), ops.ok() ? "" : ops.error().message);
    return {cuda_backend(std::move(*ops))};
  }
  std::vector<KdaBackend> out = {ops_backend("ref", make_ref_ops())};
  for (const Isa isa : isas_under_test()) out.push_back(cpu_backend(isa_name(isa), isa, 2));
  if (auto ops = make_cuda_ops({}); ops.ok()) out.push_back(cuda_backend(std::move(*ops)));
  return out;
}

// Some new tokens of one sequence; position -1 and one token: padding.
struct KdaFeed {
  uint64_t sequence = 0;
  int32_t position = 0, num_tokens = 0, committed = 0;
  bool commit_all = false;
  std::vector<int32_t> checkpoints = {};  // the i-th goes to KdaMemory::checkpoint(sequence, i)
  int32_t first_wrong = 1 << 30;          // tokens from this position on are other ones than those that count
};

// Runs a batch; -> outputs as f32 [rows][h * 128].
inline std::vector<std::vector<float>> run_kda(const KdaBackend& backend, const KdaWorld& world, KdaMemory& memory,
                                               const std::vector<KdaFeed>& runs) {
  KdaRows rows;
  std::vector<SequenceRows> sequences;
  const std::vector<int32_t> nowhere(static_cast<size_t>(memory.pages_each()), 1 << 30);
  std::vector<std::vector<StateCheckpoint>> checkpoints(runs.size());
  for (const KdaFeed& r : runs) {
    const auto slot = static_cast<int32_t>(r.sequence);
    std::vector<StateCheckpoint>& own = checkpoints[sequences.size()];
    for (const int32_t position : r.checkpoints)
      own.push_back({.position = position, .pages = memory.checkpoint(slot, static_cast<int32_t>(own.size()))});
    sequences.push_back(
        {.first_row = static_cast<int32_t>(rows.b.size()) / static_cast<int32_t>(world.weights.shape.heads),
         .num_tokens = r.num_tokens,
         .position = r.position,
         .state_pages = r.position < 0 ? nowhere.data() : memory.pages(slot),
         .slot = slot,
         .committed = r.committed,
         .commit_all = r.commit_all,
         .checkpoints = own});
    for (int32_t t = r.position; t < r.position + r.num_tokens; ++t) {
      world.append(rows, r.sequence, t, t >= r.first_wrong ? static_cast<uint64_t>(r.position) + 1 : 0);
    }
  }
  Batch batch;
  batch.sequences = sequences;
  backend.begin_step();
  const Tensor out = backend.attend(world.inputs(rows, backend.wide), world.weights, batch, memory.layer);
  Tensor here = out;
  std::vector<uint8_t> copied(static_cast<size_t>(out.rows * out.cols * dtype_bytes(out.dtype)));
  if (backend.device != nullptr) {
    backend.device->copy(copied.data(), out.data, copied.size());
    here.data = copied.data();
  }
  std::vector<std::vector<float>> result(static_cast<size_t>(out.rows));
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) {
      result[static_cast<size_t>(r)].push_back(here.dtype == DType::kF32 ? here.row<float>(r)[c]
                                                                         : bf16_to_f32(here.row<uint16_t>(r)[c]));
    }
  }
  return result;
}

}  // namespace perigee

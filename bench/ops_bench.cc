// Speed of the CPU backend's matrix ops and of KDA, beside what the machine can do at all (measured here too): the peak
// of the multipliers with their data at hand, and the rate at which all threads together read memory.
//
// usage: ops_bench [num_threads] [avx2|avx512|amx] [linear|experts|kda]
//
// "cold": the weights of a call have not been touched for at least 400 MB of other traffic, as in a decode step;
// "warm": the same weights again and again, as in a prefill.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/kda.h"

namespace perigee {

double amx_flops(int64_t steps);  // amx_peak.cc: does 4 * steps tile products, returns how many operations that is

namespace cpu {
namespace {

constexpr int64_t kColdBytes = int64_t{400} << 20;

double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Median seconds of f(i), i = 0, 1, ..., over at least 0.4 s and five calls, after one call not counted.
double median_seconds(const std::function<void(int)>& f) {
  f(0);
  std::vector<double> times;
  for (double total = 0; total < 0.4 || times.size() < 5; total += times.back())
    times.push_back(seconds_of([&] { f(static_cast<int>(times.size()) + 1); }));
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

struct Machine {
  CpuContext cpu;
  double peak_flops = 0;  // per second, all threads
  double peak_bytes = 0;  // per second, all threads
  double peak_f32_flops = 0, peak_update_bytes = 0;
};

// AMX: tiles in registers. Else the kernel itself, on one panel and 96 rows in the first-level cache.
double measure_flops(const CpuContext& cpu) {
  constexpr int64_t kTiles = 4, kRows = 96, kRepeats = 2000, kSteps = 500000;
  const int64_t threads = cpu.pool.size();
  if (cpu.isa == Isa::kAmx) {
    const double flops = amx_flops(kSteps) * static_cast<double>(threads);
    return flops / median_seconds([&](int) { cpu.pool.run(threads, [&](int64_t, int) { amx_flops(kSteps); }); });
  }
  const PanelKernels& kernels = panel_kernels(cpu.isa);
  cpu.scratch.reset();
  const std::span<uint16_t> a = cpu.scratch.array<uint16_t>(kRows * kTiles * kTileK);
  const std::span<uint16_t> b = cpu.scratch.array<uint16_t>(kTiles * kPanelTileElements);
  const std::span<float> c = cpu.scratch.array<float>(threads * kRows * kPanelOutputs);
  std::fill(a.begin(), a.end(), uint16_t{0x3F80});
  std::fill(b.begin(), b.end(), uint16_t{0x3F80});
  const double seconds = median_seconds([&](int) {
    cpu.pool.run(threads, [&](int64_t t, int) {
      PanelJob job;
      job.a = a.data();
      job.a_stride = kTileRows * kTiles * kTileK;
      job.k_tiles = kTiles;
      job.rows = kRows;
      job.b = reinterpret_cast<const uint8_t*>(b.data());
      job.out.c = c.data() + t * kRows * kPanelOutputs;
      for (int64_t i = 0; i < kRepeats; ++i) kernels.multiply(job);
    });
  });
  return 2.0 * static_cast<double>(kRepeats * threads * kRows * kPanelOutputs * kTiles * kTileK) / seconds;
}

// Chains of f32 multiply-adds in registers, -> operations. Twelve chains hide four cycles of latency on two units.
__attribute__((target("avx512f"))) double f32_flops_avx512(int64_t steps, float* sink) {
  __m512 acc[12];
  for (__m512& x : acc) x = _mm512_set1_ps(1.0f);
  const __m512 factor = _mm512_set1_ps(0.999f);
  for (int64_t i = 0; i < steps; ++i) {
    for (__m512& x : acc) x = _mm512_fmadd_ps(x, factor, factor);
  }
  for (const __m512& x : acc) *sink += x[0];
  return 12.0 * 2 * 16 * static_cast<double>(steps);
}
__attribute__((target("avx2,fma"))) double f32_flops_avx2(int64_t steps, float* sink) {
  __m256 acc[12];
  for (__m256& x : acc) x = _mm256_set1_ps(1.0f);
  const __m256 factor = _mm256_set1_ps(0.999f);
  for (int64_t i = 0; i < steps; ++i) {
    for (__m256& x : acc) x = _mm256_fmadd_ps(x, factor, factor);
  }
  for (const __m256& x : acc) *sink += x[0];
  return 12.0 * 2 * 8 * static_cast<double>(steps);
}

double measure_f32_flops(const CpuContext& cpu) {
  constexpr int64_t kSteps = 2'000'000;
  const auto body = cpu.isa == Isa::kAvx2 ? f32_flops_avx2 : f32_flops_avx512;
  const int64_t threads = cpu.pool.size();
  std::vector<float> sinks(static_cast<size_t>(threads) * 16);
  double flops = 0;
  const double seconds = median_seconds([&](int) {
    cpu.pool.run(threads, [&](int64_t t, int) {
      const double done = body(kSteps, &sinks[static_cast<size_t>(t) * 16]);
      if (t == 0) flops = done * static_cast<double>(threads);
    });
  });
  return flops / seconds;
}

// Bytes read and written where every number of a large memory is changed in place.
double measure_update_bytes(const CpuContext& cpu) {
  const Buffer buffer(static_cast<size_t>(kColdBytes) * 2);
  constexpr int64_t kPart = 1 << 16;
  const double seconds = median_seconds([&](int) {
    cpu.pool.run(static_cast<int64_t>(buffer.size()) / kPart, [&](int64_t part, int) {
      auto* words = reinterpret_cast<uint64_t*>(buffer.data() + part * kPart);
      for (int64_t i = 0; i < kPart / 8; ++i) words[i] += 3;
    });
  });
  return 2 * static_cast<double>(buffer.size()) / seconds;
}

double measure_bytes(const CpuContext& cpu) {
  const Buffer buffer(static_cast<size_t>(kColdBytes) * 2);
  std::memset(buffer.data(), 1, buffer.size());  // pages that were never written are all the same one
  constexpr int64_t kPart = 1 << 20;
  const int64_t parts = static_cast<int64_t>(buffer.size()) / kPart;
  std::vector<uint64_t> sums(static_cast<size_t>(cpu.pool.size()) * 8);
  const double seconds = median_seconds([&](int) {
    cpu.pool.run(parts, [&](int64_t part, int thread) {
      const auto* words = reinterpret_cast<const uint64_t*>(buffer.data() + part * kPart);
      uint64_t sum[8] = {};
      for (int64_t i = 0; i < kPart / 8; i += 32) {
        __builtin_prefetch(words + i + 1024);
        __builtin_prefetch(words + i + 1032);
        __builtin_prefetch(words + i + 1040);
        __builtin_prefetch(words + i + 1048);
        for (int j = 0; j < 32; j += 8) sum[j / 8] += words[i + j];  // a word of each line brings the line
      }
      for (const uint64_t s : sum) sums[static_cast<size_t>(thread) * 8] += s;
    });
  });
  return static_cast<double>(buffer.size()) / seconds;
}

void print_row(const Machine& m, const std::string& what, double seconds, double flops, double bytes) {
  std::printf("%-46s %9.3f ms %9.1f GFLOP/s (%5.1f %%) %8.1f GB/s (%5.1f %%)\n", what.c_str(), seconds * 1e3,
              flops / seconds * 1e-9, flops / seconds / m.peak_flops * 100, bytes / seconds * 1e-9,
              bytes / seconds / m.peak_bytes * 100);
  std::fflush(stdout);
}

// Random bits, scales of about 1e-2.
struct RandomMatrix {
  RandomMatrix(WeightFormat format, int64_t out, int64_t in) : data(static_cast<size_t>(out * in / 4 + 1)) {
    const bool int4 = format == WeightFormat::kInt4Group32;
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = random_u64(1, i);
      if (!int4) data[i] = (data[i] & 0x80FF80FF80FF80FFull) | 0x3C003C003C003C00ull;
    }
    scale.assign(static_cast<size_t>(out * in / 32), 0x3C23);
    raw = {.format = format, .out = out, .in = in, .data = data.data(), .scale = scale.data()};
  }
  std::vector<uint64_t> data;
  std::vector<uint16_t> scale;
  RawMatrix raw;
};

Tensor random_rows(Arena& arena, int64_t rows, int64_t cols) {
  const Tensor x = arena.tensor(DType::kBF16, rows, cols);
  for (int64_t i = 0; i < rows * cols; ++i)
    x.row<uint16_t>(0)[i] = f32_to_bf16(random_unit(3, static_cast<uint64_t>(i)));
  return x;
}

void bench_linear(Machine& m, int64_t in, int64_t out, const std::string& format) {
  const RandomMatrix raw(format == "int4" ? WeightFormat::kInt4Group32 : WeightFormat::kBF16, out, in);
  const PanelFormat dense = format == "int8" ? PanelFormat::kInt8 : PanelFormat::kBF16;
  PanelMatrix w = panel_matrix(out, in, panel_format(std::span(&raw.raw, 1), dense));
  const int64_t copies = kColdBytes / w.bytes() + 1;
  std::vector<Buffer> buffers;
  for (int64_t i = 0; i < copies; ++i) {
    buffers.emplace_back(static_cast<size_t>(w.bytes()));
    if (i > 0) std::memcpy(buffers.back().data(), buffers[0].data(), buffers[0].size());
    w.data = buffers.back().data();
    if (i == 0) pack_panels(m.cpu.pool, w, stacked_rows(std::span(&raw.raw, 1)));
  }
  Arena inputs;
  for (const int64_t rows : {1, 4, 16, 512, 2048}) {
    const Tensor x = random_rows(inputs, rows, in);
    for (const bool cold : {true, false}) {
      if (cold && rows > 16) continue;
      const double seconds = median_seconds([&](int i) {
        w.data = buffers[cold ? static_cast<size_t>(i % copies) : 0].data();
        m.cpu.arena.reset();
        linear(m.cpu, x, w, DType::kF32);
      });
      const std::string what = "linear " + format + " " + std::to_string(rows) + " x " + std::to_string(in) + " -> " +
                               std::to_string(out) + (cold ? " cold" : " warm");
      print_row(m, what, seconds, 2.0 * static_cast<double>(rows * in * out), static_cast<double>(w.bytes()));
    }
  }
}

// DeepSeek-V2-Lite's routed experts: 64 of [2048 -> 1408 -> 2048], six a token.
void bench_experts(Machine& m, bool int4) {
  constexpr int64_t kExperts = 64, kHidden = 2048, kInter = 1408, kTopK = 6;
  const WeightFormat format = int4 ? WeightFormat::kInt4Group32 : WeightFormat::kBF16;
  const RandomMatrix gate(format, kInter, kHidden), down(format, kHidden, kInter);
  const std::vector<RawExpert> raw(kExperts, {gate.raw, gate.raw, down.raw});
  std::vector<ExpertWeights> layers;
  for (int64_t bytes = 0; bytes < 2 * kColdBytes; bytes += layers.back().packed->bytes())
    layers.push_back(pack_experts(m.cpu.pool, raw));
  Arena inputs;
  for (const int64_t tokens : {1, 4, 16, 512, 2048}) {
    const Tensor x = random_rows(inputs, tokens, kHidden);
    std::vector<int32_t> ids;
    std::vector<bool> used(kExperts);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = random_u64(9, static_cast<uint64_t>(t)), step = first / kExperts % 5 * 2 + 1;
      for (uint64_t k = 0; k < kTopK; ++k) ids.push_back(static_cast<int32_t>((first + k * step) % kExperts));
      for (int64_t k = 0; k < kTopK; ++k)
        used[static_cast<size_t>(ids[ids.size() - 1 - static_cast<size_t>(k)])] = true;
    }
    std::vector<float> weights(ids.size(), 0.2f);
    const Routing routing{.num_tokens = tokens, .top_k = kTopK, .ids = ids.data(), .weights = weights.data()};
    const double seconds = median_seconds([&](int i) {
      // Other experts of the layer each time too: single tokens touch a tenth of it.
      for (int32_t& id : ids) id = (id + (tokens == 1 ? 7 : 0)) % static_cast<int32_t>(kExperts);
      m.cpu.arena.reset();
      const ExpertWeights& w = layers[static_cast<size_t>(i) % layers.size()];
      moe_experts(m.cpu, x, routing, static_cast<const PackedExperts&>(*w.packed));
    });
    const auto active = static_cast<double>(std::count(used.begin(), used.end(), true));
    const double bytes = static_cast<double>(layers[0].packed->bytes()) / kExperts * active;
    print_row(m, "experts " + std::string(int4 ? "int4" : "bf16") + " t=" + std::to_string(tokens) + " cold", seconds,
              2.0 * 3 * static_cast<double>(tokens * kTopK * kHidden * kInter), bytes);
  }
}

// One layer of Kimi-Linear (32 heads): states of enough sequences to be cold, and inputs.
class KdaBench {
 public:
  explicit KdaBench(Machine& m) : m_(m) {
    w_.shape.heads = 32;
    const int64_t width = w_.shape.width();
    w_.conv = std::vector<float>(static_cast<size_t>(12 * width), 0.3f);
    w_.a = std::vector<float>(32, 4.0f);
    w_.dt_bias = std::vector<float>(static_cast<size_t>(width), -4.0f);
    w_.o_norm = std::vector<float>(128, 1.0f);
    const int64_t sequence_bytes = w_.shape.heads * w_.shape.unit_bytes();
    num_sequences_ = static_cast<int32_t>(kColdBytes / sequence_bytes) + 1;
    states_ = Buffer(static_cast<size_t>(num_sequences_ * sequence_bytes));
    layer_ = {.base = states_.data(),
              .page_bytes = sequence_bytes,
              .unit_bytes = w_.shape.unit_bytes(),
              .units_per_page = 32,
              .ring_token_bytes = w_.shape.ring_token_floats() * 4,
              .ring_tokens = 4};
    layer_.ring_slot_bytes = 32 * layer_.ring_tokens * layer_.ring_token_bytes;
    rings_ = Buffer(static_cast<size_t>(num_sequences_ * layer_.ring_slot_bytes));
    layer_.ring = rings_.data();
    for (int32_t i = 0; i < num_sequences_; ++i) pages_.push_back(i);
  }

  // `batch` sequences, each with `replayed` tokens in its ring and `fresh` new ones.
  void run(int32_t batch, int32_t replayed, int32_t fresh, bool prefill) {
    Arena inputs;
    const auto rows = [&](int64_t cols) {
      const Tensor x = inputs.tensor(DType::kF32, batch * fresh, cols);
      for (int64_t i = 0; i < x.rows * cols; ++i) x.row<float>(0)[i] = random_unit(5, static_cast<uint64_t>(i)) - 0.5f;
      return x;
    };
    const int64_t width = w_.shape.width();
    const KdaInputs in{.qkv = rows(3 * width), .a = rows(width), .b = rows(32), .z = rows(width)};
    std::vector<SequenceRows> sequences(static_cast<size_t>(batch));
    const double seconds = median_seconds([&](int i) {
      for (int32_t s = 0; s < batch; ++s) {
        const int32_t slot = (i * batch + s) % num_sequences_;
        sequences[static_cast<size_t>(s)] = {.first_row = s * fresh,
                                             .num_tokens = fresh,
                                             .position = 64 + replayed,
                                             .state_pages = &pages_[static_cast<size_t>(slot)],
                                             .slot = slot,
                                             .committed = 64,
                                             .commit_all = prefill};
      }
      Batch b;
      b.sequences = sequences;
      m_.cpu.arena.reset();
      kda_attend(m_.cpu, in, w_, b, layer_);
    });
    print(batch, replayed, fresh, prefill, seconds);
  }

 private:
  void print(int32_t batch, int32_t replayed, int32_t fresh, bool prefill, double seconds) const {
    const std::string what = prefill ? "kda prefill 32 heads, " + std::to_string(fresh) + " tokens"
                                     : "kda decode 32 heads, " + std::to_string(batch) + " sequences of " +
                                           std::to_string(fresh) + " new, " + std::to_string(replayed) + " replayed";
    // Chunks of 16: k S, q S and the new state, 2 * 128 * 128 each; four triangles of 16 by 128.
    const double flops = 32.0 * (6 * 128 * 128 + 4 * 16 * 128) * batch * (fresh + replayed);
    const double bytes = 2.0 * static_cast<double>(32 * batch * w_.shape.unit_bytes());
    if (prefill) {
      std::printf("%-58s %9.3f ms %7.1f GFLOP/s (%5.1f %% of f32 peak)\n", what.c_str(), seconds * 1e3,
                  flops / seconds * 1e-9, flops / seconds / m_.peak_f32_flops * 100);
    } else {
      std::printf("%-58s %9.1f us %7.1f GB/s (%5.1f %% of updates in place)\n", what.c_str(), seconds * 1e6,
                  bytes / seconds * 1e-9, bytes / seconds / m_.peak_update_bytes * 100);
    }
    std::fflush(stdout);
  }

  Machine& m_;
  KdaWeights w_;
  Buffer states_, rings_;
  StateLayer layer_;
  int32_t num_sequences_ = 0;
  std::vector<int32_t> pages_;
};

void bench_kda(Machine& m) {
  m.peak_f32_flops = measure_f32_flops(m.cpu);
  m.peak_update_bytes = measure_update_bytes(m.cpu);
  std::printf("f32 peak %.1f GFLOP/s, memory updated in place %.1f GB/s\n", m.peak_f32_flops * 1e-9,
              m.peak_update_bytes * 1e-9);
  KdaBench bench(m);
  for (const int32_t batch : {1, 4, 16}) bench.run(batch, 1, 1, false);
  bench.run(1, 4, 4, false);
  bench.run(16, 2, 4, false);
  for (const int32_t tokens : {16, 64, 512, 2048}) bench.run(1, 0, tokens, true);
}

int run(int num_threads, Isa isa, const std::string& part) {
  ThreadPool pool(num_threads);
  Arena arena, scratch;
  Machine m{.cpu = {.pool = pool, .arena = arena, .scratch = scratch, .isa = isa}};
  const bool all = part.empty();
  if (all || part == "kda") bench_kda(m);
  if (part == "kda") return 0;
  m.peak_flops = measure_flops(m.cpu);
  m.peak_bytes = measure_bytes(m.cpu);
  std::printf("%s, %d threads: peak %.1f GFLOP/s bf16, memory read %.1f GB/s\n", isa_name(isa), num_threads,
              m.peak_flops * 1e-9, m.peak_bytes * 1e-9);
  if (all || part == "linear") {
    bench_linear(m, 2048, 2048, "bf16");
    bench_linear(m, 2048, 4096, "bf16");
    bench_linear(m, 2048, 10944, "bf16");
    bench_linear(m, 10944, 2048, "bf16");
    bench_linear(m, 2048, 10944, "int8");
    bench_linear(m, 2048, 2048, "int4");
  }
  if (all || part == "experts") {
    bench_experts(m, false);
    bench_experts(m, true);
  }
  return 0;
}

}  // namespace
}  // namespace cpu
}  // namespace perigee

int main(int argc, char** argv) {
  using namespace perigee;
  Result<Isa> isa = argc > 2 ? parse_isa(argv[2]) : detect_isa();
  if (isa.ok()) isa = detect_isa(*isa);
  if (!isa.ok()) {
    std::fprintf(stderr, "%s\n", isa.error().message.c_str());
    return 1;
  }
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  return cpu::run(std::max(threads, 1), *isa, argc > 3 ? argv[3] : "");
}

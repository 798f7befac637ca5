// Speed of the CPU backend's matrix ops, beside what the machine can do at all (measured here too): the peak of the
// multipliers with their data at hand, and the rate at which all threads together read memory.
//
// usage: ops_bench [num_threads] [avx2|avx512|amx]
//
// "cold": the weights of a call have not been touched for at least 400 MB of other traffic, as in a decode step;
// "warm": the same weights again and again, as in a prefill.
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

double measure_bytes(const CpuContext& cpu) {
  const Buffer buffer(static_cast<size_t>(kColdBytes) * 2);
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

void bench_linear(Machine& m, int64_t in, int64_t out, bool int4) {
  const RandomMatrix raw(int4 ? WeightFormat::kInt4Group32 : WeightFormat::kBF16, out, in);
  PanelMatrix w = panel_matrix(out, in, panel_format(std::span(&raw.raw, 1)));
  const int64_t copies = kColdBytes / w.bytes() + 1;
  std::vector<Buffer> buffers;
  for (int64_t i = 0; i < copies; ++i) {
    buffers.emplace_back(static_cast<size_t>(w.bytes()));
    if (i > 0) std::memcpy(buffers.back().data(), buffers[0].data(), buffers[0].size());
    w.data = buffers.back().data();
    if (i == 0) pack_panels(m.cpu.pool, w, stacked_rows(std::span(&raw.raw, 1)));
  }
  Arena inputs;
  for (const int64_t rows : {1, 16, 512, 2048}) {
    const Tensor x = random_rows(inputs, rows, in);
    for (const bool cold : {true, false}) {
      if (cold && rows > 16) continue;
      const double seconds = median_seconds([&](int i) {
        w.data = buffers[cold ? static_cast<size_t>(i % copies) : 0].data();
        m.cpu.arena.reset();
        linear(m.cpu, x, w, DType::kF32);
      });
      const std::string what = "linear " + std::string(int4 ? "int4 " : "bf16 ") + std::to_string(rows) + " x " +
                               std::to_string(in) + " -> " + std::to_string(out) + (cold ? " cold" : " warm");
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
  for (const int64_t tokens : {1, 16, 512, 2048}) {
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

int run(int num_threads, Isa isa) {
  ThreadPool pool(num_threads);
  Arena arena, scratch;
  Machine m{.cpu = {.pool = pool, .arena = arena, .scratch = scratch, .isa = isa}};
  m.peak_flops = measure_flops(m.cpu);
  m.peak_bytes = measure_bytes(m.cpu);
  std::printf("%s, %d threads: peak %.1f GFLOP/s bf16, memory read %.1f GB/s\n", isa_name(isa), num_threads,
              m.peak_flops * 1e-9, m.peak_bytes * 1e-9);
  bench_linear(m, 2048, 2048, false);
  bench_linear(m, 2048, 4096, false);
  bench_linear(m, 2048, 10944, false);
  bench_linear(m, 10944, 2048, false);
  bench_linear(m, 2048, 2048, true);
  bench_experts(m, false);
  bench_experts(m, true);
  return 0;
}

}  // namespace
}  // namespace cpu
}  // namespace perigee

int main(int argc, char** argv) {
  using namespace perigee;
  CpuOptions options;
  const std::string wanted = argc > 2 ? argv[2] : "amx";
  options.allow_amx = wanted == "amx";
  options.allow_avx512 = wanted != "avx2";
  const Result<Isa> isa = detect_isa(options);
  if (!isa.ok()) {
    std::fprintf(stderr, "%s\n", isa.error().message.c_str());
    return 1;
  }
  const int threads = argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  return cpu::run(std::max(threads, 1), *isa);
}

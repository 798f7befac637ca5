// What stands between the products of a step, on one GPU: norms, embedding, gathered rows, copies of heads' columns,
// activation, sampling. Microseconds of a launch (of sampling: of its three), cold memory.
//
//   cuda_step_bench [substring ...]     rows whose name holds one of them
//
// Bytes counted: what is read and written, once.
#include "base/rng.h"
#include "bench/cuda_timing.h"
#include "exec/cuda/plan_upload.h"
#include "exec/cuda/sampling_kernels.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/moe/combine.h"
#include "ops/cuda/packed.h"

namespace perigee {
namespace {

using bench::must;

constexpr size_t kCold = 600 << 20;  // bytes that a row's calls go through, ten times the L2

cudaStream_t stream;

__global__ void fill(float* data, int64_t count, float scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    data[i] = scale * (random_unit(5, static_cast<uint64_t>(i)) + random_unit(6, static_cast<uint64_t>(i)) - 1.0f);
}

// Device memory of the row that is measured.
class Memory {
 public:
  ~Memory() {
    for (void* p : pointers_) cudaFree(p);
  }
  template <typename T>
  T* zeros(int64_t count) {
    void* p = nullptr;
    must(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)));
    must(cudaMemset(p, 0, static_cast<size_t>(count) * sizeof(T)));
    pointers_.push_back(p);
    return static_cast<T*>(p);
  }
  float* numbers(int64_t count, float scale = 1) {
    auto* data = zeros<float>(count);
    fill<<<2048, 256>>>(data, count, scale);
    must(cudaDeviceSynchronize());
    return data;
  }
  template <typename T>
  T* copy(const std::vector<T>& host) {
    auto* data = zeros<T>(static_cast<int64_t>(host.size()));
    must(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
  }

 private:
  std::vector<void*> pointers_;
};

Tensor rows_of(void* data, DType dtype, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = dtype, .rows = rows, .cols = cols, .row_stride = cols};
}

int calls_for(double bytes) {
  return std::clamp(static_cast<int>(static_cast<double>(kCold) / bytes), 2, 64);
}

void measure_norm(int64_t rows, int64_t cols, bool add) {
  const std::string name = std::string(add ? "add + rms_norm" : "rms_norm") + " [" + std::to_string(rows) + ", " +
                           std::to_string(cols) + "]";
  if (!bench::wanted(name)) return;
  Memory memory;
  const double bytes = static_cast<double>(rows * cols) * (add ? 14 : 6);
  const int calls = calls_for(bytes);
  const int64_t count = rows * cols;
  float* x = memory.numbers(count * calls);
  float* more = add ? memory.numbers(count * calls) : nullptr;
  auto* y = memory.zeros<uint16_t>(count * calls);
  const float* weight = memory.numbers(cols);
  const double us = bench::time_calls(stream, calls, [&](int i) {
    const Tensor addend = rows_of(more + (add ? i * count : 0), DType::kF32, rows, cols);
    must(rms_norm_rows(rows_of(x + i * count, DType::kF32, rows, cols), add ? &addend : nullptr, weight, 1e-6f,
                       rows_of(y + i * count, DType::kBF16, rows, cols), stream));
  });
  bench::print_row(name, us, bytes);
}

// A layer's end: the experts' outputs as they come from the products before, in L2 where they fit.
void measure_combine(int64_t rows, int64_t cols, int top_k, bool fused) {
  const std::string name = std::string(fused ? "combine + norm" : "combine, add + norm") + " [" + std::to_string(rows) +
                           ", " + std::to_string(cols) + "] of " + std::to_string(top_k);
  if (!bench::wanted(name)) return;
  Memory memory;
  const bool many = rows >= 1024;
  const int64_t count = rows * cols;
  const double bytes = static_cast<double>(count) * ((many ? 2 : 4) * top_k + 14);
  float* outputs = memory.numbers(count * top_k);
  MoeParts parts{
      .outputs = rows_of(outputs, many ? DType::kBF16 : DType::kF32, rows * top_k, cols),
      .routing = {.num_tokens = rows, .top_k = top_k, .ids = nullptr, .weights = memory.numbers(rows * top_k)},
      .shared = rows_of(memory.numbers(count), DType::kF32, rows, cols)};
  const Tensor x = rows_of(memory.numbers(count), DType::kF32, rows, cols),
               sum = rows_of(memory.numbers(count), DType::kF32, rows, cols);
  const Tensor y = rows_of(memory.zeros<uint16_t>(count), DType::kBF16, rows, cols);
  const float* weight = memory.numbers(cols);
  const double us = bench::time_calls(stream, many ? 4 : 40, [&](int) {
    if (fused) return must(combine_norm_rows(parts, x, weight, 1e-6f, y, stream));
    must(combine_rows(parts, false, sum, stream));
    must(rms_norm_rows(x, &sum, weight, 1e-6f, y, stream));
  });
  bench::print_row(name, us, bytes);
}

void measure_silu(int64_t rows, int64_t cols) {
  const std::string name = "silu * mul [" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
  if (!bench::wanted(name)) return;
  Memory memory;
  const int64_t count = rows * cols;
  const double bytes = 10.0 * static_cast<double>(count);
  const int calls = calls_for(bytes);
  float* x = memory.numbers(2 * count * calls);
  auto* y = memory.zeros<uint16_t>(count * calls);
  const double us = bench::time_calls(stream, calls, [&](int i) {
    must(silu_mul_rows(rows_of(x + 2 * i * count, DType::kF32, rows, 2 * cols), true,
                       rows_of(y + i * count, DType::kBF16, rows, cols), stream));
  });
  bench::print_row(name, us, bytes);
}

// Rows of an embedding table, or of logits to be.
void measure_rows(int64_t rows, int64_t cols, bool embed) {
  constexpr int64_t kTable = 50000;
  const std::string name =
      std::string(embed ? "embed" : "gather_rows") + " [" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
  if (!bench::wanted(name)) return;
  Memory memory;
  const double bytes = static_cast<double>(rows * cols) * (embed ? 6 : 8);
  const int calls = calls_for(bytes);
  std::vector<int32_t> ids(static_cast<size_t>(rows * calls));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(random_u64(9, i) % kTable);
  const int32_t* places = memory.copy(ids);
  float* table = memory.numbers(kTable * cols / (embed ? 2 : 1));
  CudaMatrix matrix;
  matrix.data = Buffer(reinterpret_cast<uint8_t*>(table), static_cast<size_t>(kTable * cols * 2), [](uint8_t*) {});
  matrix.padded_in = cols;
  auto* y = memory.zeros<float>(rows * cols * calls);
  const double us = bench::time_calls(stream, calls, [&](int i) {
    const Tensor out = rows_of(y + i * rows * cols, DType::kF32, rows, cols);
    if (embed)
      must(embed_rows(matrix, 0, places + i * rows, out, stream));
    else
      must(gather_tensor_rows(rows_of(table, DType::kF32, kTable, cols), places + i * rows, out, stream));
  });
  bench::print_row(name, us, bytes);
}

void measure_rope(int64_t rows, int64_t heads) {
  const std::string name = "rope [" + std::to_string(rows) + ", " + std::to_string(heads) + " x 192]";
  if (!bench::wanted(name)) return;
  Memory memory;
  const int64_t cols = heads * 192;
  const double bytes = static_cast<double>(rows * heads) * 64 * 2 * 2;
  const int calls = calls_for(static_cast<double>(rows * cols) * 2);
  auto* x = memory.zeros<uint16_t>(rows * cols * calls);
  const RopeCall call{.head_dim = 192,
                      .rope_begin = 128,
                      .positions = memory.zeros<int32_t>(rows),
                      .inv_freq = memory.numbers(32),
                      .pairs = 32,
                      .factor = 1};
  const double us = bench::time_calls(stream, calls, [&](int i) {
    must(rope_rows(rows_of(x + i * rows * cols, DType::kBF16, rows, cols), call, stream));
  });
  bench::print_row(name, us, bytes);
}

struct SamplingKind {
  const char* name;
  SamplingParams params;
};

// Logits of `spread` times the sum of two uniform numbers: 1 is flat, 20 peaks as a trained model's do.
void measure_sampling(const SamplingKind& kind, int rows, float spread) {
  constexpr int32_t kVocab = 163840;
  const std::string name = "sample " + std::string(kind.name) + " [" + std::to_string(rows) + ", 163840] spread " +
                           std::to_string(static_cast<int>(spread));
  if (!bench::wanted(name)) return;
  Memory memory;
  const double bytes = 4.0 * static_cast<double>(kVocab) * rows;
  const int calls = calls_for(bytes);
  SlotArrays slots;
  slots.vocab = kVocab;
  std::vector<SampleRecord> samples;
  for (int i = 0; i < rows; ++i) samples.push_back({.slot = i, .logit_row = i, .mask_row = -1});
  std::vector<SlotParams> params(static_cast<size_t>(rows), slot_params(kind.params));
  for (size_t i = 0; i < params.size(); ++i) params[i].random_key = i;
  slots.params = memory.copy(params);
  slots.newest = memory.zeros<int32_t>(rows);
  slots.num_outputs = memory.zeros<int32_t>(rows);
  slots.listed_ids = memory.zeros<int32_t>(int64_t{rows} * kMaxListed);
  slots.listed_bias = memory.zeros<float>(int64_t{rows} * kMaxListed);
  slots.counts = memory.zeros<uint32_t>(rows * slots.count_words());
  slots.seen = memory.zeros<uint32_t>(rows * slots.bit_words());
  SampleCall call{.samples = memory.copy(samples),
                  .count = rows,
                  .work = memory.zeros<float>(int64_t{rows} * kVocab),
                  .scratch = memory.zeros<uint8_t>(sample_scratch_bytes(rows)),
                  .results = memory.zeros<SampleResult>(rows)};
  const float* logits = memory.numbers(int64_t{rows} * kVocab * calls, spread);
  const double us = bench::time_calls(stream, calls, [&](int i) {
    call.logits = logits + static_cast<int64_t>(i) * rows * kVocab;
    must(sample_rows(call, slots, stream));
  });
  bench::print_row(name, us, bytes);
}

int run() {
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const int64_t cols : {2048, 2304, 7168})
    for (const int64_t rows : {1, 64, 8192})
      for (const bool add : {false, true}) measure_norm(rows, cols, add);
  for (const auto& [cols, top_k] : {std::pair{2048, 6}, {2304, 8}, {7168, 8}})
    for (const int64_t rows : {1, 8, 64, 256, 512, 8192})
      for (const bool fused : {false, true}) measure_combine(rows, cols, top_k, fused);
  for (const int64_t rows : {64, 8192}) measure_silu(rows, 2816);
  for (const int64_t rows : {1, 64, 8192})
    for (const bool embed : {true, false}) measure_rows(rows, 2304, embed);
  for (const int64_t rows : {1, 64, 8192}) measure_rope(rows, 16);
  const SamplingKind kinds[] = {
      {"greedy", {.temperature = 0}},
      {"t 1", {.temperature = 1}},
      {"t 1 top_p .95", {.temperature = 1, .top_p = 0.95f}},
      {"t 1 top_k 50", {.temperature = 1, .top_k = 50}},
      {"t .6 top_k 50 top_p .95 min_p .01", {.temperature = 0.6f, .top_k = 50, .top_p = 0.95f, .min_p = 0.01f}},
      {"t 1 penalties", {.temperature = 1, .presence_penalty = 0.5f}},
      {"greedy, 5 logprobs", {.temperature = 0, .logprobs = 5}}};
  for (const SamplingKind& kind : kinds)
    for (const int rows : {1, 64})
      for (const float spread : {1.0f, 20.0f}) measure_sampling(kind, rows, spread);
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  perigee::bench::filters.assign(argv + 1, argv + argc);
  return perigee::run();
}

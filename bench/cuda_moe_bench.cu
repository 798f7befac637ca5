// Experts, skinny products and the router on one GPU: microseconds of an op as the model calls it, from cold memory.
// Every call of a captured graph reads other weights (other experts of the layer, another copy of a matrix), together
// several times the L2; a figure is the median of 11 replays, divided by the calls of one.
//
//   cuda_moe_bench [substring ...]     rows whose name holds one of them
//
// Bytes counted: the weights of the distinct experts touched, once. Limit: the larger of bytes / 4.54 TB/s and flop /
// 790 TFLOP/s, which an H200 was seen to reach.
#include <set>

#include "base/rng.h"
#include "bench/cuda_timing.h"
#include "ops/cuda/backend.h"

namespace perigee {
namespace {

using bench::must, bench::print_row, bench::upload, bench::wanted;

// bf16 in about [-2, 2].
__global__ void fill(uint32_t* data, int64_t words) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    data[i] = (static_cast<uint32_t>(random_u64(5, static_cast<uint64_t>(i))) & 0x807F807Fu) | 0x3F003F00u;
}

Tensor random_rows(int64_t rows, int64_t cols) {
  uint32_t* data = nullptr;
  must(cudaMalloc(&data, static_cast<size_t>(rows * cols * 2)));
  fill<<<1024, 256>>>(data, rows * cols / 2);
  must(cudaDeviceSynchronize());
  Tensor t;
  t.dtype = DType::kBF16, t.data = data, t.rows = rows, t.cols = cols, t.row_stride = cols;
  return t;
}

// Microseconds of one of `calls` calls.
double time_calls(CudaOps& ops, int calls, const std::function<void(int)>& call) {
  return bench::time_calls(ops.stream(), calls, [&](int i) {
    if (i == 0) ops.begin_step();
    const ArenaScope scope(ops.arena());
    call(i);
  });
}

struct ExpertShape {
  const char* name;
  WeightFormat format;
  int64_t hidden, inter, experts;
  int top_k;
  std::vector<int64_t> tokens;
  double bytes() const {  // of one expert
    const double count = 3.0 * static_cast<double>(hidden * inter);
    return format == WeightFormat::kBF16 ? 2 * count : format == WeightFormat::kF8Block128 ? count : count * 0.5625;
  }
};

// `calls` choices of distinct experts for each token, and how many experts a call touches.
std::vector<Routing> spread_routing(const ExpertShape& s, int64_t tokens, int calls, int* distinct) {
  std::vector<Routing> all;
  std::set<int32_t> touched;
  for (int call = 0; call < calls; ++call) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens; ++i) {
      std::set<int32_t> chosen;
      for (uint64_t n = 0; std::ssize(chosen) < s.top_k; ++n)
        chosen.insert(static_cast<int32_t>(random_u64(static_cast<uint64_t>(call) << 32 | static_cast<uint64_t>(i), n) %
                                           static_cast<uint64_t>(s.experts)));
      ids.insert(ids.end(), chosen.begin(), chosen.end());
    }
    if (call == 0) touched.insert(ids.begin(), ids.end());
    all.push_back({.num_tokens = tokens,
                   .top_k = s.top_k,
                   .ids = upload(ids),
                   .weights = upload(std::vector<float>(ids.size(), 1.0f / static_cast<float>(s.top_k)))});
  }
  *distinct = static_cast<int>(touched.size());
  return all;
}

RawMatrix dummy(WeightFormat format, int64_t out, int64_t in, uint64_t key) {
  return {.format = format, .out = out, .in = in, .data_key = 2 * key, .scale_key = 2 * key + 1};
}

void measure_experts(CudaOps& ops, const ExpertShape& s) {
  const auto row_name = [&](int64_t tokens) { return "moe " + std::string(s.name) + " t" + std::to_string(tokens); };
  if (std::none_of(s.tokens.begin(), s.tokens.end(), [&](int64_t t) { return wanted(row_name(t)); })) return;
  std::vector<RawExpert> raw;
  for (int64_t e = 0; e < s.experts; ++e) {
    const auto key = static_cast<uint64_t>(3 * e);
    raw.push_back({dummy(s.format, s.inter, s.hidden, key), dummy(s.format, s.inter, s.hidden, key + 1),
                   dummy(s.format, s.hidden, s.inter, key + 2)});
  }
  const ExpertWeights weights = ops.pack_experts(raw);
  for (const int64_t tokens : s.tokens) {
    if (!wanted(row_name(tokens))) continue;
    const int calls = tokens <= 16 ? 12 : tokens <= 512 ? 4 : 2;
    int distinct = 0;
    const std::vector<Routing> routing = spread_routing(s, tokens, calls, &distinct);
    const Tensor x = random_rows(tokens, s.hidden);
    const double us =
        time_calls(ops, calls, [&](int i) { ops.moe_experts(x, routing[static_cast<size_t>(i)], weights); });
    print_row(row_name(tokens), us, distinct * s.bytes(),
              6.0 * static_cast<double>(tokens * s.top_k * s.hidden * s.inter), std::to_string(distinct) + " experts");
    must(cudaFree(x.data));
    for (const Routing& r : routing) must(cudaFree(r.ids)), must(cudaFree(r.weights));
  }
}

// y = x W^T, W [out, in] of one of many copies.
void measure_linear(CudaOps& ops, WeightFormat format, int64_t in, int64_t out) {
  const double bytes = static_cast<double>(out * in) * (format == WeightFormat::kBF16 ? 2 : 1);
  std::vector<LinearWeight> copies;
  for (const int64_t rows : {1, 4, 16, 32, 2048}) {
    const std::string name = std::string(format == WeightFormat::kBF16 ? "bf16" : "fp8") + " [" + std::to_string(in) +
                             " -> " + std::to_string(out) + "] rows " + std::to_string(rows);
    if (!wanted(name)) continue;
    const auto count = static_cast<size_t>(std::clamp(4e8 / bytes, 2.0, 40.0));
    while (copies.size() < count) copies.push_back(ops.pack_linear(dummy(format, out, in, copies.size())));
    const Tensor x = random_rows(rows, in);
    const int calls = rows > 64 ? 2 : static_cast<int>(count);
    const double us =
        time_calls(ops, calls, [&](int i) { ops.linear(x, copies[static_cast<size_t>(i)], DType::kBF16); });
    print_row(name, us, bytes, 2.0 * static_cast<double>(rows * out * in));
    must(cudaFree(x.data));
  }
}

// A gated MLP: the shared experts.
void measure_mlp(CudaOps& ops, int64_t hidden, int64_t inter) {
  std::vector<MlpWeights> copies;
  const double bytes = 6.0 * static_cast<double>(hidden * inter);
  for (const int64_t rows : {1, 64, 2048}) {
    const std::string name =
        "mlp [" + std::to_string(hidden) + ", " + std::to_string(inter) + "] rows " + std::to_string(rows);
    if (!wanted(name)) continue;
    while (copies.size() < 10)
      copies.push_back({.gate_up = ops.pack_gate_up(dummy(WeightFormat::kBF16, inter, hidden, 3 * copies.size()),
                                                    dummy(WeightFormat::kBF16, inter, hidden, 3 * copies.size() + 1)),
                        .down = ops.pack_linear(dummy(WeightFormat::kBF16, hidden, inter, 3 * copies.size() + 2))});
    const Tensor x = random_rows(rows, hidden);
    const double us =
        time_calls(ops, rows > 64 ? 2 : 10, [&](int i) { ops.dense_mlp(x, copies[static_cast<size_t>(i)]); });
    print_row(name, us, bytes, static_cast<double>(rows) * bytes);
    must(cudaFree(x.data));
  }
}

// Weights are bf16 numbers in f32, as those of files.
struct RouterShape {
  const char* name;
  int64_t hidden, experts;
  int top_k;
  RouterScore score;
};

void measure_router(CudaOps& ops, const RouterShape& s) {
  std::vector<RouterWeight> copies;
  const double bytes = 4.0 * static_cast<double>(s.hidden * s.experts);
  for (const int64_t rows : {1, 64, 2048, 8192}) {
    const std::string name = "router " + std::string(s.name) + " t" + std::to_string(rows);
    if (!wanted(name)) continue;
    const auto count = static_cast<size_t>(std::clamp(2e8 / bytes, 4.0, 40.0));
    while (copies.size() < count) {
      std::vector<float> weight(static_cast<size_t>(s.hidden * s.experts));
      for (size_t i = 0; i < weight.size(); ++i)
        weight[i] = bf16_to_f32(f32_to_bf16(0.1f * (random_unit(copies.size(), i) - 0.5f)));
      std::vector<float> bias(static_cast<size_t>(s.experts), 0.01f);
      copies.push_back({.num_experts = s.experts,
                        .hidden = s.hidden,
                        .weight = ops.pack_vector(std::move(weight)),
                        .bias = s.score == RouterScore::kSigmoid ? ops.pack_vector(std::move(bias)) : VectorWeight(),
                        .score = s.score,
                        .top_k = s.top_k});
    }
    const Tensor x = random_rows(rows, s.hidden);
    const int calls = rows > 64 ? 2 : static_cast<int>(count);
    const double us = time_calls(ops, calls, [&](int i) { ops.route(x, copies[static_cast<size_t>(i)]); });
    print_row(name, us, bytes, 2.0 * static_cast<double>(rows * s.hidden * s.experts));
    must(cudaFree(x.data));
  }
}

int main_of() {
  CudaOps ops({});
  must(cudaGetLastError());
  constexpr auto kBF16 = WeightFormat::kBF16, kInt4 = WeightFormat::kInt4Group32, kFp8 = WeightFormat::kF8Block128;
  // The first: Kimi-K2's projections into latent space; then the shares of 2 and of 8 ranks, if they were divided.
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{7168, 2112},
                                {7168, 1056},
                                {7168, 264},
                                {1024, 7168},
                                {2048, 3072},
                                {2304, 12288}})
    measure_linear(ops, kBF16, in, out);
  measure_linear(ops, kFp8, 7168, 2112);
  measure_mlp(ops, 2048, 2816);
  measure_router(ops, {"V2-Lite", 2048, 64, 6, RouterScore::kSoftmax});
  measure_router(ops, {"Kimi-Linear", 2304, 256, 8, RouterScore::kSigmoid});
  measure_router(ops, {"K2.5", 7168, 384, 8, RouterScore::kSigmoid});
  measure_experts(ops, {"bf16 V2-Lite", kBF16, 2048, 1408, 64, 6, {1, 4, 16, 64, 256, 512, 2048, 8192, 16384}});
  measure_experts(ops, {"bf16 Kimi-Linear", kBF16, 2304, 1024, 256, 8, {1, 4, 16, 64, 512, 2048, 8192, 16384}});
  measure_experts(ops, {"int4 K2.5/8", kInt4, 7168, 256, 384, 8, {1, 4, 16, 64, 512, 2048, 8192, 16384}});
  measure_experts(ops, {"fp8 V3/8", kFp8, 7168, 256, 256, 8, {1, 64, 2048, 8192, 16384}});
  CudaOps portable({.portable = true});
  measure_experts(portable, {"portable bf16 Kimi-Linear", kBF16, 2304, 1024, 256, 8, {2048, 8192}});
  measure_experts(portable, {"portable int4 K2.5/8", kInt4, 7168, 256, 384, 8, {2048, 8192}});
  measure_experts(portable, {"portable fp8 V3/8", kFp8, 7168, 256, 256, 8, {2048, 8192}});
  return ops.status().ok() ? 0 : (std::fprintf(stderr, "%s\n", ops.status().error().message.c_str()), 1);
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  perigee::bench::filters.assign(argv + 1, argv + argc);
  return perigee::main_of();
}

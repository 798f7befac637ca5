#include "base/check.h"
#include "comm/cuda/term.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/moe/combine.h"
#include "ops/cuda/norm_row.cuh"

namespace perigee {
namespace {

// MoeParts as the kernels take them.
struct Parts {
  const void* outputs;
  bool narrow;  // bf16, else f32
  const float* weights;
  const int32_t* ids;  // null: all experts are here
  int top_k;
  Tensor shared;
};

__device__ __forceinline__ float4 wide(const float4& v) {
  return v;
}
__device__ __forceinline__ float4 wide(const uint2& pairs) {
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.y));
  return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

constexpr int kAtOnce = 8;  // experts whose outputs are under way together: with one at a time, each waits for its own

// sums[i] = the experts' sum of a token's columns 4 * fours[i] ... 4 * fours[i] + 3, where has[i]. Four is float4 or a
// uint2 of bf16.
template <typename Four, int kCount>
__device__ __forceinline__ void sum_experts(const Parts& parts, int64_t token, int64_t row_fours,
                                            const int (&fours)[kCount], const bool (&has)[kCount],
                                            float4 (&sums)[kCount]) {
  const float* weights = parts.weights + token * parts.top_k;
  const int32_t* ids = parts.ids == nullptr ? nullptr : parts.ids + token * parts.top_k;
  const Four* rows = static_cast<const Four*>(parts.outputs) + token * parts.top_k * row_fours;
  for (int first = 0; first < parts.top_k; first += kAtOnce) {
    Four loaded[kAtOnce][kCount];
    float weight[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= parts.top_k) continue;
      const bool here = ids == nullptr || ids[first + k] >= 0;
      weight[k] = here ? weights[first + k] : 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        loaded[k][i] = {};
        if (has[i] && here) loaded[k][i] = __ldcs(rows + (first + k) * row_fours + fours[i]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= parts.top_k) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float4 part = wide(loaded[k][i]);
        sums[i] = {fmaf(weight[k], part.x, sums[i].x), fmaf(weight[k], part.y, sums[i].y),
                   fmaf(weight[k], part.z, sums[i].z), fmaf(weight[k], part.w, sums[i].w)};
      }
    }
  }
}

template <int kCount>
__device__ __forceinline__ void sum_parts(const Parts& parts, int64_t token, int64_t row_fours,
                                          const int (&fours)[kCount], const bool (&has)[kCount],
                                          float4 (&sums)[kCount]) {
  float4 shared[kCount];
  const bool more = parts.shared.data != nullptr;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = {};
    if (more && has[i]) shared[i] = reinterpret_cast<const float4*>(parts.shared.row<float>(token))[fours[i]];
  }
  if (parts.narrow) {
    sum_experts<uint2>(parts, token, row_fours, fours, has, sums);
  } else {
    sum_experts<float4>(parts, token, row_fours, fours, has, sums);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (more) sums[i] = sums[i] + shared[i];
}

constexpr int kCombineThreads = 128;

// A thread sums four columns of one token. kTerms: y is terms.
template <bool kTerms>
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(Parts parts, bool accumulate, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int fours[1] = {static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x)};
  if (4 * fours[0] >= y.cols) return;
  float4 sum[1];
  sum_parts(parts, blockIdx.y, y.cols / 4, fours, {true}, sum);
  if constexpr (kTerms) {
    reinterpret_cast<uint2*>(y.row<uint16_t>(blockIdx.y))[fours[0]] = {to_terms(sum[0].x, sum[0].y),
                                                                       to_terms(sum[0].z, sum[0].w)};
  } else {
    float4& to = reinterpret_cast<float4*>(y.row<float>(blockIdx.y))[fours[0]];
    to = accumulate ? sum[0] + to : sum[0];
  }
}

constexpr int kManySplit = 2;  // kNormSplit would take more registers

// A block has one token.
template <int kSplit>
__global__ __launch_bounds__(kNormThreads / kSplit) void combine_norm_kernel(Parts parts, Tensor residual,
                                                                             const float* weight, float eps, Tensor y) {
  constexpr int kCount = kSplit == 1 ? 2 : 1;  // pieces that a thread sums together
  NormRow<kSplit> row(weight, residual.cols);
  dependency_wait();
  dependency_trigger();
  auto* sum = reinterpret_cast<float4*>(residual.row<float>(blockIdx.x));
#pragma unroll
  for (int p = 0; p < row.kPieces; p += kCount) {
    int fours[kCount];
    bool has[kCount];
    float4 before[kCount], sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fours[i] = row.column(p + i);
      has[i] = row.has(p + i);
      if (has[i]) before[i] = sum[fours[i]];
    }
    if (!has[0]) continue;  // nor the one after it
    sum_parts(parts, blockIdx.x, row.fours, fours, has, sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      row.v[p + i] = sums[i] + before[i];
      if (has[i]) sum[fours[i]] = row.v[p + i];
    }
  }
  row.normalize(eps, y.row<uint16_t>(blockIdx.x));
}

Parts kernel_parts(const MoeParts& parts, const Tensor& y) {
  CHECK(parts.outputs.cols == y.cols && parts.outputs.contiguous() && y.cols % 8 == 0, parts.outputs.cols,
        " columns for ", y.cols);
  CHECK(parts.outputs.dtype == DType::kBF16 || parts.outputs.dtype == DType::kF32);
  return {.outputs = parts.outputs.data,
          .narrow = parts.outputs.dtype == DType::kBF16,
          .weights = parts.routing.weights,
          .ids = parts.routing.num_elsewhere > 0 ? parts.routing.ids : nullptr,
          .top_k = parts.routing.top_k,
          .shared = parts.shared};
}

}  // namespace

cudaError_t combine_rows(const MoeParts& parts, bool accumulate, const Tensor& y, cudaStream_t stream) {
  constexpr unsigned kColumns = 4 * kCombineThreads;
  const LaunchShape shape{
      .grid = dim3((static_cast<unsigned>(y.cols) + kColumns - 1) / kColumns, static_cast<unsigned>(y.rows)),
      .block = dim3(kCombineThreads),
      .stream = stream};
  const bool terms = y.dtype == DType::kF16;
  CHECK(!(terms && accumulate) && y.row_stride % 4 == 0);
  return launch(terms ? combine_kernel<true> : combine_kernel<false>, shape, kernel_parts(parts, y), accumulate, y);
}

bool combine_norm_pays(const Tensor& residual) {
  // One multiprocessor reads a row's 8 x 7,168 outputs in 3.8 us; several, then the norm, take 3.2 (H200).
  const bool few_wide_rows = residual.cols > 4096 && residual.rows < 32;
  return in_fours(residual) && !few_wide_rows;
}

cudaError_t combine_norm_rows(const MoeParts& parts, const Tensor& residual, const float* weight, float eps,
                              const Tensor& y, cudaStream_t stream) {
  CHECK(in_fours(residual), "a norm of ", residual.cols, " columns");
  const bool many = residual.rows >= kManyRows;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(residual.rows)),
                          .block = dim3(many ? kNormThreads / kManySplit : kNormThreads),
                          .stream = stream};
  return launch(many ? combine_norm_kernel<kManySplit> : combine_norm_kernel<1>, shape, kernel_parts(parts, residual),
                residual, weight, eps, y);
}

}  // namespace perigee

// The RMSNorm of one row by one block, which keeps the row in registers: f32, in fours, up to 8,192 columns.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "tensor/tensor.h"

namespace perigee {

constexpr int kNormThreads = 512;
constexpr int kNormFours = 4;   // of a thread: rows of up to 8,192 columns
constexpr int kNormSplit = 4;   // of many rows: the work of so many threads is one's
constexpr int kManyRows = 512;  // from here on

// Whether rows of `x` can be kept so: everything in fours on 16 bytes.
inline bool in_fours(const Tensor& x) {
  return x.cols % 4 == 0 && x.cols <= 4 * kNormFours * kNormThreads && x.row_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// Four columns in bf16; `factor`: 1 / sqrt(mean square + eps).
__device__ __forceinline__ uint2 normed_four(const float4& v, float factor, const float4& weight) {
  return {pack_pair(Bf16(), v.x * factor * weight.x, v.y * factor * weight.y),
          pack_pair(Bf16(), v.z * factor * weight.z, v.w * factor * weight.w)};
}

// A block of kNormThreads / kSplit threads. Sums are added in an order that does not depend on kSplit.
template <int kSplit>
struct NormRow {
  static constexpr int kPieces = kNormFours * kSplit, kOwn = kNormThreads / kSplit;
  const float4* weight;
  int fours;
  float4 v[kPieces];  // the thread's part of the row; piece p is that of thread p % kSplit of 512
  float4 w[kSplit == 1 ? kPieces : 1];

  // Loads the weights of few rows ahead of time: they may be read before dependency_wait().
  __device__ __forceinline__ NormRow(const float* weights, int64_t cols)
      : weight(reinterpret_cast<const float4*>(weights)), fours(static_cast<int>(cols / 4)) {
#pragma unroll
    for (int p = 0; p < kPieces && kSplit == 1; ++p)
      if (has(p)) w[p] = weight[column(p)];
  }
  __device__ static int column(int p) {
    return threadIdx.x + p % kSplit * kOwn + p / kSplit * kNormThreads;
  }
  __device__ bool has(int p) const {
    return column(p) < fours;
  }

  // out = v / sqrt(mean(v^2) + eps) * weight in bf16.
  __device__ __forceinline__ void normalize(float eps, uint16_t* out) const {
    normalize(eps, [&](int four, const uint2& y) { reinterpret_cast<uint2*>(out)[four] = y; });
  }
  // store(c, y) for columns 4 c ... 4 c + 3. Before another row, the block must synchronize.
  template <typename Store>
  __device__ __forceinline__ void normalize(float eps, const Store& store) const {
    __shared__ float parts[kNormThreads / 32];
#pragma unroll
    for (int s = 0; s < kSplit; ++s) {
      float squares = 0;
#pragma unroll
      for (int p = s; p < kPieces; p += kSplit)
        if (has(p))
          squares = fmaf(v[p].x, v[p].x, fmaf(v[p].y, v[p].y, fmaf(v[p].z, v[p].z, fmaf(v[p].w, v[p].w, squares))));
      squares = warp_sum(squares);
      if (threadIdx.x % 32 == 0) parts[(threadIdx.x + s * kOwn) / 32] = squares;
    }
    __syncthreads();
    float total = 0;
    for (const float part : parts) total += part;
    const float factor = rsqrtf(total / static_cast<float>(4 * fours) + eps);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (!has(p)) continue;
      const float4 a = kSplit == 1 ? w[p] : weight[column(p)];
      store(column(p), normed_four(v[p], factor, a));
    }
  }
};

}  // namespace perigee

// What the prefill kernels share: a block's place in the batch, and the joining of pieces.
#pragma once

#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

inline constexpr int kPrefillRope = 64;
inline constexpr float kLog2e = 1.4426950408889634f;

// This block's place in the batch.
struct Place {
  int head;
  int first_query, queries;  // of the sequence
  int first_key, keys;
  int offset;
  int row_begin;  // of this block, in the sequence
};

__device__ inline Place find_place(const MlaPrefillArgs& a, int rows) {
  const int s = blockIdx.z;
  Place at;
  at.head = blockIdx.x;
  at.first_query = a.first_query[s];
  at.queries = a.first_query[s + 1] - at.first_query;
  at.first_key = a.first_key[s];
  at.keys = a.first_key[s + 1] - at.first_key;
  at.offset = a.offset ? a.offset[s] : at.keys - at.queries;
  at.row_begin = (gridDim.y - 1 - blockIdx.y) * rows;  // the longest first
  return at;
}

// How a row's sums over this piece become the result: out = sums * scale + earlier result * old_scale.
struct Joined {
  int64_t row;  // of the outputs
  float scale, old_scale;
};

// The four lanes of a row call it together; `largest` is in units of log2, `sum` each lane's own. Stores the row's
// log-sum-exp.
__device__ inline Joined join_earlier(const MlaPrefillArgs& a, const Place& at, int row, float largest, float sum) {
  Joined joined{static_cast<int64_t>(at.first_query + row) * a.heads + at.head, 0, 0};
  const bool there = row < at.queries;
  const float old = there && a.join ? a.lse[joined.row] : -INFINITY;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  __syncwarp();  // the four lanes have read the old log-sum-exp
  float lse = sum > 0 ? largest / kLog2e + __logf(sum) : -INFINITY;
  joined.scale = sum > 0 ? 1 / sum : 0.0f;
  if (const float both = fmaxf(old, lse); a.join && both > -INFINITY) {
    const float old_weight = __expf(old - both), weight = __expf(lse - both);
    joined.old_scale = old_weight / (old_weight + weight);
    joined.scale *= weight / (old_weight + weight);
    lse = both + __logf(old_weight + weight);
  }
  if (there && a.lse && threadIdx.x % 4 == 0) a.lse[joined.row] = lse;
  return joined;
}

// Columns `column` and the next of the row.
__device__ inline void store_pair(const MlaPrefillArgs& a, const Joined& joined, int column, float2 sums) {
  const int64_t to = joined.row * a.value + column;
  float2 x = make_float2(sums.x * joined.scale, sums.y * joined.scale);
  if (joined.old_scale > 0) {
    const float2 old = *reinterpret_cast<const float2*>(a.out_f32 + to);
    x.x += old.x * joined.old_scale, x.y += old.y * joined.old_scale;
  }
  if (a.out_f32) *reinterpret_cast<float2*>(a.out_f32 + to) = x;
  if (a.out) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(a.out) + to) = pack_pair(Bf16(), x.x, x.y);
}

cudaError_t mla_prefill_wgmma_prepare();
cudaError_t mla_prefill_wgmma_launch(const MlaPrefillArgs& args, cudaStream_t stream);

}  // namespace perigee

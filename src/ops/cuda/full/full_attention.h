// Attention with keys and values by head on the GPU, and what fills its cache. Shapes and meaning are those of
// ops/ops.h; all pointers are device pointers.
//
// One kernel by 16x8x16 matrix products serves every number of queries (f32 sums and softmax, online: Milakov,
// Gimelshein 2018). Few queries of a sequence share their keys among the warps of a block and the cache among several
// blocks, whose results a second kernel joins; of many each warp has 16 for itself. bf16 keys and values are multiplied
// as they are, e4m3 ones as f16, which is exact.
#pragma once

#include <cuda_runtime.h>

#include <span>

#include "ops/batch.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

// What full_attend_rows() leaves for the kernel that joins: f32 of this many (token, head, part).
inline constexpr int64_t kFullPartials = 32768;
inline constexpr int64_t kFullMostDim = 128;
constexpr int64_t full_partial_bytes(int64_t dim) {
  return kFullPartials * (dim + 2) * 4;
}

// From the projections of each new token, f32 [n, (heads + 2 kv_heads) * dim]: queries, keys, values; rotates the first
// two, stores keys and values in the cache. q, bf16 [n, heads * dim].
struct FullWriteCall {
  const Tensor& qkv;
  const FullShape& shape;
  const Rope& rope;  // of halves, of whole heads
  const Batch& batch;
  const FullLayer& cache;
  const Tensor& q;
};
cudaError_t full_write_rows(const FullWriteCall& call, cudaStream_t stream);
// Of keys and values [n, kv_heads * dim] f32 that are rotated.
cudaError_t full_store_rows(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache,
                            cudaStream_t stream);

// Sequences [first, first + count) of the batch, each of `max_tokens` new tokens at most. q and out bf16
// [n, heads * dim]; rows of padding get zeros. `partials`: see kFullPartials.
struct FullAttendCall {
  const Tensor& q;
  const FullShape& shape;
  const DeviceSequences& sequences;
  const FullLayer& cache;
  const Tensor& out;
  int32_t first = 0, count = 0, max_tokens = 1;
  int32_t first_row = 0, rows = 0;  // of those sequences
  bool fixed = false;               // deterministic mode: a row's bits do not depend on the other rows
  float* partials = nullptr;
};
cudaError_t full_attend_rows(const FullAttendCall& call, cudaStream_t stream);
// On each device before the first launch there.
cudaError_t full_load_kernels();

}  // namespace perigee

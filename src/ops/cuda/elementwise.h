// The ops that touch each number once: embedding, norms, activation, rotation, cache writes, gathers. All pointers are
// device pointers; n rows, strides in elements.
#pragma once

#include <cuda_runtime.h>

#include "ops/batch.h"
#include "ops/cuda/packed.h"
#include "tensor/tensor.h"

namespace perigee {

// y[i] = table[tokens[i] - first], zeros where the table has no such row. y f32 [n, dim].
cudaError_t embed_rows(const CudaMatrix& table, int64_t first, const int32_t* tokens, const Tensor& y,
                       cudaStream_t stream);
// y = x / sqrt(mean(x^2) + eps) * weight, x f32 and y bf16; with `addend` (f32) first x += addend, in place. Without
// it x may also be bf16, and y f32.
cudaError_t rms_norm_rows(const Tensor& x, const Tensor* addend, const float* weight, float eps, const Tensor& y,
                          cudaStream_t stream);
cudaError_t add_rows(const Tensor& residual, const Tensor& y, cudaStream_t stream);
// `interleaved`: 8 columns of gate, 8 of up, ..., as packed.h has the rows of their weights.
cudaError_t silu_mul_rows(const Tensor& gate_up, bool interleaved, const Tensor& y, cudaStream_t stream);

struct RopeCall {
  int64_t head_dim = 0, rope_begin = 0;
  const int32_t* positions = nullptr;
  const float* inv_freq = nullptr;
  int32_t pairs = 0;
  bool halves = false;  // Rope::halves
  float factor = 1;
};
cudaError_t rope_rows(const Tensor& x, const RopeCall& call, cudaStream_t stream);

// The rotated key part is read where it lies, f32 [n, dr].
cudaError_t write_latent_rows(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache,
                              cudaStream_t stream);
// y[i] = the cached row of position begin + i of the sequence with this block table; y bf16 [keys, L + dr].
cudaError_t gather_latent_rows(const int32_t* block_table, int64_t begin, const LatentLayer& cache, int64_t latent,
                               const Tensor& y, cudaStream_t stream);
// to[i] = values[i], i < 5: a few numbers that a kernel wants to read in device memory.
struct FiveNumbers {
  int32_t values[5];
};
cudaError_t store_numbers(const FiveNumbers& numbers, int32_t* to, cudaStream_t stream);
// y = x, rounded: x f32, y bf16 or terms (comm/cuda/term.h), these of a multiple of 4 columns.
cudaError_t round_rows(const Tensor& x, const Tensor& y, cudaStream_t stream);
// y[i] = x[rows[i]], both f32 or both bf16.
cudaError_t gather_tensor_rows(const Tensor& x, const int32_t* rows, const Tensor& y, cudaStream_t stream);
// y[n, h, begin ...] = x[n, h, x_begin ...], `count` bf16 each: the rope part of the queries beside their latent part.
struct HeadColumns {
  int64_t stride = 0, head = 0, begin = 0;  // elements from row to row, from head to head, first column
};
cudaError_t copy_head_columns(const uint16_t* x, HeadColumns from, uint16_t* y, HeadColumns to, dim3 rows_heads_count,
                              cudaStream_t stream);

}  // namespace perigee

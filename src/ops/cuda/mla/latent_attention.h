// Absorbed latent attention in its plainest form on a GPU: a warp for each (row, head), keys staged in shared memory,
// the context cut into splits that a second kernel joins. Any latent width up to 512, any number of heads.
#pragma once

#include <cuda_runtime.h>

#include "ops/batch.h"
#include "ops/weights.h"

namespace perigee {

struct LatentAttention {
  const uint16_t* q = nullptr;  // bf16 [n, h, L + dr], the first L columns in latent space
  uint16_t* out = nullptr;      // bf16 [n, h, L]; or:
  uint16_t* results = nullptr;  // [n, h, result_columns(L)]: see result_row.h
  float* parts = nullptr;       // scratch, latent_attention_floats()
  int32_t rows = 0, heads = 0, latent = 0, rope = 0, splits = 1;
  float softmax_scale = 0;
};

// How often the context is cut, from the shape alone: the same for any length, so that a graph stays valid.
int32_t latent_attention_splits(int64_t rows, int64_t heads);
int64_t latent_attention_floats(int64_t rows, int64_t heads, int64_t latent, int64_t splits);
// What calls of at most so many rows need: fewer rows may be cut into more splits.
int64_t latent_attention_most_floats(int64_t rows, int64_t heads, int64_t latent);
cudaError_t latent_attention(const LatentAttention& call, const Batch& batch, const LatentLayer& cache,
                             cudaStream_t stream);

}  // namespace perigee

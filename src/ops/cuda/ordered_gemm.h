// Matrix products of many rows of x with the bits of skinny.h: for deterministic mode, where a row must come out alike
// in a step of any size. Tiles of 128 rows of W by 96 tokens, cp.async and mma.sync; each sum is made of the same
// products in the same order as there.
#pragma once

#include "ops/cuda/skinny.h"

namespace perigee {

constexpr int kOrderedRows = 96;  // of x: the items' size in grouped calls

// Whether there is a kernel for this format; others have skinny_gemm alone.
bool ordered_gemm_has(WeightFormat format);
// Dense or grouped, as skinny_gemm; items of at most kOrderedRows pairs.
cudaError_t ordered_gemm(WeightFormat format, const GemmCall& call, cudaStream_t stream);

}  // namespace perigee

// Matrix products of many rows of x with the bits of skinny.h: for deterministic mode, where a row must come out alike
// in a step of any size. Tiles of 128 rows of W by 96 tokens, cp.async and mma.sync; each sum is made of the same
// products in the same order as there.
#pragma once

#include "ops/cuda/gemm/skinny.h"

namespace perigee {

// Dense or grouped, as skinny_gemm; items of at most kOrderedRows pairs. Requires ordered_gemm_has(format).
cudaError_t ordered_gemm(WeightFormat format, const GemmCall& call, cudaStream_t stream);

}  // namespace perigee

// Matrix products of many rows of x on the portable path: tiles of 128 tokens x 128 rows of W, cp.async and mma.sync,
// under 99 KB of shared memory. Dense or grouped by expert; INT4 and FP8 weights are widened between shared memory and
// registers. One configuration whatever the number of rows, so that a row's result depends on nothing else.
#pragma once

#include "ops/cuda/gemm/skinny.h"

namespace perigee {

// Items of at most kTileRows pairs in grouped calls.
cudaError_t tile_gemm(WeightFormat format, const GemmCall& call, cudaStream_t stream);

}  // namespace perigee

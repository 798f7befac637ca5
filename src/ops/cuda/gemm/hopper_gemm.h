// Matrix products of many rows of x on Hopper (sm_90a): tiles of 128 rows of W by up to 256 rows of x, warpgroup
// products that take x from shared memory and W from there (bf16) or, widened on the way, from registers (INT4, FP8).
// Dense or grouped by expert, as tile_gemm.h. A result depends on its own row alone, not on the tile it is
// part of, but not in the bits of the other kernels.
#pragma once

#include "ops/cuda/gemm/skinny.h"

namespace perigee {

// Whether this product has the alignment the kernels need: 16-byte rows of x and of a bf16 y, one head.
bool hopper_gemm_fits(const GemmCall& call);
// Pairs of an item in grouped calls.
int hopper_item_rows(WeightFormat format);

// Loads the kernels; before the first launch and outside of captures.
cudaError_t hopper_gemm_prepare();
// `matrices`: experts after `weight`, 1 if dense.
cudaError_t hopper_gemm(WeightFormat format, const GemmCall& call, int matrices, cudaStream_t stream);

}  // namespace perigee

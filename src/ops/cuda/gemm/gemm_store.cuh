// How kernels of GemmCall store sums that a thread has one by one.
#pragma once

#include "comm/cuda/term.h"
#include "ops/cuda/gemm/skinny.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

__device__ __forceinline__ void store_one(const GemmCall& c, int64_t at, float value) {
  if (c.output == GemmOutput::kF32)
    static_cast<float*>(c.y)[at] = value;
  else if (c.output == GemmOutput::kTerm)
    static_cast<Term*>(c.y)[at] = to_term(value);
  else
    static_cast<__nv_bfloat16*>(c.y)[at] = __float2bfloat16_rn(value);
}

// The sums of rows first + g and first + g + 8 of W with one row of x, whose row of y begins at `at`; `first` is a
// multiple of 16.
__device__ __forceinline__ void store_two(const GemmCall& c, int64_t at, int first, int g, float low, float high) {
  if (c.output == GemmOutput::kSiluMul) {
    if (first + g < c.out) store_one(c, at + first / 2 + g, silu_mul(low, high));
  } else {
    if (first + g < c.out) store_one(c, at + first + g, low);
    if (first + g + 8 < c.out) store_one(c, at + first + g + 8, high);
  }
}

}  // namespace perigee

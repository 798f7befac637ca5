// The weighted sum of each token's experts, alone or at a layer's end together with the residual and the next norm.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

// Elements of 4 bytes that hold the experts' outputs of at most so many pairs: `narrow` ones are bf16, and from
// `first_narrow` pairs on all are.
constexpr int64_t moe_most_parts(int64_t num_pairs, int64_t first_narrow) {
  return num_pairs < first_narrow ? num_pairs : std::max((num_pairs + 1) / 2, first_narrow - 1);
}

// Row i of the sum: over k, in this order, of weights[i, k] * outputs[i * top_k + k], where that expert is here, plus
// row i of `shared`.
struct MoeParts {
  Tensor outputs;  // [n * k, H] bf16 or f32, H a multiple of 8
  Routing routing;
  Tensor shared;  // [n, H] f32; no data: none
};
// y = the sum, f32 or terms (comm/cuda/term.h), or with `accumulate` y += the sum, f32.
cudaError_t combine_rows(const MoeParts& parts, bool accumulate, const Tensor& y, cudaStream_t stream);

// residual += the sum; y = the residual's RMSNorm in bf16. In one kernel, with the bits of the separate ones.
// Requires rows that norm_row.cuh takes, and pays unless they are few and wide.
bool combine_norm_pays(const Tensor& residual);
cudaError_t combine_norm_rows(const MoeParts& parts, const Tensor& residual, const float* weight, float eps,
                              const Tensor& y, cudaStream_t stream);

}  // namespace perigee

// Expert choice and the lists that the expert products run by.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/skinny.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

// scores f32 [n, E] is scratch. x bf16 [n, H]; at most kMaxRoutedExperts experts.
constexpr int64_t kMaxRoutedExperts = 1024;
cudaError_t route_rows(const Tensor& x, const RouterWeight& router, float* scores, const Routing& routing,
                       cudaStream_t stream);

// Sorts the pairs (token, choice) by expert and cuts each expert's into items of at most item_rows.
// pairs [n * k], items [moe_max_items()], num_items [1]. Which pair stands where among those of one expert is left
// open: no result depends on it.
int64_t moe_max_items(int64_t num_pairs, int64_t num_experts, int64_t item_rows);
cudaError_t sort_pairs(const int32_t* ids, int64_t num_pairs, int64_t num_experts, int item_rows, const GemmCall& lists,
                       cudaStream_t stream);

// y[i] = sum over k of weights[i, k] * parts[i * top_k + k], in the order of k, plus `also`.
struct CombineAlso {
  const Tensor* addend = nullptr;  // [n, H] f32, if any
  bool accumulate = false;         // y itself
};
cudaError_t combine_pairs(const float* parts, const Routing& routing, const CombineAlso& also, const Tensor& y,
                          cudaStream_t stream);

}  // namespace perigee

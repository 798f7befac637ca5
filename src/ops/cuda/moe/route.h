// Expert choice and the lists that the expert products run by.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/gemm/skinny.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

// scores f32 [route_scratch()] is scratch. x bf16 [n, H], H a multiple of 8; at most kMaxRoutedExperts experts, 64 of
// them chosen. `fixed_order`: a token's scores are summed in one order whatever the number of tokens.
constexpr int64_t kMaxRoutedExperts = 1024;
int64_t route_scratch(int64_t rows, const RouterWeight& router, bool fixed_order);
// What calls of at most so many rows need: fewer rows may be cut into more splits.
int64_t route_most_scratch(int64_t rows, const RouterWeight& router, bool fixed_order);
cudaError_t route_rows(const Tensor& x, const RouterWeight& router, bool fixed_order, float* scores,
                       const Routing& routing, cudaStream_t stream);

// Sorts the pairs (token, choice) by expert and cuts each expert's into items of at most item_rows.
// pairs [n * k], items [moe_max_items()], num_items [1]. Which pair stands where among those of one expert is left
// open: no result depends on it.
// counts [sort_counts()] is scratch.
int64_t moe_max_items(int64_t num_pairs, int64_t num_experts, int64_t item_rows);
int64_t sort_counts(int64_t num_pairs, int64_t num_experts);
cudaError_t sort_pairs(const int32_t* ids, int64_t num_pairs, int64_t num_experts, int item_rows, int32_t* counts,
                       const GemmCall& lists, cudaStream_t stream);

}  // namespace perigee

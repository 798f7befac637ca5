// Matrix products of a few rows of x: memory-bound, so one pass over the weights at memory speed, and nothing else.
//
// Weights are the 16-row operand of the matrix instruction, up to 32 tokens its columns, and the order of columns
// inside 128 is whatever lets each lane load 16 bytes at once. The warps of a block split `in`; their sums are added in
// a fixed order, so that a row's result does not depend on the other rows.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/choose.h"
#include "ops/cuda/packed.h"

namespace perigee {

// kTerm: of a reduce point (comm/cuda/term.h); kSiluMul: bf16 [out / 2] of interleaved gate and up rows.
enum class GemmOutput : int32_t { kF32, kBF16, kTerm, kSiluMul };

// A run of tokens for one expert: pairs[begin ... begin + count).
struct MoeItem {
  int32_t expert, begin, count;
};

struct GemmCall {
  const uint8_t* weight = nullptr;  // bf16, INT4 or FP8 as in packed.h
  const void* scale = nullptr;
  int64_t weight_stride = 0;  // bytes from one expert or head to the next
  int64_t scale_stride = 0;   // bytes
  const uint16_t* x = nullptr;
  int64_t x_stride = 0, x_head = 0;  // elements from row to row, from head to head
  void* y = nullptr;
  int64_t y_stride = 0, y_head = 0;
  int32_t rows = 0, heads = 1;
  int32_t out = 0, in = 0, chunks = 0;  // chunks of 128 columns
  GemmOutput output = GemmOutput::kF32;
  // Grouped by expert: rows of y are pairs (token, choice), rows of x are pair / x_divisor.
  const MoeItem* items = nullptr;      // null and expert_ids set: item i is pair i alone
  const int32_t* num_items = nullptr;  // on the device
  const int32_t* pairs = nullptr;
  const int32_t* expert_ids = nullptr;
  int32_t max_items = 0;
  int32_t x_divisor = 1;
  bool lists_settled = false;  // the lists were complete before the kernel in front began
};

// Dense: any number of rows, good for up to kMaxSkinnyRows: each item_rows (8, 16 or 32) of them read all weights.
// Grouped: items of at most `item_rows` (8, 16 or 32) pairs.
cudaError_t skinny_gemm(WeightFormat format, const GemmCall& call, int item_rows, cudaStream_t stream);

// Parts that a sum over the columns is made of, whatever the number of rows: chunk i is of part i % parts.
int skinny_parts(const GemmCall& call);

}  // namespace perigee

// Weights as the CUDA kernels read them, and the kernels that make them from stored bytes.
//
// A packed matrix has rows of `padded_in` columns, a multiple of 128, zeros past the last:
//   bf16   [out][padded_in]
//   INT4   [out][padded_in / 8] words; nibble i of a word is column 2i, nibble 4 + i column 2i + 1, so that
//          (word >> 4i) & 0x000F000F is a pair of neighbours. Of 64 columns words 0 to 3 stand at 0, 2, 4, 6 and words
//          4 to 7 at 1, 3, 5, 7: side by side what one lane needs of two groups. Scales bf16 [out][padded_in / 32]
//   FP8    [out][padded_in] e4m3; scales f32 [ceil(out / 8)][padded_in / 128]
// Experts lie one after the other. Gate and up projections are interleaved by 8 rows: 8 of gate, 8 of up, ..., so that
// both halves of SiLU(gate) * up meet in one lane of a matrix fragment.
#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/matrix_layout.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee {

struct CudaMatrix final : PackedWeight, MatrixLayout {
  CudaMatrix() = default;
  explicit CudaMatrix(const MatrixLayout& layout) : MatrixLayout(layout) {}
  Buffer data, scale;
  int64_t bytes() const override { return static_cast<int64_t>(data.size() + scale.size()); }
};

struct CudaExperts final : PackedWeight {
  CudaMatrix gate_up, down;  // out and in are those of one expert
  int64_t bytes() const override { return gate_up.bytes() + down.bytes(); }
};

// kv_b as it is, [h (dn + dv), L], and its key part transposed, [h][L][dn]: both are y = W x with contiguous rows.
struct CudaMlaUp final : PackedWeight {
  CudaMatrix kv_b, keys;
  int64_t bytes() const override { return kv_b.bytes() + keys.bytes(); }
};

// Where the rows of one source matrix go.
struct PackTarget {
  WeightFormat format = WeightFormat::kBF16;
  uint8_t* data = nullptr;
  void* scale = nullptr;
  int64_t padded_in = 0;
  int64_t first_row = 0;
  int interleave = -1;  // 0: gate, 1: up, -1: rows as they come
};

// `raw` with data and scale on the device, or null and keys. The target's format is the source's or bf16.
cudaError_t pack_matrix(const RawMatrix& raw, const PackTarget& target, cudaStream_t stream);
// keys[g][l][d] = kv_b[g * (dn + dv) + d][l].
cudaError_t pack_mla_keys(const CudaMatrix& kv_b, const MlaShape& shape, CudaMatrix& keys, cudaStream_t stream);

// A packed FP8 matrix as packed bf16 [out][padded_in], scales multiplied in and rounded.
cudaError_t widen_fp8(const CudaMatrix& from, uint16_t* to, cudaStream_t stream);

}  // namespace perigee

// The tensor map of the pages of a layer with an fp8 cache: boxes of neighbouring tokens' columns, in the swizzle that
// products read.
#pragma once

#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/tensor_map.h"

namespace perigee {

inline constexpr int kMlaStrips = kMlaWidth / 64;  // of 64 columns, in a key

// Boxes begin at (0, row of the page, strip, page) and lie as [strip][token][64 columns], chunk c of 16 bytes of token
// t at c ^ (t / 2 % 4). The number of pages is not known here, and only bounds-checks would need it.
inline cudaError_t make_page_map(const MlaDecodeArgs& args, int tokens, int strips, CUtensorMap* map) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  const cudaError_t error = find_tensor_map_encoder(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[4] = {64, kMlaBlock, kMlaStrips, 1u << 26};
  const cuuint64_t strides[3] = {kMlaWidth, 64, static_cast<cuuint64_t>(args.page_bytes)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(tokens), static_cast<cuuint32_t>(strips), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(args.kv), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace perigee

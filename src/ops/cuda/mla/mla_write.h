// What stands between the latent projections and MLA attention, in one kernel: RMSNorm of the latent, rope of the key
// and of the queries, the write into the paged cache in its format.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/latent_format.h"

namespace perigee {

// Device pointers; n = tokens.
struct MlaWriteArgs {
  int tokens = 0, heads = 0, nope = 0;  // a query head has nope columns, then 64 of rope
  const float* kv = nullptr;            // [n, kv_stride]: latent [512], then key rope [64], both raw
  int64_t kv_stride = 0;
  const float* norm = nullptr;  // [512]
  float eps = 0;
  void* q = nullptr;                   // bf16 [n, heads, nope + 64], its rope columns rotated in place; null: none
  const int32_t* positions = nullptr;  // [n]
  const float* inv_freq = nullptr;     // [32]; null: no rope (Kimi-Linear)
  float cos_sin_factor = 1;
  const int32_t* pages = nullptr;  // [n] page of the token's block; -1: not on this rank
  void* cache = nullptr;           // row r of page p at cache + p * page_bytes + r * the bytes of a row
  int64_t page_bytes = 0;
  LatentFormat format = LatentFormat::kBF16;  // kBF16, kF8E4M3, kF8Tiles
  float kv_scale = 1;                         // kF8E4M3: stored as e4m3 of x / kv_scale, clamped to its largest
};

// Row position % 64 of page pages[i] becomes [RMSNorm(latent) | rope(key)] (facts of DeepSeek-V2 2024, section 2.1;
// interleaved pairs).
cudaError_t mla_write(const MlaWriteArgs& args, cudaStream_t stream);

}  // namespace perigee

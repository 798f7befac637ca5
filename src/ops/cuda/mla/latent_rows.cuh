// Cached rows [c | k_rope] of every LatentFormat, as device code reads and writes them.
#pragma once

#include <cfloat>

#include "ops/batch.h"
#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/mma.cuh"

namespace perigee {

// Columns c, c + 1 of a row with so many latents, as bf16; c is even.
__device__ __forceinline__ uint32_t latent_pair(const LatentLayer& cache, const uint8_t* row, int64_t c,
                                                int64_t latent) {
  if (cache.format == LatentFormat::kBF16) return reinterpret_cast<const uint32_t*>(row)[c / 2];
  const LatentTiles tiles(row, latent);
  const bool has_tiles = cache.format == LatentFormat::kF8Tiles;
  if (has_tiles && c >= latent) return reinterpret_cast<const uint32_t*>(tiles.k_rope)[(c - latent) / 2];
  const float scale = has_tiles ? reinterpret_cast<const float*>(tiles.scales)[c / kLatentTile] : cache.scale;
  const float2 x = fp8_values(reinterpret_cast<const uint16_t*>(row)[c / 2]);
  return pack_pair(Bf16(), x.x * scale, x.y * scale);
}

// A warp: a tile of 128 latents, four a lane, into a kF8Tiles row.
__device__ __forceinline__ void store_latent_tile(uint8_t* row, int64_t latent, int tile, const float (&x)[4]) {
  const LatentTiles to(row, latent);
  const int lane = threadIdx.x % 32;
  const float largest = warp_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
  const float scale = fmaxf(largest / kLargestE4M3, FLT_MIN);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bits |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(x[i] / scale, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  reinterpret_cast<uint32_t*>(to.numbers)[tile * 32 + lane] = bits;
  if (lane == 0) reinterpret_cast<float*>(to.scales)[tile] = scale;
}

}  // namespace perigee

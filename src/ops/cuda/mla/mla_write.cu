#include <cuda_fp8.h>

#include "ops/cuda/launch.h"
#include "ops/cuda/mla/latent_rows.cuh"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_write.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = 128;
constexpr int kPairs = (kMlaWidth - kMlaLatent) / 2;
constexpr int kHeadsOfBlock = 16;  // four warps by four heads

struct Rotation {
  float cosine = 1, sine = 0;
};

__device__ Rotation rotation(const MlaWriteArgs& a, int token, int pair) {
  const float angle = static_cast<float>(a.positions[token]) * a.inv_freq[pair];
  return {cosf(angle) * a.cos_sin_factor, sinf(angle) * a.cos_sin_factor};
}

__device__ float2 rotate(float2 x, Rotation r) {
  return make_float2(x.x * r.cosine - x.y * r.sine, x.x * r.sine + x.y * r.cosine);
}

__device__ void rotate_queries(const MlaWriteArgs& a, int token) {
  const int pair = threadIdx.x % 32, first = (blockIdx.y - 1) * kHeadsOfBlock + threadIdx.x / 32;
  const int width = a.nope + 2 * kPairs;
  const Rotation r = rotation(a, token, pair);
  for (int head = first; head < min(a.heads, static_cast<int>(blockIdx.y) * kHeadsOfBlock); head += kThreads / 32) {
    const int64_t at = (static_cast<int64_t>(token) * a.heads + head) * width + a.nope + 2 * pair;
    auto* x = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.q) + at);
    const float2 y = rotate(__bfloat1622float2(*x), r);
    *x = __floats2bfloat162_rn(y.x, y.y);
  }
}

// Pair threadIdx.x of the token's rope columns.
__device__ __forceinline__ float2 rope_key(const MlaWriteArgs& a, int token) {
  const float2 key = *reinterpret_cast<const float2*>(a.kv + token * a.kv_stride + kMlaLatent + 2 * threadIdx.x);
  return a.inv_freq ? rotate(key, rotation(a, token, threadIdx.x)) : key;
}

// Columns `column` and the next of the token's row.
__device__ void store_pair(const MlaWriteArgs& a, int token, int column, float2 x) {
  const int row = a.positions[token] % kMlaBlock;
  uint8_t* page = static_cast<uint8_t*>(a.cache) + a.pages[token] * a.page_bytes;
  if (a.format == LatentFormat::kF8E4M3) {
    const float inverse = 1 / a.kv_scale;
    const auto bits = __nv_cvt_float2_to_fp8x2(make_float2(x.x * inverse, x.y * inverse), __NV_SATFINITE, __NV_E4M3);
    reinterpret_cast<uint16_t*>(page)[(row * kMlaWidth + column) / 2] = bits;
  } else {
    reinterpret_cast<uint32_t*>(page)[(row * kMlaWidth + column) / 2] = pack_pair(Bf16(), x.x, x.y);
  }
}

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  return sums[0] + sums[1] + sums[2] + sums[3];
}

__device__ void write_key(const MlaWriteArgs& a, int token) {
  const float* in = a.kv + token * a.kv_stride;
  const float2 first = *reinterpret_cast<const float2*>(in + 2 * threadIdx.x);
  const float2 second = *reinterpret_cast<const float2*>(in + kMlaLatent / 2 + 2 * threadIdx.x);
  const float sum = block_sum(first.x * first.x + first.y * first.y + second.x * second.x + second.y * second.y);
  const float factor = rsqrtf(sum / kMlaLatent + a.eps);
  const float* norm = a.norm + 2 * threadIdx.x;
  store_pair(a, token, 2 * threadIdx.x, make_float2(first.x * factor * norm[0], first.y * factor * norm[1]));
  norm += kMlaLatent / 2;
  store_pair(a, token, kMlaLatent / 2 + 2 * threadIdx.x,
             make_float2(second.x * factor * norm[0], second.y * factor * norm[1]));
  if (threadIdx.x >= kPairs) return;
  store_pair(a, token, kMlaLatent + 2 * threadIdx.x, rope_key(a, token));
}

// As a kF8Tiles row: a tile of 128 latents a warp.
__device__ void write_record(const MlaWriteArgs& a, int token) {
  const float* in = a.kv + token * a.kv_stride + 4 * threadIdx.x;
  float x[4], sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = in[i], sum += x[i] * x[i];
  const float factor = rsqrtf(block_sum(sum) / kMlaLatent + a.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= factor * a.norm[4 * threadIdx.x + i];
  uint8_t* row =
      static_cast<uint8_t*>(a.cache) + a.pages[token] * a.page_bytes +
      a.positions[token] % kMlaBlock * latent_row_bytes(LatentFormat::kF8Tiles, kMlaLatent, kMlaWidth - kMlaLatent);
  store_latent_tile(row, kMlaLatent, threadIdx.x / 32, x);
  if (threadIdx.x >= kPairs) return;
  const float2 key = rope_key(a, token);
  reinterpret_cast<uint32_t*>(LatentTiles(row, kMlaLatent).k_rope)[threadIdx.x] = pack_pair(Bf16(), key.x, key.y);
}

// Block (token, 0) writes the token's key, blocks (token, 1 ...) rotate sixteen query heads each.
__global__ void __launch_bounds__(kThreads) mla_write_kernel(const __grid_constant__ MlaWriteArgs a) {
  dependency_wait();
  dependency_trigger();
  const int token = blockIdx.x;
  if (blockIdx.y > 0) {
    rotate_queries(a, token);
  } else if (a.pages[token] >= 0) {
    if (a.format == LatentFormat::kF8Tiles) {
      write_record(a, token);
    } else {
      write_key(a, token);
    }
  }
}

}  // namespace

cudaError_t mla_write(const MlaWriteArgs& args, cudaStream_t stream) {
  static_assert(4 * kThreads == kMlaLatent);
  if (args.tokens == 0) return cudaSuccess;
  if (args.kv_stride % 2 != 0 || args.nope % 2 != 0 || args.kv_scale <= 0) return cudaErrorInvalidValue;
  const bool rotates = args.q && args.inv_freq;
  const int groups = rotates ? (args.heads + kHeadsOfBlock - 1) / kHeadsOfBlock : 0;
  return launch(mla_write_kernel, {dim3(args.tokens, 1 + groups), dim3(kThreads), 0, stream}, args);
}

}  // namespace perigee

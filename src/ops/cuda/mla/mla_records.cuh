// The key tiles of the Hopper decode kernel from a cache of 656-byte records (LatentFormat::kF8Tiles): a warpgroup
// loads them, widens them to bf16 and stores them in the swizzle that products read.
//
// There is no room in shared memory for records beside the tiles, so they travel through registers: a tile in four
// pieces, the next one under way while one is widened. Pages are brought to L2 a tile ahead, as a whole.
#pragma once

#include "ops/cuda/mla/latent_rows.cuh"
#include "ops/cuda/mla/mla_wgmma_tiles.cuh"

namespace perigee::mla_wgmma {

inline constexpr int kRecordBytes =
    static_cast<int>(latent_row_bytes(LatentFormat::kF8Tiles, kMlaLatent, kMlaWidth - kMlaLatent));
inline constexpr int kScalesAt = kMlaLatent, kRopeAt = kMlaLatent + kMlaLatent / kLatentTile * 4;
inline constexpr int kHalfLatents = kMlaLatent / 2;
static_assert(kRecordBytes == 656 && kRopeAt % 16 == 0 && kHalfLatents == 16 * 16);

// Half of the latents of half of a tile's tokens, as cached: this thread's chunk of 16 columns, of every eighth token.
struct Records {
  static constexpr int kStep = kGroup / 16, kHalfTokens = kTokens / 2, kCount = kHalfTokens / kStep;
  uint4 numbers[kCount];
  float scales[kCount];

  __device__ static __forceinline__ int chunk() { return threadIdx.x % 16; }
  __device__ static __forceinline__ int first_token() { return threadIdx.x % kGroup / 16; }

  // Columns of half `half`, tokens of half `late`.
  __device__ __forceinline__ void load(const uint8_t* page, int half, int late) {
    const uint8_t* row = page + (late * kHalfTokens + first_token()) * kRecordBytes;
    const uint8_t* from = row + half * kHalfLatents + chunk() * 16;
    const uint8_t* scale = row + kScalesAt + (half * 2 + chunk() / 8) * 4;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      numbers[n] = __ldcg(reinterpret_cast<const uint4*>(from + n * kStep * kRecordBytes));
      scales[n] = __ldcg(reinterpret_cast<const float*>(scale + n * kStep * kRecordBytes));
    }
  }

  // Of 16 lanes that have a token's chunks, those of odd columns store their second eight first: then no two of eight
  // neighbours write the same banks.
  __device__ __forceinline__ void store(uint8_t* tile, int half, int late) const {
    static_assert(kStep == 8);  // so token % 8 is the same for all of them
    const int column = half * kHalfColumns + chunk() / 4, odd = chunk() / 4 % 2, low = chunk() % 4 * 2;
    uint8_t* tokens = tile + column * kColumnBytes + late * kHalfTokens * 128;
    uint8_t* first = tokens + place(first_token(), low + odd);
    uint8_t* second = tokens + place(first_token(), low + 1 - odd);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint4 x = numbers[n];
      store_eight(first + n * kStep * 128, odd ? make_uint2(x.z, x.w) : make_uint2(x.x, x.y), scales[n]);
      store_eight(second + n * kStep * 128, odd ? make_uint2(x.x, x.y) : make_uint2(x.z, x.w), scales[n]);
    }
  }

 private:
  __device__ static __forceinline__ uint32_t widen(uint32_t pair, float scale) {
    const float2 x = fp8_values(static_cast<uint16_t>(pair));
    return pack_pair(Bf16(), x.x * scale, x.y * scale);
  }
  __device__ static __forceinline__ void store_eight(uint8_t* to, uint2 x, float scale) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(widen(x.x, scale), widen(x.x >> 16, scale), widen(x.y, scale), widen(x.y >> 16, scale));
  }
};

// The rope columns of a tile; complete after copy_async_wait.
__device__ __forceinline__ void copy_rope(const uint8_t* page, uint8_t* tile) {
#pragma unroll
  for (int n = 0; n < kTokens * 8 / kGroup; ++n) {
    const int i = threadIdx.x % kGroup + n * kGroup, token = i / 8, chunk = i % 8;
    copy_async16(shared_address(tile + kRopeColumn * kColumnBytes + place(token, chunk)),
                 page + token * kRecordBytes + kRopeAt + chunk * 16);
  }
  copy_async_commit();
}

// A warpgroup: the tiles of all items. Each of its warps arrives at `full`.
__device__ __forceinline__ void widen_tiles(const MlaAttendParams& params, Shared& shared, int2 items) {
  const auto page_at = [&](int page) {
    return static_cast<const uint8_t*>(params.args.kv) + page * params.args.page_bytes;
  };
  TileStream<kTokens> tile(params, items);
  if (tile.done()) return;
  Buffers buffers;
  Records a, b;
  buffers.enter(tile.item);
  a.load(page_at(tile.page), buffers.stage, 0);
  while (true) {
    const int own = buffers.stage, other = own ^ 1, parity = buffers.empty_parity();
    const uint8_t* page = page_at(tile.page);
    uint8_t* to = shared.tiles[own];
    if (tile.left > 0 && threadIdx.x % kGroup == 0) prefetch_page<kTokens * kRecordBytes>(params, tile.next_page);
    b.load(page, own, 1);
    barrier_wait(&shared.empty[own][kOwn], parity);
    copy_rope(page, to);
    a.store(to, own, 0);
    a.load(page, other, 0);
    b.store(to, own, 1);
    copy_async_wait<0>();
    fence_async_proxy();
    arrive_by_warp(&shared.full[own][kOwn]);
    b.load(page, other, 1);
    barrier_wait(&shared.empty[own][kOther], parity);
    a.store(to, other, 0);
    buffers.leave();
    tile.next();
    const bool done = tile.done();
    if (!done) {
      buffers.enter(tile.item);
      a.load(page_at(tile.page), buffers.stage, 0);
    }
    b.store(to, other, 1);
    fence_async_proxy();
    arrive_by_warp(&shared.full[own][kOther]);
    if (done) return;
  }
}

}  // namespace perigee::mla_wgmma

// The key tiles of the Hopper decode kernel: how they lie in shared memory, and the warpgroup that brings them.
//
// bf16: one thread, by tensor map, in the swizzle that the products read. fp8: all threads load e4m3 into registers and
// write f16, exactly.
#pragma once

#include <cuda.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/mma.cuh"

namespace perigee::mla_wgmma {

inline constexpr int kRows = 64;
inline constexpr int kTokens = 64;
inline constexpr int kGroup = 128;                  // threads of a warpgroup
inline constexpr int kColumnBytes = kTokens * 128;  // 64 tokens or rows x 64 elements
inline constexpr int kColumns = kMlaWidth / 64;     // nine of them make a tile or the queries
inline constexpr int kTileBytes = kColumns * kColumnBytes;
inline constexpr int kHalfColumns = kMlaLatent / 2 / 64;  // of the output's halves
inline constexpr int kRopeColumn = kColumns - 1;

// The parts of a tile in buffer s: the latent columns of half s and the rope column, which only warpgroup s needs until
// the end; the latent columns of the other half, which the other warpgroup needs last.
enum Part { kOwn = 0, kOther = 1, kParts = 2 };

struct Shared {
  alignas(1024) uint8_t queries[kTileBytes];
  uint8_t tiles[2][kTileBytes];
  uint8_t weights[kColumnBytes];
  float base[kRows];  // of the weights
  float sums[2][kRows];
  uint64_t full[2][kParts], empty[2][kParts];
  uint64_t weights_full[2];  // by the owner of the tile
};

template <bool kFp8>
using ElementOf = std::conditional_t<kFp8, F16, Bf16>;

// Chunk of 16 bytes `chunk` of row `row` in a column.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void arrive_by_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The buffers as the third warpgroup fills them: an item's tiles go to 0, 1, 0, 1 ...
struct Buffers {
  int item = -1, stage = 0;
  int parity[2] = {1, 1};  // of `empty`, for the next tile

  __device__ void enter(int of_item) {
    stage = of_item == item ? stage ^ 1 : 0;
    item = of_item;
  }
  __device__ int empty_parity() const { return stage == 0 ? parity[0] : parity[1]; }
  __device__ void leave() { parity[0] ^= stage ^ 1, parity[1] ^= stage; }
  // The i-th column of a part; kOwn has five, kOther four.
  __device__ int column(int part, int i) const {
    return i == kHalfColumns ? kRopeColumn : (stage ^ part) * kHalfColumns + i;
  }
};

// One thread: the tiles of all items through the tensor map.
__device__ inline void bring_bf16(const MlaAttendParams& params, const CUtensorMap& map, Shared& shared, int2 items) {
  Buffers buffers;
  bool waited = false;
  for (TileStream<kTokens> tile(params, items); !tile.done(); tile.next()) {
    if (!waited && !tile.settled()) dependency_wait(), waited = true;
    buffers.enter(tile.item);
    const uint32_t to = shared_address(shared.tiles[buffers.stage]);
    for (int part = kOwn; part < kParts; ++part) {
      const int count = part == kOwn ? kHalfColumns + 1 : kHalfColumns;
      uint64_t* full = &shared.full[buffers.stage][part];
      barrier_wait(&shared.empty[buffers.stage][part], buffers.empty_parity());
      barrier_expect(full, count * kColumnBytes);
      for (int i = 0; i < count; ++i) {
        const int column = buffers.column(part, i);
        bulk_copy_box(to + column * kColumnBytes, &map, column * 64, 0, tile.page, full);
      }
    }
    buffers.leave();
  }
}

// Fetches a page of e4m3 to L2.
__device__ __forceinline__ void prefetch(const MlaAttendParams& params, int page) {
  const uint8_t* from = static_cast<const uint8_t*>(params.args.kv) + page * params.args.page_bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(kTokens * kMlaWidth) : "memory");
}

__device__ __forceinline__ uint4 load_past_l1(const uint8_t* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// A thread's share of one part of a tile of e4m3 rows. A load takes two rows by four columns a warp, or eight rows of
// the rope column; eight lanes take two rows by four chunks of 16 bytes, so that no two of them write to one bank.
template <int kPart>
struct Raw {
  static constexpr int kPasses = kTokens / 8;  // of four columns
  static constexpr int kRopePasses = kPart == kOwn ? 2 : 0;
  uint4 chunks[kPasses + kRopePasses];

  static __device__ __forceinline__ int warp() { return threadIdx.x % kGroup / 32; }
  static __device__ __forceinline__ int row() { return 2 * warp() + threadIdx.x / 4 % 2; }  // of every eight
  static __device__ __forceinline__ int column() { return threadIdx.x % 32 / 8; }
  static __device__ __forceinline__ int rope_row() { return 8 * column() + row(); }  // of every 32

  // Issues the loads.
  __device__ __forceinline__ void load(const uint8_t* page, const Buffers& buffers) {
    const uint8_t* from = page + threadIdx.x % 4 * 16;
    const uint8_t* latent = from + row() * kMlaWidth + ((buffers.stage ^ kPart) * kHalfColumns + column()) * 64;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) chunks[i] = load_past_l1(latent + i * 8 * kMlaWidth);
#pragma unroll
    for (int i = 0; i < kRopePasses; ++i) {
      chunks[kPasses + i] = load_past_l1(from + (rope_row() + 32 * i) * kMlaWidth + kMlaLatent);
    }
  }

  // Writes f16 as soon as the part's buffer is free.
  __device__ __forceinline__ void widen(Shared& shared, const Buffers& buffers) const {
    const int low = place(row(), threadIdx.x % 4 * 2), high = place(row(), threadIdx.x % 4 * 2 + 1);
    uint8_t* tile = shared.tiles[buffers.stage];
    uint8_t* latent = tile + ((buffers.stage ^ kPart) * kHalfColumns + column()) * kColumnBytes;
    uint8_t* rope = tile + kRopeColumn * kColumnBytes + column() * 8 * 128;
    barrier_wait(&shared.empty[buffers.stage][kPart], buffers.empty_parity());
#pragma unroll
    for (int i = 0; i < kPasses + kRopePasses; ++i) {
      uint8_t* at = i < kPasses ? latent + i * 8 * 128 : rope + (i - kPasses) * 32 * 128;
      uint4 x, y;
      e4m3x4_to_f16(chunks[i].x, x.x, x.y);
      e4m3x4_to_f16(chunks[i].y, x.z, x.w);
      e4m3x4_to_f16(chunks[i].z, y.x, y.y);
      e4m3x4_to_f16(chunks[i].w, y.z, y.w);
      *reinterpret_cast<uint4*>(at + low) = x;
      *reinterpret_cast<uint4*>(at + high) = y;
    }
    fence_async_proxy();
    arrive_by_warp(&shared.full[buffers.stage][kPart]);
  }
};

// A warpgroup: the tiles of all items through registers.
__device__ inline void bring_fp8(const MlaAttendParams& params, Shared& shared, int2 items) {
  Buffers buffers;
  bool waited = false;
  TileStream<kTokens> tile(params, items);
  while (!tile.done()) {
    if (!waited && !tile.settled()) dependency_wait(), waited = true;
    buffers.enter(tile.item);
    const uint8_t* page = static_cast<const uint8_t*>(params.args.kv) + tile.page * params.args.page_bytes;
    Raw<kOwn> own;
    Raw<kOther> other;
    own.load(page, buffers);
    other.load(page, buffers);
    if (threadIdx.x % kGroup == 0 && tile.left > 0) prefetch(params, tile.next_page);
    tile.next();  // its look-ups take as long as the loads
    own.widen(shared, buffers);
    other.widen(shared, buffers);
    buffers.leave();
  }
}

}  // namespace perigee::mla_wgmma

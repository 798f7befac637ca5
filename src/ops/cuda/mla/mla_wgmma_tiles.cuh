// The key tiles of the Hopper decode kernel: how they lie in shared memory, in the swizzle that the products read, and
// the thread that brings them by tensor map; and what this kernel shares with that of an fp8 cache.
#pragma once

#include <cuda.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/mla/mla_tiles.cuh"
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

// Chunk of 16 bytes `chunk` of row `row` in a column.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void arrive_by_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The buffers as they are filled: an item's tiles go to 0, 1, 0, 1 ...
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

// Asks for a page in L2.
template <int kBytes>
__device__ __forceinline__ void prefetch_page(const MlaAttendParams& params, int page) {
#if __CUDA_ARCH__ >= 900
  const uint8_t* from = static_cast<const uint8_t*>(params.args.kv) + page * params.args.page_bytes;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(kBytes) : "memory");
#endif
}

// How many row tiles of the item's sequence read its keys.
__device__ __forceinline__ int count_readers(const MlaAttendParams& params, int item) {
  return (params.plan.items[item].num_tokens * params.heads + kRows - 1) / kRows;
}

// One thread: the tiles of all items through the tensor map. Where few row tiles read the same keys, nearly at the same
// time, keys are the first to leave L2 again. Where many do, the next tile is asked into L2 as the one before it is
// brought, for there is no room for it yet; slots that read the same keys then wait for memory together.
__device__ __forceinline__ void bring_tiles(const MlaAttendParams& params, const CUtensorMap& map, Shared& shared,
                                            int2 items) {
  constexpr int kFewReaders = 4;
  const uint64_t stays = normal_policy(), leaves = evict_first_policy();
  Buffers buffers;
  int readers = 1;
  for (TileStream<kTokens> tile(params, items); !tile.done(); tile.next()) {
    if (tile.item != buffers.item) readers = count_readers(params, tile.item);
    buffers.enter(tile.item);
    const uint64_t policy = readers > 1 && readers <= kFewReaders ? leaves : stays;
    const uint32_t to = shared_address(shared.tiles[buffers.stage]);
    if (readers > kFewReaders && tile.left > 0) prefetch_page<kTileBytes>(params, tile.next_page);
    for (int part = kOwn; part < kParts; ++part) {
      const int count = part == kOwn ? kHalfColumns + 1 : kHalfColumns;
      uint64_t* full = &shared.full[buffers.stage][part];
      barrier_wait(&shared.empty[buffers.stage][part], buffers.empty_parity());
      barrier_expect(full, count * kColumnBytes);
      for (int i = 0; i < count; ++i) {
        const int column = buffers.column(part, i);
        bulk_copy_box(to + column * kColumnBytes, &map, column * 64, 0, tile.page, full, policy);
      }
    }
    buffers.leave();
  }
}

}  // namespace perigee::mla_wgmma

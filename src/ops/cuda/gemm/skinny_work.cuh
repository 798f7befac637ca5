// What the kernels of products of few rows share: the tiles of a call, and how the sums of a tile are stored.
#pragma once

#include "ops/cuda/gemm/gemm_store.cuh"

namespace perigee::skinny {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// Of rows of x in shared memory, which a call of up to 8 tokens an item has where they fit.
constexpr int kStagedBytes = 15 * 1024;

// Tokens of one item: rows of y, and x by x_divisor.
struct Tokens {
  int matrix = 0, begin = 0, count = 0;
};

// The tiles of one call, numbered item by item: an item's matrix, cut into groups of rows_tile * kWarps / warps_k rows.
struct Shape {
  int item_rows, row_items, rows_tile, groups;
  int warps_k, tile_bits;  // 2^tile_bits tiles of a group, warps_k warps for each
  uint32_t row_bytes, scale_row;
};

// Settled lists are read before dependency_wait(), so from L2: nothing says that this kernel's L1 has forgotten what
// lay there before.
struct Work : Shape {
  const GemmCall& c;

  __device__ int tiles() const {
    const int items = c.items != nullptr        ? __ldcg(c.num_items)
                      : c.expert_ids != nullptr ? c.max_items
                                                : row_items * c.heads;
    return items * groups;
  }
  __device__ Tokens tokens(int item) const {
    if (c.items != nullptr) {
      const MoeItem* const found = c.items + item;
      return {__ldcg(&found->expert), __ldcg(&found->begin), __ldcg(&found->count)};
    }
    if (c.expert_ids != nullptr) return {__ldcg(c.expert_ids + item), item, 1};
    const int begin = item % row_items * item_rows;
    return {item / row_items, begin, min(item_rows, c.rows - begin)};
  }
  __device__ int64_t y_row(const Tokens& tokens, int m) const {
    return c.items != nullptr ? c.pairs[tokens.begin + m] : tokens.begin + m;
  }
  __device__ int head(const Tokens& tokens) const { return c.heads > 1 ? tokens.matrix : 0; }
  __device__ int part() const { return static_cast<int>(threadIdx.x) / 32 & (warps_k - 1); }
  // First row of W of this warp's tile.
  __device__ int first_row(int group) const {
    const int tile = static_cast<int>(threadIdx.x) / 32 * (1 << tile_bits) / kWarps;
    return ((group << tile_bits) + tile) * rows_tile;
  }
};

// Stores a warp's own sums: those of warps that share no tile.
template <int kRowTiles, int kTiles>
__device__ void store_warp(const Work& work, const Tokens& tokens, int group,
                           const float (&sum)[kRowTiles][kTiles][4]) {
  const GemmCall& c = work.c;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = n * 8 + 2 * t + i;
      if (m >= tokens.count) continue;
      const int64_t at = work.y_row(tokens, m) * c.y_stride + work.head(tokens) * c.y_head;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        store_two(c, at, work.first_row(group) + r * 16, g, sum[r][n][i], sum[r][n][i + 2]);
      }
    }
}

// What the warps of a block hand to each other: their parts of a tile, [row of the tile][token], each warp's `step`
// numbers after that of the one before.
struct Parts {
  float* first;
  int step;
  __device__ float* of(int warp) const { return first + warp * step; }
};

// Adds the warps' parts in their order and stores. kUnrolled: all parts are read before the first is added.
template <int kRowTiles, int kTiles, bool kUnrolled>
__device__ void store_block(const Work& work, const Tokens& tokens, int group, const Parts& parts) {
  constexpr int kTokens = 8 * kTiles;
  const GemmCall& c = work.c;
  const bool silu = c.output == GemmOutput::kSiluMul;
  const int row_bits = (silu ? 3 : 4) + kRowTiles - 1, tile_bits = work.tile_bits, tiles = 1 << tile_bits;
  const auto sum = [&](int tile, int row, int m) {
    float total = 0;
    if constexpr (kUnrolled) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        if (w < work.warps_k) total += parts.of(tile * work.warps_k + w)[row * kTokens + m];
    } else {
      for (int w = 0; w < work.warps_k; ++w) total += parts.of(tile * work.warps_k + w)[row * kTokens + m];
    }
    return total;
  };
  for (int i = threadIdx.x; i < tokens.count << (row_bits + tile_bits); i += kThreads) {
    const int row = i & ((1 << row_bits) - 1), tile = i >> row_bits & (tiles - 1), m = i >> (row_bits + tile_bits);
    const int column = ((group << tile_bits) + tile << row_bits) + row;
    if (column >= (silu ? c.out / 2 : c.out)) continue;
    const int gate = row / 8 * 16 + row % 8;
    const float value = silu ? silu_mul(sum(tile, gate, m), sum(tile, gate + 8, m)) : sum(tile, row, m);
    store_one(c, work.y_row(tokens, m) * c.y_stride + work.head(tokens) * c.y_head + column, value);
  }
}

template <int kRowTiles, int kTiles, bool kUnrolled = false>
__device__ void store_tile(const Work& work, const Tokens& tokens, int group, const float (&sum)[kRowTiles][kTiles][4],
                           const Parts& parts) {
  if (work.warps_k == 1) return store_warp<kRowTiles, kTiles>(work, tokens, group, sum);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* mine = parts.of(threadIdx.x / 32);
  __syncwarp();  // all lanes have read what may have been there
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[(r * 16 + g + i / 2 * 8) * 8 * kTiles + n * 8 + 2 * t + i % 2] = sum[r][n][i];
  __syncthreads();
  store_block<kRowTiles, kTiles, kUnrolled>(work, tokens, group, parts);
}

}  // namespace perigee::skinny

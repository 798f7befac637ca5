// A warp's chunk of weights in skinny.cu: 128 columns of 16 rows, of INT4 also of 32, how it comes to shared memory and
// how it meets the columns of x that go with it.
//
// Fragments are those of mma.cuh, with the columns of a product in whatever order lets each lane copy and load 16
// bytes.
#pragma once

#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/weights.h"

namespace perigee {

// The tile that a warp copies from: its first row and the matrix's last, bytes from row to row.
struct TileRows {
  int first, last;
  uint32_t row_bytes, scale_row;
};

template <WeightFormat kFormat, int kTileRows, int kSlots>
struct Slot {
  static constexpr int kRowTiles = kTileRows;  // of 16 rows
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4Group32, kFp8 = kFormat == WeightFormat::kF8Block128;
  static constexpr bool kShared = kInt4;  // lanes read what others copied
  static constexpr int kRowPieces = kInt4 ? 1 : kFp8 ? 2 : 4;
  static constexpr int kChunkBytes = 64 * kRowPieces, kChunkScales = kInt4 ? 8 : kFp8 ? 4 : 0;  // of a row in memory
  static constexpr int kScales = 1024 * kRowTiles * kRowPieces;
  static constexpr int kBytes = kScales + (kInt4 ? 128 * kRowTiles : kFp8 ? 256 : 0);
  static constexpr int kCount = kSlots;

  uint8_t* ring;  // the warp's slots
  int at;         // bytes from there
  __device__ void next() { at = at + kBytes == kCount * kBytes ? 0 : at + kBytes; }

  // Where the pieces of this lane lie: rows g, g + 8, ..., 16 bytes t of each 64; scales of those rows, of INT4 row
  // `lane` of the tile.
  struct Rows {
    const uint8_t *data = nullptr, *scale = nullptr;
    uint32_t steps[2 * kRowTiles] = {}, scale_step = 0;

    __device__ void place(const uint8_t* matrix, const uint8_t* scales, const TileRows& tile) {
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const auto row = [&](int i) { return static_cast<uint32_t>(min(tile.first + i, tile.last)); };
      data = matrix + static_cast<uint64_t>(row(g)) * tile.row_bytes + t * 16;
#pragma unroll
      for (int i = 1; i < 2 * kRowTiles; ++i) steps[i] = (row(g + 8 * i) - row(g)) * tile.row_bytes;
      if constexpr (kInt4) scale = scales + static_cast<uint64_t>(row(lane)) * tile.scale_row;
      if constexpr (kFp8) {
        scale = scales + static_cast<uint64_t>(row(g) / 8) * tile.scale_row;
        scale_step = (row(g + 8) / 8 - row(g) / 8) * tile.scale_row;
      }
    }
    __device__ void skip(int chunks) {
      data += chunks * kChunkBytes;
      scale += chunks * kChunkScales;
    }
  };

  __device__ void fill(const Rows& rows) const {
    const int lane = threadIdx.x % 32;
    // INT4: halves of 32 bytes change places in every other pair of rows, so that four rows meet no bank twice.
    const uint32_t to = shared_address(ring) + at, mine = to + (kInt4 ? lane ^ (lane >> 2 & 2) : lane) * 16;
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < kRowPieces; ++i)
        copy_async16(mine + (r * kRowPieces + i) * 512, rows.data + rows.steps[r] + i * 64);
    if constexpr (kInt4) {
      if (lane < 16 * kRowTiles) copy_async8(to + kScales + lane * 8, rows.scale);
    }
    if constexpr (kFp8) {
      copy_async4(to + kScales + lane * 8, rows.scale);
      copy_async4(to + kScales + lane * 8 + 4, rows.scale + rows.scale_step);
    }
  }

  // The columns of x that go with a lane's 8 columns j of a chunk begin here.
  __device__ static int column(int j) {
    const int t = threadIdx.x % 4;
    return kFp8 ? j / 2 * 64 + t * 16 + j % 2 * 8 : j * 32 + t * 8;
  }
  // From column(0) to column(j), the same for all lanes.
  __device__ static constexpr int column_step(int j) {
    return kFp8 ? j / 2 * 64 + j % 2 * 8 : j * 32;
  }

  // sum += the chunk's products; x(n, j) are the columns j of tokens 8n ... 8n + 7.
  template <int kTiles, typename X>
  __device__ void multiply(const X& x, float (&sum)[kRowTiles][kTiles][4]) const {
    if constexpr (kInt4)
      multiply_int4<kTiles>(x, sum);
    else
      multiply_others<kTiles>(x, sum[0]);
  }

 private:
  __device__ const uint8_t* piece(int i) const {
    return ring + at + i * 512 + threadIdx.x % 32 * 16;
  }

  // Pairs of bf16: the 8 columns j of row r.
  __device__ uint4 pairs(int r, int j) const {
    if constexpr (kFp8) {
      const uint2 words = *reinterpret_cast<const uint2*>(piece(r * 2 + j / 2) + j % 2 * 8);
      return {fp8_pair(words.x, 0), fp8_pair(words.x, 2), fp8_pair(words.y, 0), fp8_pair(words.y, 2)};
    } else {
      return *reinterpret_cast<const uint4*>(piece(r * 4 + j));
    }
  }

  template <int kTiles, typename X>
  __device__ void multiply_others(const X& x, float (&sum)[kTiles][4]) const {
    float part[kTiles][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 a = pairs(0, j), b = pairs(1, j);
      const uint32_t low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 columns = x(n, j);
        mma_16x8x16(Bf16(), part[n], low, columns.x, columns.y);
        mma_16x8x16(Bf16(), part[n], high, columns.z, columns.w);
      }
    }
    float2 scale{1, 1};
    if constexpr (kFp8) scale = *reinterpret_cast<const float2*>(ring + at + kScales + threadIdx.x % 32 * 8);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(part[n][i], i < 2 ? scale.x : scale.y, sum[n][i]);
  }

  // A nibble v becomes 136 + (v - 8) in one instruction; minus 136 times the sum of the columns of x is the same for
  // all rows, and the matrix unit computes it from a left operand that is -136 everywhere. Columns of a product are of
  // one group, so that scales are multiplied into sums.
  template <int kTiles, typename X>
  __device__ void multiply_int4(const X& x, float (&sum)[kRowTiles][kTiles][4]) const {
    constexpr uint32_t kMinus = 0xC308C308u;
    constexpr uint32_t kAll[4] = {kMinus, kMinus, kMinus, kMinus};
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int offset = at + g * 64 + ((t / 2 ^ (g & 2)) << 4) + t % 2 * 8;
    const uint8_t* scales = ring + at + kScales + g * 8;
    uint2 scale[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) scale[r / 2][r % 2] = *reinterpret_cast<const uint2*>(scales + r * 64);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 word[kRowTiles][2];
      const uint8_t* from = ring + (half == 0 ? offset : offset ^ 32);
#pragma unroll
      for (int r = 0; r < 2 * kRowTiles; ++r) word[r / 2][r % 2] = *reinterpret_cast<const uint2*>(from + r * 512);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = half * 2 + i;
        float base[kTiles][4] = {};
        uint4 columns[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          columns[n] = x(n, j);
          mma_16x8x16(Bf16(), base[n], kAll, columns[n].x, columns[n].y);
          mma_16x8x16(Bf16(), base[n], kAll, columns[n].z, columns[n].w);
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const uint32_t a = i == 0 ? word[r][0].x : word[r][0].y, b = i == 0 ? word[r][1].x : word[r][1].y;
          const uint32_t low[4] = {int4_above_136(a, 0), int4_above_136(b, 0), int4_above_136(a, 1),
                                   int4_above_136(b, 1)};
          const uint32_t high[4] = {int4_above_136(a, 2), int4_above_136(b, 2), int4_above_136(a, 3),
                                    int4_above_136(b, 3)};
          const float first = scale_of(scale[r][0], j), second = scale_of(scale[r][1], j);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            float part[4] = {base[n][0], base[n][1], base[n][2], base[n][3]};
            mma_16x8x16(Bf16(), part, low, columns[n].x, columns[n].y);
            mma_16x8x16(Bf16(), part, high, columns[n].z, columns[n].w);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[r][n][k] = fmaf(part[k], k < 2 ? first : second, sum[r][n][k]);
          }
        }
      }
    }
  }
  // The j-th of four bf16.
  __device__ static float scale_of(uint2 four, int j) {
    const uint32_t pair = j < 2 ? four.x : four.y;
    return __uint_as_float(j % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
  }
};

}  // namespace perigee

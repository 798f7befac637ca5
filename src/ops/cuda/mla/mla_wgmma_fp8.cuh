// What the Hopper decode kernel for an fp8 cache has in shared memory, and its products. Keys and values, e4m3, are the
// left operands: scores^T = keys queries^T and output^T = values^T weights^T. A left operand may come from registers,
// so each warp loads its share of e4m3, widens it to f16, exactly, and multiplies; nothing wide is written back.
//
// A fragment wants pairs of 16-bit numbers, neighbours in K, where a load of bytes gives others. For scores K, the
// columns of keys, is taken in the order that loads give, in queries too (store_query). For outputs a load gives two
// columns of two keys, which are two rows of the product: rows are taken in that order (Output).
#pragma once

#include "ops/cuda/mla/mla_wgmma.cuh"
#include "ops/cuda/mla/mla_wgmma_tiles.cuh"

namespace perigee::mla_wgmma_fp8 {

using mla_wgmma::kColumnBytes, mla_wgmma::kColumns, mla_wgmma::kGroup, mla_wgmma::kRows, mla_wgmma::kTokens;
using mla_wgmma::place;

inline constexpr int kStages = 4;
inline constexpr int kRopeStages = 2;             // rope columns are of no use after the scores
inline constexpr int kStripBytes = kTokens * 64;  // 64 columns of a tile
inline constexpr int kLatentBytes = kMlaLatent / 64 * kStripBytes;
inline constexpr int kHalfStrips = kMlaLatent / 2 / 64;  // of the output's halves
inline constexpr int kThreadRows = 16;                   // query rows that a thread has scores of

// Arrays of two belong to the tiles of one warpgroup each. Tiles lie as strips of [key][64 columns], chunk c of 16
// bytes of key k at c ^ (k / 2 % 4).
struct Shared {
  alignas(1024) uint8_t queries[kColumns * kColumnBytes];  // f16
  uint8_t weights[2][kColumnBytes];                        // f16 [row][key]; before: scratch, see by_warp()
  uint8_t latents[kStages][kLatentBytes];
  uint8_t rope[kRopeStages][kStripBytes];
  float minus_base[kRows];  // after the last tile that was weighed
  float shrink[2][kRows];   // 2^(base before - base of the tile), if
  int moved[2];             // any base moved
  int last[kRows];          // the last position that a row sees; -1: no such row
  float scale[kRows];       // from outputs to sixteenths of means
  uint64_t full[kStages], empty[kStages], rope_empty[kRopeStages];
  uint64_t weights_full[2], weights_empty[2];

  // Maxima of each row over a warp's keys.
  __device__ float* by_warp(int half, int warp) { return reinterpret_cast<float*>(weights[half]) + warp * kRows; }
};

// The place of a tile in the rings, from its number.
struct Ring {
  uint32_t number = 0;

  __device__ __forceinline__ int stage() const { return number % kStages; }
  __device__ __forceinline__ int parity() const { return number / kStages % 2; }
  __device__ __forceinline__ int rope_stage() const { return number % kRopeStages; }
  __device__ __forceinline__ int rope_parity() const { return number / kRopeStages % 2; }
};

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}
__device__ __forceinline__ int warp() {
  return threadIdx.x % kGroup / 32;
}
// The i-th of the rows that this thread has scores of, from its first on; i and i + 1 are neighbours if i is even.
__device__ __forceinline__ constexpr int row_step(int i) {
  return i / 2 * 8 + i % 2;
}
__device__ __forceinline__ int thread_row(int i) {
  return lane() % 4 * 2 + row_step(i);
}

// Left operands of four steps of 16 along K, and the bytes that they are made of, as two loads of four matrices give
// them.
struct Operands {
  uint32_t a[4][4];

  // They are complete here, and nothing that reads them is under way.
  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
  }
};
struct Bytes {
  uint32_t of_load[2][4];
};

// Columns 4 t .. 4 t + 3 of a row are the fragment's 2 t, 2 t + 1, 2 t + 8, 2 t + 9, for t = lane % 4.
__device__ __forceinline__ void widen_keys(const Bytes& from, Operands& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t(&a)[4] = to.a[i / 2];
    e4m3x4_to_f16(from.of_load[i / 4][i % 4], a[i % 2], a[i % 2 + 2]);
  }
}

// Columns 2 g, 2 g + 1 of a warp's 16 are the fragment's rows g, g + 8, for g = lane / 4.
__device__ __forceinline__ void widen_values(const Bytes& from, Operands& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t(&a)[4] = to.a[i / 2];
    const uint32_t by_column = __byte_perm(from.of_load[i / 4][i % 4], 0, 0x3120);  // from key, column 00 01 10 11
    e4m3x4_to_f16(by_column, a[i % 2 * 2], a[i % 2 * 2 + 1]);
  }
}

// Queues kCount groups of four steps: while one is under way, the next is widened and the bytes after it loaded.
template <int kCount, typename Load, typename Widen, typename Multiply>
__device__ __forceinline__ void multiply_groups(Load load, Widen widen, Multiply multiply) {
  Operands operands[2];
  Bytes bytes;
  load(0, bytes);
  widen(bytes, operands[0]);
  load(1, bytes);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(n, step, operands[n % 2].a[step]);
    wgmma_commit();
    if (n > 0) {
      wgmma_wait_for<1>();
      operands[(n + 1) % 2].keep();
    }
    if (n + 1 < kCount) widen(bytes, operands[(n + 1) % 2]);
    if (n + 2 < kCount) load(n + 2, bytes);
  }
}

// Queues s = keys queries^T of a tile. This thread's keys are its warp's 16, at lane / 4 and 8 further, its rows
// thread_row(): s[4 j], s[4 j + 1] the first key and rows 2 j, 2 j + 1; s[4 j + 2], s[4 j + 3] the second.
__device__ __forceinline__ void multiply_keys(Shared& shared, const Ring& ring, float (&s)[32]) {
  const uint64_t queries = matrix_k_major(shared_address(shared.queries));
  const int key = warp() * 16 + lane() % 16, chunk = lane() / 16;
  const uint32_t offset = key * 64 + ((chunk ^ (key / 2 % 4)) << 4);
  const uint32_t rope = shared_address(shared.rope[ring.rope_stage()]) + offset;
  const uint32_t latents = shared_address(shared.latents[ring.stage()]) + offset;
  const auto load = [&](int n, Bytes& bytes) {
    const uint32_t strip = n == 0 ? rope : latents + (n - 1) * kStripBytes;
    load_matrix_x4(bytes.of_load[0], strip);
    load_matrix_x4(bytes.of_load[1], strip ^ 32);
  };
  multiply_groups<kColumns>(load, widen_keys, [&](int n, int step, const uint32_t(&keys)[4]) {
    const int column = n == 0 ? kColumns - 1 : n - 1;
    wgmma_n64_registers(s, keys, matrix_behind(queries, column * kColumnBytes + step * 32), n > 0 || step > 0);
  });
}

// Strip i holds the half's i-th 64 columns; element j is of row thread_row(j / 4 * 2 + j % 2), column 16 warp + 2 (lane
// / 4) if j % 4 < 2, else the next.
using Output = float[kHalfStrips][32];

// A half of a tile's values on its way into the output: strips are loaded two ahead and widened one ahead, so even ones
// share buffers, and odd ones do.
struct Values {
  uint32_t from;
  Bytes bytes[2];
  Operands operands[2];

  __device__ __forceinline__ void begin(const Shared& shared, int half, const Ring& ring) {
    from = shared_address(shared.latents[ring.stage()]) + half * kHalfStrips * kStripBytes + lane() * 64 +
           ((warp() ^ (lane() / 2 % 4)) << 4);
    load(0), load(1);
  }
  __device__ __forceinline__ void load(int strip) {
    load_matrix_x4_transposed(bytes[strip % 2].of_load[0], from + strip * kStripBytes);
    load_matrix_x4_transposed(bytes[strip % 2].of_load[1], from + strip * kStripBytes + 32 * 64);
  }
  __device__ __forceinline__ void widen(int strip) { widen_values(bytes[strip % 2], operands[strip % 2]); }
  // Queues out += values^T weights^T of a strip.
  __device__ __forceinline__ void multiply(int strip, uint64_t weights, Output& out) const {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_n64_registers(out[strip], operands[strip % 2].a[step], matrix_behind(weights, step * 32), true);
    wgmma_commit();
  }
  // Waits until at most kPending strips are under way; the operands of `strip` are not.
  template <int kPending>
  __device__ __forceinline__ void wait(int strip) {
    wgmma_wait_for<kPending>();
    operands[strip % 2].keep();
  }
};

__device__ __forceinline__ void settle_output(Output& out) {
  wgmma_wait_for<0>();
#pragma unroll
  for (int i = 0; i < kHalfStrips; ++i) wgmma_settle(out[i]);
}

}  // namespace perigee::mla_wgmma_fp8

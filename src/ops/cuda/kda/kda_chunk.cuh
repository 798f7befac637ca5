// What the relate kernel leaves of a chunk for the carry kernel, and products of f32 matrices on bf16 units.
//
// A number x is a pair of bf16, high = bf16(x) and low = bf16(x - high): 16 bits of it. Of a product of two such
// matrices the three larger terms are added up: relative errors of about 2^-17.
#pragma once

#include "ops/cuda/kda/kda.cuh"

namespace perigee {

inline constexpr int kKdaSlices = 2;  // blocks that share a head's values in the carry kernel
inline constexpr int kKdaSlice = kKdaDim / kKdaSlices;

// A chunk of one head in scratch memory, as it will lie in shared memory. Matrices are bf16; kda_at and kda_at32 say
// where an element is.
struct KdaChunkData {
  // Keys, then queries, as the state before the chunk is read with them: -beta_i k_i and q_i, times the decay from the
  // begin through i.
  uint16_t kq_high[2 * kKdaChunk * kKdaDim], k_low[kKdaChunk * kKdaDim];
  // Keys as they enter the state after the chunk: k_j * decay after j to the end.
  uint16_t end_high[kKdaChunk * kKdaDim], end_low[kKdaChunk * kKdaDim];
  // (I + L)^-1, L_ij = beta_i k_i . k_j * decay after j through i, for j < i.
  uint16_t solve_high[kKdaChunk * kKdaChunk], solve_low[kKdaChunk * kKdaChunk];
  uint16_t qk[kKdaChunk * kKdaChunk];          // q_i . k_j * decay after j through i, for j <= i
  float decay[kKdaDim];                        // of the whole chunk
  float v[kKdaSlices][kKdaChunk * kKdaSlice];  // beta_i v_i; kda_value_at
};
inline constexpr int kKdaSharedBytes = offsetof(KdaChunkData, v);  // what all slices read
inline constexpr int kKdaSliceBytes = kKdaChunk * kKdaSlice * 4;

// Element (row, column) of a matrix of kRows rows of 128: two halves of the columns, in each rows of 128 bytes, whose
// 16-byte unit c lies at place c ^ (row % 8).
template <int kRows>
__device__ inline int kda_at(int row, int column) {
  return column / 64 * (kRows * 64) + row * 64 + ((column / 8 % 8) ^ (row % 8)) * 8 + column % 8;
}
// Of a matrix of 32 columns, rows of 64 bytes: unit c at place c ^ (row / 2 % 4).
__device__ inline int kda_at32(int row, int column) {
  return row * 32 + ((column / 8) ^ (row / 2 % 4)) * 8 + column % 8;
}

// Of a slice of v: eight values of four tokens two apart touch all banks, pairs of columns stay together.
__device__ inline int kda_value_at(int row, int column) {
  return row * kKdaSlice + (column ^ (row / 2 % 4 * 8));
}

struct SplitPair {
  uint32_t high, low;
};
__device__ inline SplitPair split_pair(float x, float y) {
  const uint32_t high = pack_pair(Bf16(), x, y);
  return {high, pack_pair(Bf16(), x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u))};
}

__device__ inline void store_split(uint16_t* high, uint16_t* low, int at, float x, float y) {
  const SplitPair pair = split_pair(x, y);
  *reinterpret_cast<uint32_t*>(high + at) = pair.high;
  *reinterpret_cast<uint32_t*>(low + at) = pair.low;
}

cudaError_t kda_load_step();
cudaError_t kda_load_relate();
cudaError_t kda_load_carry();

}  // namespace perigee

// What the relate kernel leaves of a chunk for the carry kernel, and products of f32 matrices on bf16 units.
//
// A number x is a pair of bf16, high = bf16(x) and low = bf16(x - high): 16 bits of it. Of a product of two such
// matrices the three larger terms are added up: relative errors of about 2^-17.
#pragma once

#include "ops/cuda/kda.cuh"

namespace perigee {

inline constexpr int kKdaSlices = 4;  // blocks that share a head's values in the carry kernel
inline constexpr int kKdaSlice = kKdaDim / kKdaSlices;

// A chunk of one head in scratch memory, as it will lie in shared memory. Matrices are bf16, row-major, 16-byte units
// of a row permuted (kda_unit_of) so that eight rows of a column are read without bank conflicts.
struct KdaChunkData {
  // rows x 128: keys and queries as the state before the chunk is read with them, keys as they enter the state after.
  uint16_t k_high[kKdaChunk * kKdaDim], k_low[kKdaChunk * kKdaDim];      // beta_i k_i * decay from the begin through i
  uint16_t q_high[kKdaChunk * kKdaDim];                                  // q_i * the same
  uint16_t end_high[kKdaChunk * kKdaDim], end_low[kKdaChunk * kKdaDim];  // k_j * decay after j to the end
  // (I + L)^-1, L_ij = beta_i k_i . k_j * decay after j through i, for j < i.
  uint16_t solve_high[kKdaChunk * kKdaChunk], solve_low[kKdaChunk * kKdaChunk];
  uint16_t qk[kKdaChunk * kKdaChunk];          // q_i . k_j * decay after j through i, for j <= i
  float decay[kKdaDim];                        // of the whole chunk
  float v[kKdaSlices][kKdaChunk * kKdaSlice];  // beta_i v_i; kda_value_at
};
inline constexpr int kKdaSharedBytes = offsetof(KdaChunkData, v);  // what all slices read
inline constexpr int kKdaSliceBytes = kKdaChunk * kKdaSlice * 4;

// Element (row, column) of a matrix of 128 columns, and of 32.
__device__ inline int kda_at128(int row, int column) {
  return row * 128 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}
__device__ inline int kda_at32(int row, int column) {
  return row * 32 + ((column / 8) ^ (row / 2 % 4)) * 8 + column % 8;
}
// Of a slice of v; pairs of columns stay together.
__device__ inline int kda_value_at(int row, int column) {
  return row * 32 + (column ^ (row % 4 * 8));
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

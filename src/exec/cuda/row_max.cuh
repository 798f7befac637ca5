// The largest value of a row, by one block or by several that have a slice of it each.
#pragma once

#include <algorithm>
#include <cfloat>

#include "exec/cuda/sampling_order.cuh"

namespace perigee {

constexpr int kMaxSlices = 16;  // blocks of a row

// For so many rows: about two blocks for each multiprocessor.
inline int num_slices(int rows) {
  return std::clamp(256 / rows, 1, kMaxSlices);
}

struct RowMax {
  uint64_t key;  // of the lowest of the ids with the largest value
  bool good;     // no NaN, no +inf
  __device__ int id() const { return static_cast<int>(key & 0xFFFFFFFFu); }
};

struct Best {
  float value = -INFINITY;
  int id = 0, good = 1;
  __device__ void take(float x, int i) {
    good &= x <= FLT_MAX;  // false of NaN and +inf
    if (x > value) {
      value = x;
      id = i;
    }
  }
};

// Of ids first ... end - 1; first is a multiple of 4.
__device__ inline RowMax row_max(const float* x, int first, int end) {
  Best best;
  const int fours = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? end / 4 : first / 4;
#pragma unroll 8
  for (int i = first / 4 + threadIdx.x; i < fours; i += kSamplingThreads) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    best.take(v.x, 4 * i);
    best.take(v.y, 4 * i + 1);
    best.take(v.z, 4 * i + 2);
    best.take(v.w, 4 * i + 3);
  }
  for (int i = 4 * fours + threadIdx.x; i < end; i += kSamplingThreads) best.take(x[i], i);
  const Mass key = block_reduce<Mass>(order_key(best.value, best.id), [](Mass a, Mass b) { return a < b ? a : b; });
  return {key, __syncthreads_and(best.good) != 0};
}

// The part of a row that a block prepares or counts.
struct Slice {
  int first, end;
};

__device__ inline Slice my_slice(int vocab) {
  const int size = (vocab + 4 * static_cast<int>(gridDim.x) - 1) / (4 * static_cast<int>(gridDim.x)) * 4;
  const int first = min(static_cast<int>(blockIdx.x) * size, vocab);
  return {first, min(first + size, vocab)};
}

}  // namespace perigee

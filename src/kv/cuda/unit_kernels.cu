#include <algorithm>

#include "kv/cuda/unit_kernels.h"
#include "kv/digest_word.h"

namespace perigee {
namespace {

constexpr int kThreads = 512, kVectors = 4;  // of 16 bytes, by a thread at a time: what hides a link's latency
constexpr int64_t kPieceBytes = kThreads * kVectors * 16;
constexpr int64_t kMostBlocks = 132;

__device__ uint64_t digest_of(uint4 v, uint64_t first_word) {
  const uint64_t low = v.x | static_cast<uint64_t>(v.y) << 32, high = v.z | static_cast<uint64_t>(v.w) << 32;
  return digest_word(low, first_word) + digest_word(high, first_word + 1);
}

// Sum over the block, in thread 0.
__device__ uint64_t block_sum(uint64_t value) {
  __shared__ uint64_t of_warp[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
  __syncthreads();  // the sums of the piece before are read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return 0;
  value = threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
  return value;
}

// A block copies one piece of a unit at a time. The source may be another process's memory: it is not cached in L1.
template <bool kDigests>
__global__ void __launch_bounds__(kThreads) move_kernel(const UnitMove* moves, int64_t pieces_of_unit,
                                                        int64_t num_pieces, int64_t unit_bytes, uint64_t* digests) {
  for (int64_t piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const int64_t unit = piece / pieces_of_unit, begin = piece % pieces_of_unit * kPieceBytes;
    const UnitMove move = moves[unit];
    const int64_t end = min(begin + kPieceBytes, unit_bytes);
    uint4 values[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = begin + (i * kThreads + threadIdx.x) * 16;
      values[i] = make_uint4(0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff);
      if (move.from != nullptr && at < end) values[i] = __ldcg(reinterpret_cast<const uint4*>(move.from + at));
    }
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = begin + (i * kThreads + threadIdx.x) * 16;
      if (at >= end) continue;
      *reinterpret_cast<uint4*>(move.to + at) = values[i];
      if (kDigests) sum += digest_of(values[i], static_cast<uint64_t>(at) / 8);
    }
    if (!kDigests) continue;
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(digests + unit), sum);
  }
}

}  // namespace

cudaError_t move_units(const UnitMove* moves, int32_t count, int64_t unit_bytes, uint64_t* digests,
                       cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t pieces_of_unit = (unit_bytes + kPieceBytes - 1) / kPieceBytes, num_pieces = count * pieces_of_unit;
  const dim3 blocks(static_cast<unsigned>(std::min(num_pieces, kMostBlocks)));
  if (digests != nullptr)
    move_kernel<true><<<blocks, kThreads, 0, stream>>>(moves, pieces_of_unit, num_pieces, unit_bytes, digests);
  else
    move_kernel<false><<<blocks, kThreads, 0, stream>>>(moves, pieces_of_unit, num_pieces, unit_bytes, nullptr);
  return cudaGetLastError();
}

cudaError_t load_unit_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, move_kernel<true>);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, move_kernel<false>);
}

}  // namespace perigee

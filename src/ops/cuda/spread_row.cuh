// The RMSNorm of one row by a cluster of blocks, for kernels that exchange rows with other GPUs meanwhile.
#pragma once

#include <cstdint>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/norm_row.cuh"

namespace perigee {

// Orders nothing: a release would wait until all that this thread has sent to other GPUs has arrived there.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ uint32_t address_in_block(const void* place, int block) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
#endif
  return there;
}
// A barrier that counts what other blocks of the cluster send.
__device__ __forceinline__ void begin_barrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_init(barrier, 1);
  barrier_init_fence();
#endif
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  barrier_expect(barrier, bytes);
#endif
}
// Writes into the same place of another block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send_to_block(float* place, uint64_t* barrier, int block, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_block(place, block)),
               "r"(__float_as_uint(value)), "r"(address_in_block(barrier, block))
               : "memory");
#endif
}
// As barrier_wait(), for what other blocks of the cluster sent.
__device__ __forceinline__ void wait_for_blocks(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done "
      "bra "
      "ready;\nbra again;\nready:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// The RMSNorm of one row by a cluster of kCluster blocks, with the bits of NormRow: of its kNormThreads threads, which
// have kNormFours pieces of 4 columns each, block b stands for those from b * kOwn on. So many blocks send and receive
// a row faster than one. Piece k of a block is piece k / kOwn of thread k % kOwn; each of its own threads has kRounds.
template <int kCluster>
struct SpreadRow {
  static constexpr int kOwn = kNormThreads / kCluster, kPieces = kOwn * kNormFours;
  static constexpr int kMostThreads = kCluster == 1 ? 512 : 256;
  static constexpr int kThreads = kPieces < kMostThreads ? kPieces : kMostThreads, kRounds = kPieces / kThreads;
  static_assert(kOwn % 32 == 0 && kPieces % kThreads == 0);

  struct Shared {
    float4 row[kPieces];
    float parts[kNormThreads / 32];
    uint64_t all_parts;  // a barrier, of a cluster
  };

  const int fours, first;  // columns / 4; the thread of NormRow that is this block's first
  float4 weight[kRounds];
  Shared* shared;
  int parity = 0;  // of the barrier

  // Weights may be read before the kernel's wait.
  __device__ __forceinline__ SpreadRow(const float* weights, int64_t cols)
      : fours(static_cast<int>(cols / 4)), first(cluster_rank() * kOwn) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (has(i)) weight[i] = reinterpret_cast<const float4*>(weights)[column(i)];
    __shared__ Shared own;
    shared = &own;
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) begin_barrier(&own.all_parts);
      cluster_arrive();  // this block has started
    }
  }
  __device__ __forceinline__ int column_of(int piece) const {
    return first + piece % kOwn + piece / kOwn * kNormThreads;
  }
  __device__ __forceinline__ int column(int round) const {
    return column_of(static_cast<int>(threadIdx.x) + round * kThreads);
  }
  __device__ __forceinline__ bool has(int round) const {
    return column(round) < fours;
  }

  // By all threads. store(c, y) for columns 4 c ... 4 c + 3. Before another row, the cluster must go_on().
  template <typename Store>
  __device__ __forceinline__ void normalize(const float4 (&v)[kRounds], float eps, const Store& store) {
    float4(&row)[kPieces] = shared->row;
    float(&parts)[kNormThreads / 32] = shared->parts;
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (has(i)) row[threadIdx.x + i * kThreads] = v[i];
    __syncthreads();
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) expect_bytes(&shared->all_parts, sizeof(parts));
      cluster_wait();  // all blocks have started
    }
    const int own = threadIdx.x, lane = own % 32;
    if (own < kOwn) {
      float squares = 0;
#pragma unroll
      for (int p = 0; p < kNormFours; ++p) {
        const float4 x = row[p * kOwn + own];
        if (first + own + p * kNormThreads < fours)
          squares = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares))));
      }
      squares = warp_sum(squares);
      float* part = &parts[(first + own) / 32];
      if constexpr (kCluster == 1) {
        if (lane == 0) *part = squares;
      } else {
        if (lane < kCluster) send_to_block(part, &shared->all_parts, lane, squares);
      }
    }
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      wait_for_blocks(&shared->all_parts, parity);
      parity ^= 1;
    }
    float total = 0;
    for (const float part : parts) total += part;
    const float factor = rsqrtf(total / static_cast<float>(4 * fours) + eps);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const float4 a = weight[i];
      if (has(i)) store(column(i), normed_four(v[i], factor, a));
    }
  }
  __device__ __forceinline__ void go_on() const {
    if constexpr (kCluster > 1)
      cluster_arrive();  // this block has read its parts
    else
      __syncthreads();
  }
};

}  // namespace perigee

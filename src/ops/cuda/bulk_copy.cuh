// Thin wrappers of the PTX instructions around bulk copies (sm_90 and later): barriers in shared memory, on which the
// copies complete; the copies; the fence between them and ordinary writes.
#pragma once

#include <cstdint>

#include "ops/cuda/mma.cuh"

namespace perigee {

// Makes this thread's ordinary writes to shared memory visible to matrix products and bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives and announces bytes that bulk copies will bring.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives once all earlier asynchronous 16- and 4-byte copies of this thread have landed.
__device__ __forceinline__ void barrier_arrive_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra ready;\nbra "
      "again;\nready:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A barrier of `threads` threads of the block, by number; their warps need not have converged.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same; whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_any(int number, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(number), "r"(threads)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Asks for a tensor map, a kernel's parameter, ahead of its first use.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box of a four-dimensional tensor map at (x, y, z, w).
__device__ __forceinline__ void bulk_copy_box(uint32_t to, const void* map, int4 at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(shared_address(barrier))
      : "memory");
}

// The box of a three-dimensional tensor map at (x, y, z).
__device__ __forceinline__ void bulk_copy_box(uint32_t to, const void* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// What becomes of lines that a copy brings into L2.
__device__ __forceinline__ uint64_t normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same, with a policy.
__device__ __forceinline__ void bulk_copy_box(uint32_t to, const void* map, int x, int y, int z, uint64_t* barrier,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The box of a two-dimensional tensor map at (x, y).
__device__ __forceinline__ void bulk_copy_box(uint32_t to, const void* map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace perigee

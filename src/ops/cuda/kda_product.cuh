// Matrix products of four warps with the left operand in registers: d += a b, a 64 x 16 bf16, as A fragments of mma.cuh
// by warp, d 64 x N in f32, laid out as in wgmma.cuh, N / 2 numbers a thread. On Hopper it is the warpgroup's
// instruction, which runs beside what follows it; elsewhere 16x8x16 products of each warp.
//
// Between product_begin() and product_end() come the products of one group; their registers are read or written again
// only after product_wait().
#pragma once

#include "ops/cuda/bulk_copy.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "ops/cuda/wgmma_gemm.cuh"
#endif

namespace perigee {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// By every thread that wrote operands into shared memory, before the barrier that hands them to the products.
__device__ __forceinline__ void product_operands_written() {
  fence_async_proxy();
}
// The sums that the group's products add to are final before it begins.
template <typename... Sums>
__device__ __forceinline__ void product_begin(Sums&... sums) {
  const auto settle = [](auto& d) {
#pragma unroll
    for (auto& x : d) asm volatile("" : "+f"(x)::"memory");
  };
  (settle(sums), ...);
  wgmma_fence();
}
__device__ __forceinline__ void product_end() {
  wgmma_commit();
}
// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// b[n][k]: N rows of 128 bytes, 16-byte unit c of row r at place c ^ (r % 8); `b` is where the product's first k lies
// in row 0.
__device__ __forceinline__ void add_product(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
  wgmma_add(d, a, matrix_k_major(b));
}
__device__ __forceinline__ void add_product_of_32(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void add_product(float (&d)[16], const uint32_t (&a)[4], uint32_t b) {
  add_product_of_32(d, a, matrix_k_major(b));
}
// b[n][k]: rows of 64 bytes, unit c of row r at place c ^ (r / 2 % 4).
__device__ __forceinline__ void add_product_narrow(float (&d)[16], const uint32_t (&a)[4], uint32_t b) {
  add_product_of_32(d, a, (b & 0x3FFFF) >> 4 | 1ull << 16 | 32ull << 32 | 2ull << 62);
}
// b[k][n]: two columns of rows of 128 bytes, `column_bytes` apart, units as above; `b` is row 0 of the product's 16.
__device__ __forceinline__ void add_product_by_rows(float (&d)[64], const uint32_t (&a)[4], uint32_t b,
                                                    int column_bytes) {
  wgmma_n128_registers(d, a, matrix_n_major(b, column_bytes));
}

#else

__device__ __forceinline__ void product_operands_written() {}
template <typename... Sums>
__device__ __forceinline__ void product_begin(Sums&...) {}
__device__ __forceinline__ void product_end() {}
template <int kPending>
__device__ __forceinline__ void product_wait() {}

// Sixteen columns of d from a's product with two 16x8 fragments.
template <int kSums>
__device__ __forceinline__ void add_fragments(float (&d)[kSums], int first, const uint32_t (&a)[4],
                                              const uint32_t (&b)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float(&sum)[4] = *reinterpret_cast<float(*)[4]>(&d[first + 4 * n]);
    mma_16x8x16(Bf16(), sum, a, b[2 * n], b[2 * n + 1]);
  }
}
template <int kRowBytes, int kSums>
__device__ __forceinline__ void add_product_rows(float (&d)[kSums], const uint32_t (&a)[4], uint32_t b) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, begin = b & (kRowBytes - 1);
  const uint32_t place = kRowBytes == 128 ? row % 8 : row / 2 % 4;
  const uint32_t from = b - begin + row * kRowBytes + (((begin / 16 + lane / 8 % 2) ^ place) * 16);
#pragma unroll
  for (int i = 0; i < kSums / 8; ++i) {
    uint32_t fragments[4];
    load_matrix_x4(fragments, from + i * 16 * kRowBytes);
    add_fragments(d, 8 * i, a, fragments);
  }
}
template <int kSums>
__device__ __forceinline__ void add_product(float (&d)[kSums], const uint32_t (&a)[4], uint32_t b) {
  add_product_rows<128>(d, a, b);
}
__device__ __forceinline__ void add_product_narrow(float (&d)[16], const uint32_t (&a)[4], uint32_t b) {
  add_product_rows<64>(d, a, b);
}
__device__ __forceinline__ void add_product_by_rows(float (&d)[64], const uint32_t (&a)[4], uint32_t b,
                                                    int column_bytes) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t fragments[4];
    load_matrix_x4_transposed(fragments,
                              b + i / 4 * column_bytes + row * 128 + (((2 * i % 8 + lane / 16) ^ (row % 8)) * 16));
    add_fragments(d, 8 * i, a, fragments);
  }
}

#endif

}  // namespace perigee

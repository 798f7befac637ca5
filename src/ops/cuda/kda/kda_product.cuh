// Matrix products of four warps with the left operand in registers: d += a b, a 64 x 16 bf16, as A fragments of mma.cuh
// by warp, d 64 x N in f32, laid out as in wgmma.cuh, N / 2 numbers a thread. On Hopper it is the warpgroup's
// instruction, which runs beside what follows it; elsewhere 16x8x16 products of each warp.
//
// Between product_begin() and product_end() come the products of one group; their registers are read or written again
// only after product_wait(). What b holds comes by bulk copies.
#pragma once

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/wgmma.cuh"

namespace perigee {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

struct Operand {
  uint64_t matrix;

  __device__ Operand plus(int bytes) const { return {matrix + (bytes >> 4)}; }
};
// b[n][k]: rows of 128 bytes, 16-byte unit c of row r at place c ^ (r % 8); moved by 32 bytes a product.
__device__ __forceinline__ Operand operand_128(uint32_t address) {
  return {matrix_k_major(address)};
}
// The same with rows of 64 bytes, unit c of row r at place c ^ (r / 2 % 4).
__device__ __forceinline__ Operand operand_64(uint32_t address) {
  return {(address & 0x3FFFF) >> 4 | 1ull << 16 | 32ull << 32 | 2ull << 62};
}
// b[k][n]: two columns of rows of 128 bytes, `column_bytes` apart, units as of operand_128; moved by 16 rows a product.
__device__ __forceinline__ Operand operand_by_rows(uint32_t address, int column_bytes) {
  return {matrix_n_major(address, column_bytes)};
}

// Of operand_128 and operand_64.
template <int kRowBytes>
__device__ __forceinline__ void add_product(float (&d)[16], const uint32_t (&a)[4], Operand b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.matrix));
}
__device__ __forceinline__ void add_product_by_rows(float (&d)[64], const uint32_t (&a)[4], Operand b) {
  wgmma_n128_registers(d, a, b.matrix);
}

#else

template <typename... Sums>
__device__ __forceinline__ void product_begin(Sums&...) {}
__device__ __forceinline__ void product_end() {}
template <int kPending>
__device__ __forceinline__ void product_wait() {}

struct Operand {
  uint32_t address;
  int column_bytes;

  __device__ Operand plus(int bytes) const { return {address + bytes, column_bytes}; }
};
__device__ __forceinline__ Operand operand_128(uint32_t address) {
  return {address, 0};
}
__device__ __forceinline__ Operand operand_64(uint32_t address) {
  return {address, 0};
}
__device__ __forceinline__ Operand operand_by_rows(uint32_t address, int column_bytes) {
  return {address, column_bytes};
}

// Sixteen columns of d, from `first` on: a's product with two 16x8 fragments.
template <int kSums>
__device__ __forceinline__ void add_fragments(float (&d)[kSums], int first, const uint32_t (&a)[4],
                                              const uint32_t (&b)[4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float(&sum)[4] = *reinterpret_cast<float(*)[4]>(&d[first + 4 * n]);
    mma_16x8x16(Bf16(), sum, a, b[2 * n], b[2 * n + 1]);
  }
}
template <int kRowBytes>
__device__ __forceinline__ void add_product(float (&d)[16], const uint32_t (&a)[4], Operand b) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, begin = b.address % kRowBytes;
  const uint32_t place = kRowBytes == 128 ? row % 8 : row / 2 % 4;
  const uint32_t from = b.address - begin + row * kRowBytes + (((begin / 16 + lane / 8 % 2) ^ place) * 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t fragments[4];
    load_matrix_x4(fragments, from + i * 16 * kRowBytes);
    add_fragments(d, 8 * i, a, fragments);
  }
}
__device__ __forceinline__ void add_product_by_rows(float (&d)[64], const uint32_t (&a)[4], Operand b) {
  const uint32_t lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t from = b.address + i / 4 * b.column_bytes + row * 128;
    uint32_t fragments[4];
    load_matrix_x4_transposed(fragments, from + (((2 * i % 8 + lane / 16) ^ (row % 8)) * 16));
    add_fragments(d, 8 * i, a, fragments);
  }
}

#endif

}  // namespace perigee

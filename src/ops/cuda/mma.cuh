// Thin wrappers of the PTX instructions that the portable kernels use: asynchronous copies, matrix fragments, the
// 16x8x16 matrix product, 8-bit floats, dependent launch; and what several kernels compute alike. Names and fragment
// layouts are those of the PTX ISA manual.
//
// Fragments of m16n8k16, lane l, g = l / 4, t = l % 4: A holds (row g, k 2t..), (row g + 8, k 2t..), (row g, k 2t
// + 8..), (row g + 8, k 2t + 8..); B holds (k 2t.., column g), (k 2t + 8.., column g); C holds (row g, columns 2t, 2t +
// 1), (row g + 8, columns 2t, 2t + 1).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace perigee {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Waits until the kernels before this one in the stream are complete and their writes visible.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its blocks.
__device__ __forceinline__ void dependency_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Copies 16 bytes to shared memory past L1; only the first `bytes` (0 or 16) are read, the rest is filled with zeros.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies 4 or 8 bytes to shared memory, through L1.
__device__ __forceinline__ void copy_async4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's committed groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// Element types of the 16-bit operands of a product.
struct Bf16 {};
struct F16 {};

// c += a b, f32 accumulators.
__device__ __forceinline__ void mma_16x8x16(Bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_16x8x16(F16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two f32 rounded to a pair of 16-bit elements, `low` in the low half.
__device__ __forceinline__ uint32_t pack_pair(Bf16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_pair(F16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A pair of bf16 as a pair of f16, clamped to the range of f16.
__device__ __forceinline__ uint32_t bf16_pair_to_f16(uint32_t pair) {
  constexpr float kLargest = 65504.0f;
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
  return pack_pair(F16(), fminf(fmaxf(low, -kLargest), kLargest), fminf(fmaxf(high, -kLargest), kLargest));
}

// Four e4m3 numbers as two pairs of f16: bytes 0 and 1 in `low`, 2 and 3 in `high`. Exact, also for subnormals; the
// two NaN patterns are not looked at (the cache never holds them).
__device__ __forceinline__ void e4m3x4_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  // sign | exponent and mantissa moved to where f16 has them; the exponent's bias differs by 8.
  const __half2 bias = __floats2half2_rn(256.0f, 256.0f);
  const uint32_t even = __byte_perm(bytes, 0, 0x1404), odd = __byte_perm(bytes, 0, 0x3424);
  const uint32_t first = (even & 0x80008000u) | ((even & 0x7F007F00u) >> 1);
  const uint32_t second = (odd & 0x80008000u) | ((odd & 0x7F007F00u) >> 1);
  const __half2 a = __hmul2(*reinterpret_cast<const __half2*>(&first), bias);
  const __half2 b = __hmul2(*reinterpret_cast<const __half2*>(&second), bias);
  low = *reinterpret_cast<const uint32_t*>(&a);
  high = *reinterpret_cast<const uint32_t*>(&b);
#endif
}

// SiLU(gate) up.
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Over a warp, the same in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
  return v;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace perigee

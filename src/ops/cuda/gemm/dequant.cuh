// From 4- and 8-bit weights to pairs of bf16, exact as ops/weights.h defines them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace perigee {

__device__ __forceinline__ __nv_bfloat162 as_bf16x2(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Columns 2i, 2i + 1 of a packed INT4 word (packed.h), plus 136.
__device__ __forceinline__ uint32_t int4_above_136(uint32_t word, int i) {
  // 0x4300 is 128 in bf16, whose last bit is worth one: or-ing a nibble in adds it.
  uint32_t biased;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(biased) : "r"(word >> (4 * i)), "r"(0x000F000Fu), "r"(0x43004300u));
  return biased;
}

// Columns 2i, 2i + 1, times the scale, rounded once.
__device__ __forceinline__ uint32_t int4_pair(uint32_t word, int i, __nv_bfloat162 scale) {
  const __nv_bfloat162 value = __hsub2(as_bf16x2(int4_above_136(word, i)), as_bf16x2(0x43084308u));
  return as_bits(__hmul2(value, scale));
}

// Bytes `first`, first + 1 of the word (first is 0 or 2), e4m3, exact: exponent and mantissa move to where bf16 has
// them, and a product with 2^120 moves the exponent's bias (and makes subnormals normal).
__device__ __forceinline__ uint32_t fp8_pair(uint32_t word, int first) {
  const uint32_t high = __byte_perm(word, 0, first == 0 ? 0x1404 : 0x3424);
  const uint32_t moved = (high & 0x80008000u) | ((high & 0x7F007F00u) >> 4);
  return as_bits(__hmul2(as_bf16x2(moved), as_bf16x2(0x7B807B80u)));
}

// Of a cache, whose numbers may be NaN.
__device__ __forceinline__ float2 fp8_values(uint16_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

}  // namespace perigee

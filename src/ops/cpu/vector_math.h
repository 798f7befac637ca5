// Scalar functions that compilers turn into vector code when they stand in a loop; included only by *_avx2.cc,
// *_avx512.cc and *_amx.cc, each of which compiles its own copy (hence static: the linker must not merge them).
#pragma once

#include <cstdint>
#include <cstring>

namespace perigee::cpu {

static inline float exact_float(uint16_t bf16) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bf16) << 16);
}

// Round to nearest even; NaN stays NaN. Written without a branch.
static inline uint32_t bf16_bits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded;
}

// Of e4m3. Without the slow arithmetic on subnormal floats: its own subnormals, m / 8 * 2^-6, are 2^-6 (1 + m / 8) less
// 2^-6.
static inline float f8_float(uint8_t e4m3) {
  const uint32_t magnitude = e4m3 & 0x7Fu, sign = (e4m3 & 0x80u) << 24;
  const float small = __builtin_bit_cast(float, (magnitude << 20) + (121u << 23)) - 0x1p-6f;
  const uint32_t normal = magnitude == 0x7F ? 0x7FC00000u : (magnitude << 20) + (120u << 23);
  return __builtin_bit_cast(float, (magnitude < 8 ? __builtin_bit_cast(uint32_t, small) : normal) | sign);
}

// 2^t, relative error < 3e-7, exactly 1 at 0; t is clamped to [-126, 126]; NaN gives NaN. The series of 2^r on
// [-1/2, 1/2], times a power of two made in the exponent field.
static inline float exp2_vector(float t) {
  t = t < -126.0f ? -126.0f : t;
  t = t > 126.0f ? 126.0f : t;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const float shifted = t + kRound;
  const float r = t - (shifted - kRound);
  float p = 1.5403530e-4f;
  p = __builtin_fmaf(p, r, 1.3333558e-3f);
  p = __builtin_fmaf(p, r, 9.6181291e-3f);
  p = __builtin_fmaf(p, r, 5.5504109e-2f);
  p = __builtin_fmaf(p, r, 2.4022651e-1f);
  p = __builtin_fmaf(p, r, 6.9314718e-1f);
  p = __builtin_fmaf(p, r, 1.0f);
  const uint32_t exponent = (__builtin_bit_cast(uint32_t, shifted) + 127u) << 23;
  return p * __builtin_bit_cast(float, exponent);
}

}  // namespace perigee::cpu

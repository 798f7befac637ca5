// V16: sixteen floats, one AVX-512 register or two of AVX2. Included only by files compiled for one instruction set,
// each of which compiles its own copy (static, as in vector_math.h).
#pragma once

#include <immintrin.h>

#include "ops/cpu/vector_math.h"

namespace perigee::cpu {

#ifdef __AVX512F__

struct V16 {
  __m512 v;
};
static inline V16 load16(const float* p) {
  return {_mm512_loadu_ps(p)};
}
static inline void store16(float* p, V16 x) {
  _mm512_storeu_ps(p, x.v);
}
static inline V16 all16(float x) {
  return {_mm512_set1_ps(x)};
}
static inline V16 add16(V16 a, V16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
static inline V16 mul16(V16 a, V16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
static inline V16 fma16(V16 a, V16 b, V16 c) {  // a * b + c
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
static inline V16 fms16(V16 a, V16 b, V16 c) {  // a * b - c
  return {_mm512_fmsub_ps(a.v, b.v, c.v)};
}
static inline V16 sub16(V16 a, V16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
static inline V16 max16(V16 a, V16 b) {  // b where either is NaN
  return {_mm512_max_ps(a.v, b.v)};
}
static inline V16 min16(V16 a, V16 b) {  // b where either is NaN
  return {_mm512_min_ps(a.v, b.v)};
}
// 1 / x, relative error < 2e-7, for x of ordinary size: an estimate of 14 bits and a step of Newton's.
static inline V16 reciprocal16(V16 x) {
  const __m512 y = _mm512_rcp14_ps(x.v);
  return {_mm512_fmadd_ps(y, _mm512_fnmadd_ps(x.v, y, _mm512_set1_ps(1.0f)), y)};
}
static inline V16 multiply_first16(int64_t n, V16 a, V16 b, V16 other) {  // a * b in the first n lanes
  return {_mm512_mask_mul_ps(other.v, static_cast<__mmask16>((1u << n) - 1), a.v, b.v)};
}
template <int kBits>
static inline V16 shift_left16(V16 x) {  // of the bits of each number
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), kBits))};
}
static inline float sum16(V16 x) {
  return _mm512_reduce_add_ps(x.v);
}
// x where key < limit, else other: a select, so that x may be anything.
static inline V16 below16(int32_t key, const int32_t* limit, V16 x, V16 other) {
  const __mmask16 keep = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(limit), _mm512_set1_epi32(key));
  return {_mm512_mask_blend_ps(keep, other.v, x.v)};
}
static inline V16 nearest16(V16 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline V16 scale16(V16 x, V16 n) {  // x * 2^n, n integers in [-126, 126]
  return {_mm512_scalef_ps(x.v, n.v)};
}
// Words of two bf16: even low, odd high.
static inline void store_pairs16(uint32_t* out, V16 even, V16 odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto both = (__m512i)_mm512_cvtne2ps_pbh(odd.v, even.v);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, both));
}

#else

struct V16 {
  __m256 v[2];
};
static inline V16 load16(const float* p) {
  return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}};
}
static inline void store16(float* p, V16 x) {
  _mm256_storeu_ps(p, x.v[0]);
  _mm256_storeu_ps(p + 8, x.v[1]);
}
static inline V16 all16(float x) {
  return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}};
}
static inline V16 add16(V16 a, V16 b) {
  return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}};
}
static inline V16 mul16(V16 a, V16 b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
static inline V16 fma16(V16 a, V16 b, V16 c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
static inline V16 fms16(V16 a, V16 b, V16 c) {
  return {{_mm256_fmsub_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmsub_ps(a.v[1], b.v[1], c.v[1])}};
}
static inline V16 sub16(V16 a, V16 b) {
  return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}};
}
static inline V16 min16(V16 a, V16 b) {
  return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}};
}
static inline V16 reciprocal16(V16 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {{_mm256_div_ps(one, x.v[0]), _mm256_div_ps(one, x.v[1])}};
}
static inline V16 multiply_first16(int64_t n, V16 a, V16 b, V16 other) {
  const __m256i end = _mm256_set1_epi32(static_cast<int32_t>(n));
  V16 out;
  for (int h = 0; h < 2; ++h) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * h));
    const __m256 first = _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, lane));
    out.v[h] = _mm256_blendv_ps(other.v[h], _mm256_mul_ps(a.v[h], b.v[h]), first);
  }
  return out;
}
template <int kBits>
static inline V16 shift_left16(V16 x) {
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.v[0]), kBits)),
           _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.v[1]), kBits))}};
}
static inline float sum16(V16 x) {
  const __m256 eight = _mm256_add_ps(x.v[0], x.v[1]);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline V16 max16(V16 a, V16 b) {
  return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}};
}
static inline V16 below16(int32_t key, const int32_t* limit, V16 x, V16 other) {
  const __m256i at = _mm256_set1_epi32(key);
  V16 out;
  for (int h = 0; h < 2; ++h) {
    const __m256i ends = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(limit + 8 * h));
    out.v[h] = _mm256_blendv_ps(other.v[h], x.v[h], _mm256_castsi256_ps(_mm256_cmpgt_epi32(ends, at)));
  }
  return out;
}
static inline V16 nearest16(V16 x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {{_mm256_round_ps(x.v[0], kMode), _mm256_round_ps(x.v[1], kMode)}};
}
static inline V16 scale16(V16 x, V16 n) {
  V16 out;
  for (int h = 0; h < 2; ++h) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v[h]), _mm256_set1_epi32(127));
    out.v[h] = _mm256_mul_ps(x.v[h], _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  return out;
}
static inline void store_pairs16(uint32_t* out, V16 even, V16 odd) {
  alignas(32) float a[16], b[16];
  store16(a, even);
  store16(b, odd);
  for (int i = 0; i < 16; ++i) out[i] = bf16_bits(a[i]) | bf16_bits(b[i]) << 16;
}

#endif

// 2^t, relative error < 3e-6 (weights become bf16), exactly 1 at 0; t <= 0, clamped to -126; NaN gives NaN.
static inline V16 exp2_16(V16 t) {
  t = max16(all16(-126.0f), t);
  const V16 n = nearest16(t);
  const V16 r = fma16(n, all16(-1.0f), t);
  V16 p = fma16(all16(1.3333558e-3f), r, all16(9.6181291e-3f));
  p = fma16(p, r, all16(5.5504109e-2f));
  p = fma16(p, r, all16(2.4022651e-1f));
  p = fma16(p, r, all16(6.9314718e-1f));
  p = fma16(p, r, all16(1.0f));
  return scale16(p, n);
}

}  // namespace perigee::cpu

// Transposition of panels, sixteen words wide. Included only by files compiled for one instruction set (see
// vector16.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ops/cpu/mla_kernels.h"

// GCC 12 takes the deliberately undefined operands inside its own AVX-512 headers for mistakes (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace perigee::cpu {
namespace {

#ifdef __AVX512F__
// A 16 x 16 matrix of words, in four rounds of pairwise exchange.
inline void transpose16(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xDD);
    out[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xDD);
  }
}
#endif

void transpose(const uint32_t* in, int64_t num_pairs, int64_t stride, uint32_t* out) {
#ifdef __AVX512F__
  for (int64_t p = 0; p < num_pairs; p += kPanel) {
    __m512i block[16], turned[16];
    for (int i = 0; i < 16; ++i) block[i] = _mm512_loadu_si512(in + (p + i) * kPanel);
    transpose16(block, turned);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * stride + p, turned[i]);
  }
#else
  for (int64_t p = 0; p < num_pairs; ++p) {
    for (int64_t r = 0; r < kPanel; ++r) out[r * stride + p] = in[p * kPanel + r];
  }
#endif
}

}  // namespace
}  // namespace perigee::cpu

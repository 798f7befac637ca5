// Bodies of mla_kernels.h that differ between instruction sets only by what the compiler makes of them; included by
// mla_avx2.cc, mla_avx512.cc and mla_amx.cc, each of which adds its product.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <limits>

#include "ops/cpu/mla_kernels.h"
#include "ops/cpu/vector_math.h"

// GCC 12 takes the deliberately undefined operands inside its own AVX-512 headers for mistakes (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace perigee::cpu {
namespace {

constexpr float kMlaInfinity = std::numeric_limits<float>::infinity();

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

void pack_rows(const uint16_t* const* rows, int64_t k, int64_t padded_k, uint32_t* panel) {
  for (int64_t begin = 0; begin < padded_k; begin += 2 * kPanel) {
    alignas(64) uint32_t block[kPanel][kPanel];
    const int64_t count = k - begin < 2 * kPanel ? k - begin : 2 * kPanel;
    for (int64_t r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr || count <= 0) {
        std::memset(block[r], 0, sizeof(block[r]));
        continue;
      }
      if (count < 2 * kPanel) std::memset(block[r], 0, sizeof(block[r]));
      std::memcpy(block[r], rows[r] + begin, static_cast<size_t>(count) * sizeof(uint16_t));
    }
    transpose(&block[0][0], kPanel, kPanel, panel + begin / 2 * kPanel);
  }
}

void interleave(const Interleave& p) {
  static const uint16_t kZeros[kPanel] = {};
  for (int64_t r = 0; r < p.padded_rows; r += 2) {
    const uint16_t* low = p.rows + r * p.stride;
    for (int64_t n = 0; n < p.panels; ++n) {
      const uint16_t* a = r < p.num_rows ? low + n * kPanel : kZeros;
      const uint16_t* b = r + 1 < p.num_rows ? low + p.stride + n * kPanel : kZeros;
      uint32_t* to = p.out + n * p.panel_stride + r / 2 * kPanel;
      for (int64_t j = 0; j < kPanel; ++j) to[j] = a[j] | static_cast<uint32_t>(b[j]) << 16;
    }
  }
}

inline void raise_max(const float* s, float scale, float* max) {
  for (int64_t q = 0; q < kPanel; ++q) {
    const float t = s[q] * scale;
    max[q] = t > max[q] ? t : max[q];
  }
}

inline void raise_max_below(const float* s, float scale, int32_t key, const int32_t* limit, float* max) {
  for (int64_t q = 0; q < kPanel; ++q) {
    const float t = s[q] * scale;
    max[q] = (key < limit[q]) & (t > max[q]) ? t : max[q];
  }
}

// Weights of key `key` as f32, zero where masked; added to sum.
inline void weigh(const SoftmaxPanel& p, int64_t key, const float* max, float* sum, float* weight) {
  const float* s = p.scores + key * p.stride;
  for (int64_t q = 0; q < kPanel; ++q) {
    const float e = exp2_vector(s[q] * p.scale - max[q]);
    weight[q] = static_cast<int32_t>(key) < p.limit[q] ? e : 0.0f;
    sum[q] += weight[q];
  }
}

void softmax(const SoftmaxPanel& p) {
  alignas(64) float max[kPanel], base[kPanel], sums[2][kPanel] = {}, even[kPanel], odd[kPanel];
  int32_t open = static_cast<int32_t>(p.num_keys);  // keys below are masked for no query
  int32_t last = 0;                                 // keys from here on are masked for all
  for (int64_t q = 0; q < kPanel; ++q) {
    max[q] = p.max[q];
    open = p.limit[q] < open ? p.limit[q] : open;
    last = p.limit[q] > last ? p.limit[q] : last;
  }
  last = last > p.num_keys ? static_cast<int32_t>(p.num_keys) : last;
  int32_t key = 0;
  for (; key < open; ++key) raise_max(p.scores + key * p.stride, p.scale, max);
  for (; key < last; ++key) raise_max_below(p.scores + key * p.stride, p.scale, key, p.limit, max);
  for (int64_t q = 0; q < kPanel; ++q) {
    base[q] = max[q] == -kMlaInfinity ? 0.0f : max[q];  // a row without any key: every weight is masked to zero
    p.fade[q] = max[q] == p.max[q] ? 1.0f : exp2_vector(p.max[q] - base[q]);
  }
  const int64_t end = (last + 1) / 2 * 2;
  for (int64_t j = 0; j < end; j += 2) {
    weigh(p, j, base, sums[0], even);
    weigh(p, j + 1, base, sums[1], odd);
    uint32_t* out = p.weights + j / 2 * kPanel;
    for (int64_t q = 0; q < kPanel; ++q) out[q] = bf16_bits(even[q]) | bf16_bits(odd[q]) << 16;
  }
  std::memset(p.weights + end / 2 * kPanel, 0, static_cast<size_t>((p.num_keys - end) / 2 * kPanel) * sizeof(uint32_t));
  for (int64_t q = 0; q < kPanel; ++q) {
    p.sum[q] = p.sum[q] * p.fade[q] + (sums[0][q] + sums[1][q]);
    p.max[q] = max[q];
  }
}

void transpose_values(const float* v, int64_t num_keys, int64_t num_valid, int64_t dims, int64_t stride,
                      uint16_t* out) {
  for (int64_t key = 0; key < num_keys; key += 2 * kPanel) {
    for (int64_t d = 0; d < dims; d += kPanel) {
      alignas(64) uint32_t words[kPanel][kPanel];  // [key pair][dim]
      for (int64_t i = 0; i < kPanel; ++i) {
        const float* a = v + (key + 2 * i) * dims + d;
        const float* b = a + dims;
        const uint32_t keep_a = key + 2 * i < num_valid ? 0xFFFFu : 0u;
        const uint32_t keep_b = key + 2 * i + 1 < num_valid ? 0xFFFF0000u : 0u;
        for (int64_t j = 0; j < kPanel; ++j) {
          words[i][j] = (bf16_bits(a[j]) & keep_a) | (bf16_bits(b[j]) << 16 & keep_b);
        }
      }
      alignas(64) uint32_t turned[kPanel][kPanel];  // [dim][key pair]
      transpose(&words[0][0], kPanel, kPanel, &turned[0][0]);
      for (int64_t j = 0; j < kPanel; ++j) std::memcpy(out + (d + j) * stride + key, turned[j], sizeof(turned[j]));
    }
  }
}

void fade(float* o, int64_t rows, int64_t stride, const float* factors) {
  bool all_one = true;
  for (int64_t q = 0; q < kPanel; ++q) all_one &= factors[q] == 1.0f;
  if (all_one) return;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t q = 0; q < kPanel; ++q) o[r * stride + q] *= factors[q];
  }
}

void merge(Partial& into, float* o, const Partial& next, const float* next_o, int64_t n) {
  if (next.max == -kMlaInfinity) return;
  if (into.max == -kMlaInfinity) {
    into = next;
    std::memcpy(o, next_o, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float max = next.max > into.max ? next.max : into.max;
  const float a = exp2_vector(into.max - max), b = exp2_vector(next.max - max);
  for (int64_t i = 0; i < n; ++i) o[i] = o[i] * a + next_o[i] * b;
  into.sum = into.sum * a + next.sum * b;
  into.max = max;
}

void narrow(const float* x, float factor, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(bf16_bits(x[i] * factor));
}

constexpr MlaKernels mla_loops(void (*multiply)(const Product&)) {
  return {.multiply = multiply,
          .pack_rows = pack_rows,
          .interleave = interleave,
          .softmax = softmax,
          .transpose = transpose,
          .transpose_values = transpose_values,
          .fade = fade,
          .merge = merge,
          .narrow = narrow};
}

}  // namespace
}  // namespace perigee::cpu

// Bodies of mla_kernels.h that differ between instruction sets only by what the compiler makes of them; included by
// mla_avx2.cc, mla_avx512.cc and mla_amx.cc, each of which adds its products.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/cpu/mla_kernels.h"
#include "ops/cpu/transpose16.h"
#include "ops/cpu/vector16.h"
#include "ops/cpu/vector_math.h"

namespace perigee::cpu {
namespace {

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

// Limits of a panel: keys below `open` are masked for no query, keys from `last` on for all.
struct PanelLimits {
  int32_t open, last;
};

PanelLimits panel_limits(const SoftmaxPanel& p) {
  PanelLimits out{.open = static_cast<int32_t>(p.num_keys), .last = 0};
  for (int64_t q = 0; q < kPanel; ++q) {
    out.open = p.limit[q] < out.open ? p.limit[q] : out.open;
    out.last = p.limit[q] > out.last ? p.limit[q] : out.last;
  }
  return out;
}

// The largest unmasked score; scaling it afterwards is the same as scaling all, for rounding is monotonic.
V16 panel_max(const SoftmaxPanel& p, const PanelLimits& limits) {
  const V16 none = all16(kNoScore);
  V16 even = none, odd = none;
  int32_t key = 0;
  for (; key + 2 <= limits.open; key += 2) {
    even = max16(load16(p.scores + key * p.stride), even);
    odd = max16(load16(p.scores + (key + 1) * p.stride), odd);
  }
  for (; key < limits.last; ++key) {
    even = max16(below16(key, p.limit, load16(p.scores + key * p.stride), none), even);
  }
  return max16(even, odd);
}

void softmax(const SoftmaxPanel& p) {
  const PanelLimits limits = panel_limits(p);
  const V16 scale = all16(p.scale), zero = all16(0.0f);
  alignas(64) float max[kPanel], base[kPanel];
  store16(max, max16(mul16(panel_max(p, limits), scale), load16(p.max)));
  for (int64_t q = 0; q < kPanel; ++q) {
    base[q] = max[q] == kNoScore ? 0.0f : max[q];  // a row without any key: every weight is masked to zero
    p.fade[q] = max[q] == p.max[q] ? 1.0f : exp2_vector(p.max[q] - base[q]);
  }
  const V16 top = load16(base);
  const auto weight = [&](int32_t key) { return exp2_16(fms16(load16(p.scores + key * p.stride), scale, top)); };
  V16 sums[2] = {zero, zero};  // of even and of odd keys
  int32_t key = 0;
  for (; key + 2 <= limits.open; key += 2) {
    const V16 even = weight(key), odd = weight(key + 1);
    sums[0] = add16(sums[0], even);
    sums[1] = add16(sums[1], odd);
    store_pairs16(p.weights + key / 2 * kPanel, even, odd);
  }
  for (; key < limits.last; key += 2) {
    const V16 even = below16(key, p.limit, weight(key), zero), odd = below16(key + 1, p.limit, weight(key + 1), zero);
    sums[0] = add16(sums[0], even);
    sums[1] = add16(sums[1], odd);
    store_pairs16(p.weights + key / 2 * kPanel, even, odd);
  }
  std::memset(p.weights + key / 2 * kPanel, 0, static_cast<size_t>((p.num_keys - key) / 2 * kPanel) * sizeof(uint32_t));
  store16(p.sum, fma16(load16(p.sum), load16(p.fade), add16(sums[0], sums[1])));
  store16(p.max, load16(max));
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
  const V16 f = load16(factors);
  for (int64_t r = 0; r < rows; ++r) store16(o + r * stride, mul16(load16(o + r * stride), f));
}

void merge(Partial& into, float* o, const Partial& next, const float* next_o, int64_t n) {
  if (is_empty(next)) return;
  if (is_empty(into)) {
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

void scale(float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

void narrow(const float* x, float factor, int64_t n, uint16_t* out) {
  int64_t i = 0;
#ifdef __AVX512F__
  const __m512 f = _mm512_set1_ps(factor);
  for (; i + 32 <= n; i += 32) {
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x + i), f), high = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), f);
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  for (; i < n; ++i) out[i] = static_cast<uint16_t>(bf16_bits(x[i] * factor));
}

void widen(const uint8_t* x, float factor, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(bf16_bits(f8_float(x[i]) * factor));
}

void split(const float* x, float factor, int64_t n, uint16_t* high, uint16_t* low) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] * factor;
    const uint32_t h = bf16_bits(y);
    high[i] = static_cast<uint16_t>(h);
    low[i] = static_cast<uint16_t>(bf16_bits(y - exact_float(static_cast<uint16_t>(h))));
  }
}

// What each instruction set has a loop of its own for.
struct MlaProducts {
  void (*multiply)(const Product&);
  int64_t (*query_words)(int64_t);
  void (*pack_queries)(const uint16_t* const*, int64_t, int64_t, uint32_t*);
  void (*scores)(const Scores&);
  void (*values)(const Values&);
};

constexpr MlaKernels mla_loops(const MlaProducts& own) {
  return {.multiply = own.multiply,
          .pack_rows = pack_rows,
          .query_words = own.query_words,
          .pack_queries = own.pack_queries,
          .scores = own.scores,
          .values = own.values,
          .softmax = softmax,
          .transpose = transpose,
          .transpose_values = transpose_values,
          .fade = fade,
          .scale = scale,
          .merge = merge,
          .narrow = narrow,
          .widen = widen,
          .split = split};
}

}  // namespace
}  // namespace perigee::cpu

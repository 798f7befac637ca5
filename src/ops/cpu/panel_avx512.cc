#include "ops/cpu/panel_avx512.h"

#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPairs = kTileK / 2;

inline __m512bh as_bf16(__m512i v) {
  return (__m512bh)v;
}

// R rows of a row tile of m rows times a panel: R x 2 accumulators, one chain each.
template <int R>
void multiply_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  const bool adds = job.in.c != nullptr;
  const float* in = !adds ? nullptr : job.in.c + row / kTileRows * job.in.tile + row % kTileRows * job.in.row;
  float* out = job.out.c + row / kTileRows * job.out.tile + row % kTileRows * job.out.row;
  __m512 acc[R][2];
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h)
      acc[r][h] = adds ? _mm512_loadu_ps(in + h * job.in.half + r * job.in.row) : _mm512_setzero_ps();
  }
  const uint16_t* b = job.int4 ? job.tiles : reinterpret_cast<const uint16_t*>(job.b);
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK, b += kPanelTileElements) {
    const auto* pairs = reinterpret_cast<const int32_t*>(a);
    for (int64_t p = 0; p < kPairs; ++p) {
      const __m512bh b0 = as_bf16(_mm512_loadu_si512(b + p * 32));
      const __m512bh b1 = as_bf16(_mm512_loadu_si512(b + kPanelTileElements / 2 + p * 32));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512bh x = as_bf16(_mm512_set1_epi32(pairs[r * kPairs + p]));
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + h * job.out.half + r * job.out.row, acc[r][h]);
  }
}

// `first` is the row of the job that the row tile begins with.
void multiply_row_tile(const PanelJob& job, const uint16_t* a, int64_t m, int64_t first) {
  using Body = void (*)(const PanelJob&, const uint16_t*, int64_t, int64_t);
  constexpr Body kBodies[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
                              multiply_rows<4>, multiply_rows<5>, multiply_rows<6>};
  for (int64_t row = 0; row < m; row += 6) {
    const int64_t rows = m - row < 6 ? m - row : 6;
    kBodies[rows - 1](job, a + row * kTileK, m, first + row);
  }
}

void multiply(const PanelJob& job) {
  if (job.int4) expand_int4_avx512(job.b, job.k_tiles, job.tiles);
  for (int64_t row = 0; row < job.rows; row += kTileRows) {
    const int64_t m = job.rows - row < kTileRows ? job.rows - row : kTileRows;
    const int64_t tile = row / kTileRows;
    multiply_row_tile(job, job.a + tile * job.a_stride + job.k_begin * m * kTileK, m, row);
  }
}

// A nibble n at bit `shift` of the mantissa of 1.0 reads 1 + n * 2^(shift - 23); times 2^(23 - shift) * s, minus
// (2^(23 - shift) + 8) * s, it is (n - 8) * s, exactly, in one FMA, for shifts 8, 12 and 16 (s has 8 bits).
struct NibbleScale {
  __m512 times[3], minus[3];
};

inline NibbleScale nibble_scale(__m512 s) {
  NibbleScale out;
  for (int i = 0; i < 3; ++i) {
    const float power = static_cast<float>(1 << (15 - 4 * i));
    out.times[i] = _mm512_mul_ps(s, _mm512_set1_ps(power));
    out.minus[i] = _mm512_mul_ps(s, _mm512_set1_ps(power + 8.0f));
  }
  return out;
}

template <int I>  // the nibble at bit 8 + 4 * I
inline __m512 nibble(__m512i words, const NibbleScale& s) {
  const __m512i mask = _mm512_set1_epi32(15 << (8 + 4 * I));
  const __m512i one = _mm512_set1_epi32(0x3F800000);
  const __m512i bits = _mm512_ternarylogic_epi32(words, mask, one, 0xEA);  // (words & mask) | one
  return _mm512_fmsub_ps(_mm512_castsi512_ps(bits), s.times[I], s.minus[I]);
}

template <int I>
inline void store_pair(uint16_t* row, __m512i low, __m512i high, const NibbleScale& low_s, const NibbleScale& high_s) {
  const __m512bh out = _mm512_cvtne2ps_pbh(nibble<I>(high, high_s), nibble<I>(low, low_s));
  _mm512_storeu_si512(row, (__m512i)out);
}

// Eight rows (input pairs) of a B tile from one set of words of its two halves.
inline void expand_set(__m512i low, __m512i high, const NibbleScale& low_s, const NibbleScale& high_s, uint16_t* out) {
  const __m512i low_left = _mm512_slli_epi32(low, 8), high_left = _mm512_slli_epi32(high, 8);
  const __m512i low_right = _mm512_srli_epi32(low, 12), high_right = _mm512_srli_epi32(high, 12);
  store_pair<0>(out, low_left, high_left, low_s, high_s);
  store_pair<1>(out + 32, low_left, high_left, low_s, high_s);
  store_pair<0>(out + 64, low, high, low_s, high_s);
  store_pair<1>(out + 96, low, high, low_s, high_s);
  store_pair<2>(out + 128, low, high, low_s, high_s);
  store_pair<0>(out + 160, low_right, high_right, low_s, high_s);
  store_pair<1>(out + 192, low_right, high_right, low_s, high_s);
  store_pair<2>(out + 224, low_right, high_right, low_s, high_s);
}

// e^x to about 1 ulp, x clamped to [-87, 88]: 2^n * e^r, |r| <= ln(2) / 2, Taylor to the seventh order.
inline __m512 exp_avx512(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);  // ln 2 in two parts, the first one short
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

inline __m256i round_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

}  // namespace

void expand_int4_avx512(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles) {
  const __m512i spread_low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i spread_high = _mm512_add_epi32(spread_low, _mm512_set1_epi32(8));
  for (int64_t t = 0; t < 2 * k_tiles; ++t) {
    const uint8_t* base = packed + t / 2 * kInt4TileBytes;
    const auto* scales = reinterpret_cast<const __m256i*>(base + t % 2 * 32);
    const uint8_t* words = base + 64 + t % 2 * 256;
    // Packed panels lie one after another: what will be expanded some k tiles later is being fetched meanwhile.
    for (int64_t i = t % 2; i < kInt4TileBytes / 64; i += 2)
      _mm_prefetch(base + 7 * kInt4TileBytes + i * 64, _MM_HINT_T0);
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 16);
    const NibbleScale low_s = nibble_scale(_mm512_castsi512_ps(_mm512_permutexvar_epi32(spread_low, wide)));
    const NibbleScale high_s = nibble_scale(_mm512_castsi512_ps(_mm512_permutexvar_epi32(spread_high, wide)));
    uint16_t* out = tiles + t * kPanelTileElements / 2;
    for (int set = 0; set < 2; ++set) {
      const __m512i low = _mm512_loadu_si512(words + set * 64);
      const __m512i high = _mm512_loadu_si512(words + 128 + set * 64);
      expand_set(low, high, low_s, high_s, out + set * 256);
    }
  }
}

void tile_to_bf16_avx512(const float* c, int64_t rows, int64_t cols, uint16_t* out, int64_t out_stride) {
  const auto live = static_cast<__mmask16>((1u << cols) - 1);
  for (int64_t r = 0; r < rows; ++r, c += 16, out += out_stride)
    _mm256_mask_storeu_epi16(out, live, round_bf16(_mm512_loadu_ps(c)));
}

void to_f32_avx512(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const auto live = static_cast<__mmask16>(n - i < 16 ? (1 << (n - i)) - 1 : 0xFFFF);
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, in + i)), 16);
    _mm512_mask_storeu_ps(out + i, live, _mm512_castsi512_ps(wide));
  }
}

void split_avx512(const float* x, uint16_t* high, uint16_t* low) {
  for (int64_t i = 0; i < kTileK; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __m256i h = round_bf16(v);
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), h);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), round_bf16(_mm512_sub_ps(v, back)));
  }
}

void add_scaled_avx512(const float* part, const float* scale, int64_t rows, const PanelSums& in, const PanelSums& out) {
  for (int64_t h = 0; h < 2; ++h) {
    const __m512 s = _mm512_loadu_ps(scale + h * kTileOutputs);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t tile = r / kTileRows, row = r % kTileRows;
      const __m512 p = _mm512_loadu_ps(part + tile * 2 * kAccumulators + h * kAccumulators + row * kTileOutputs);
      const __m512 before =
          in.c == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(in.c + tile * in.tile + h * in.half + row * in.row);
      _mm512_storeu_ps(out.c + tile * out.tile + h * out.half + row * out.row, _mm512_fmadd_ps(p, s, before));
    }
  }
}

void silu_mul_tile_avx512(const float* gate, const float* up, int64_t rows, uint16_t* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 g = _mm512_loadu_ps(gate + r * 16);
    const __m512 u = _mm512_loadu_ps(up + r * 16);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 denominator = _mm512_add_ps(one, exp_avx512(_mm512_sub_ps(_mm512_setzero_ps(), g)));
    const __m512 y = _mm512_mul_ps(_mm512_div_ps(g, denominator), u);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * out_stride), round_bf16(y));
  }
}

void weighted_sum_avx512(const float* y, int64_t stride, const float* weights, int64_t count, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const auto live = static_cast<__mmask16>(n - i < 16 ? (1 << (n - i)) - 1 : 0xFFFF);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; ++j)
      sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[j]), _mm512_maskz_loadu_ps(live, y + j * stride + i), sum);
    _mm512_mask_storeu_ps(out + i, live, sum);
  }
}

void dots_avx512(const float* x, const float* w, int64_t n, int64_t num_rows, float* out) {
  for (int64_t row = 0; row < num_rows; ++row, w += n) {
    __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
      for (int j = 0; j < 4; ++j)
        acc[j] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i + 16 * j), _mm512_loadu_ps(w + i + 16 * j), acc[j]);
    }
    for (; i < n; i += 16) {
      const auto live = static_cast<__mmask16>(n - i < 16 ? (1 << (n - i)) - 1 : 0xFFFF);
      acc[0] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(live, x + i), _mm512_maskz_loadu_ps(live, w + i), acc[0]);
    }
    out[row] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])));
  }
}

const PanelKernels kPanelKernelsAvx512 = {
    .int4_streams = false,
    .multiply = multiply,
    .expand_int4 = expand_int4_avx512,
    .tile_to_bf16 = tile_to_bf16_avx512,
    .split = split_avx512,
    .add_scaled = add_scaled_avx512,
    .to_f32 = to_f32_avx512,
    .silu_mul_tile = silu_mul_tile_avx512,
    .weighted_sum = weighted_sum_avx512,
    .dots = dots_avx512,
};

}  // namespace perigee::cpu

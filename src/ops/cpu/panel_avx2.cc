#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_fix.h"
#include "ops/cpu/panel_kernels.h"
#include "ops/cpu/panel_rows.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPairs = kTileK / 2;

inline __m256 even_f32(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

inline __m256 odd_f32(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

constexpr int kLanes = 8;                         // outputs of a register
constexpr int kVectors = kPanelOutputs / kLanes;  // registers of a row's sums
constexpr int64_t kRowsAtOnce = 2;                // whose sums, inputs and weights 16 registers hold

inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// Pairs of eight outputs' weights, or of an input eight times.
struct Pairs {
  __m256 even, odd;
};

inline Pairs pairs_at(const uint16_t* b) {
  const __m256i w = load(b);
  return {even_f32(w), odd_f32(w)};
}

inline Pairs pairs_at(const uint8_t* b) {
  const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 16), 16)),
          _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 16))};
}

// The inputs of some rows, 16 pairs each, one row after another; of two terms what counts is their sum.
template <bool kTerms>
struct Inputs {
  Inputs(const PanelJob& job, const uint16_t* a)
      : high(reinterpret_cast<const int32_t*>(a)),
        low(kTerms ? reinterpret_cast<const int32_t*>(job.a_low + (a - job.a)) : nullptr) {}
  Pairs at(int64_t i) const {
    const __m256i x = _mm256_set1_epi32(high[i]);
    Pairs pairs{even_f32(x), odd_f32(x)};
    if constexpr (kTerms) {
      const __m256i y = _mm256_set1_epi32(low[i]);
      pairs.even = _mm256_add_ps(pairs.even, even_f32(y));
      pairs.odd = _mm256_add_ps(pairs.odd, odd_f32(y));
    }
    return pairs;
  }
  const int32_t *high, *low;
};

// Quantised weights take so many instructions a byte that the processor itself looks too short a way ahead: so many
// bytes are asked for. Panels lie one after another.
constexpr int64_t kAhead = 4096;

// R rows times a k tile of bf16 or INT8: one chain of additions an output.
template <int R, bool kTerms, typename Weight>
inline void add_tile(const Weight* b, const Inputs<kTerms>& inputs, __m256 (&sums)[R][kVectors]) {
  for (int64_t p = 0; p < kPairs; ++p, b += 64) {
    if constexpr (sizeof(Weight) == 1) _mm_prefetch(b + kAhead, _MM_HINT_T0);
    Pairs x[R];
    for (int r = 0; r < R; ++r) x[r] = inputs.at(r * kPairs + p);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Pairs w = pairs_at(b + v * 16);
      for (int r = 0; r < R; ++r) {
        sums[r][v] = _mm256_fmadd_ps(x[r].even, w.even, sums[r][v]);
        sums[r][v] = _mm256_fmadd_ps(x[r].odd, w.odd, sums[r][v]);
      }
    }
  }
}

// R rows of whole numbers times the numbers of an INT4 tile, 0 ... 15, from the tile or from kExpanded ones.
template <int R, bool kExpanded>
inline void add_int4_tile(const uint8_t* tile, const uint16_t* expanded, const int32_t* a,
                          __m256i (&sums)[R][kVectors]) {
  const __m256i four_bits = _mm256_set1_epi16(15);
  if constexpr (!kExpanded) _mm_prefetch(tile + kAhead, _MM_HINT_T0);
  for (int64_t set = 0; set < kPairs / 4; ++set, a += 4, expanded += 4 * 64) {
    const uint8_t* words = tile + 64 + set * 128;
    if constexpr (!kExpanded) {
      _mm_prefetch(words + kAhead, _MM_HINT_T0);
      _mm_prefetch(words + 64 + kAhead, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      __m256i x[R];
      for (int r = 0; r < R; ++r) x[r] = _mm256_set1_epi32(a[r * kPairs + p]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m256i numbers = kExpanded ? load(expanded + p * 64 + v * 16)
                                          : _mm256_and_si256(_mm256_srli_epi16(load(words + v * 32), 4 * p), four_bits);
        for (int r = 0; r < R; ++r) {
          sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(x[r], numbers));
          // The compiler may add whole numbers in any order, and would keep products of many pairs outside registers.
          asm("" : "+x"(sums[r][v]));
        }
      }
    }
  }
}

// Where the sums of some rows begin, and their layout.
struct RowSums {
  RowSums(const PanelSums& sums, int64_t first_row)
      : c(sums.c == nullptr ? nullptr : sums.c + first_row / kTileRows * sums.tile + first_row % kTileRows * sums.row),
        row(sums.row),
        half(sums.half) {}
  float* at(int r, int v) const { return c + r * row + v / 2 * half + v % 2 * kLanes; }
  float* c;
  int64_t row, half;
};

inline __m256 sum_before(const RowSums& sums, int r, int v) {
  return sums.c == nullptr ? _mm256_setzero_ps() : _mm256_loadu_ps(sums.at(r, v));
}

// R rows from `row` of the job on, `a` within their row tile of m rows; weights are bf16 or INT8.
template <int R, bool kTerms, typename Weight>
void multiply_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  const RowSums in(job.in, row), out(job.out, row);
  __m256 sums[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = sum_before(in, r, v);
  const auto* b = reinterpret_cast<const Weight*>(job.b);
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK, b += kPanelTileElements)
    add_tile(b, Inputs<kTerms>(job, a), sums);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(out.at(r, v), sums[r][v]);
}

// The same of INT4 weights, whose numbers are in job.tiles if kExpanded. A k tile's sum is a whole number below 2^23,
// which f32 holds exactly.
template <int R, bool kExpanded>
void multiply_int4_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  const uint8_t* b = job.b;
  const FixedGroup* fixed = job.fixed + (a - job.a) / kTileK;
  const RowSums out(job.out, row);
  RowSums before(job.in, row);
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK, fixed += m, b += kInt4TileBytes, before = out) {
    __m256i part[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) part[r][v] = _mm256_set1_epi32(-8 * fixed[r].sum);
    add_int4_tile<R, kExpanded>(b, job.tiles + t * kPanelTileElements, reinterpret_cast<const int32_t*>(a), part);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + v * 16));
      const __m256 scale = even_f32(_mm256_cvtepu16_epi32(bits));
      for (int r = 0; r < R; ++r) {
        const __m256 one = _mm256_mul_ps(scale, _mm256_set1_ps(fixed[r].step));
        const __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part[r][v]), one, sum_before(before, r, v));
        _mm256_storeu_ps(out.at(r, v), sum);
      }
    }
  }
}

template <bool kTerms, typename Weight>
constexpr RowsBody kRows[kRowsAtOnce] = {multiply_rows<1, kTerms, Weight>, multiply_rows<2, kTerms, Weight>};
template <bool kExpanded>
constexpr RowsBody kInt4Rows[kRowsAtOnce] = {multiply_int4_rows<1, kExpanded>, multiply_int4_rows<2, kExpanded>};

// bf16 of each lane, to nearest even, NaN quiet, in the low half of the lane.
inline __m256i round_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

// The low halves of 16 lanes, in order.
inline __m256i join(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}

// The numbers of an INT4 job, 0 ... 15.
void expand_int4_numbers(const PanelJob& job) {
  const __m256i four_bits = _mm256_set1_epi16(15);
  uint16_t* out = job.tiles;
  for (int64_t t = 0; t < job.k_tiles; ++t) {
    const uint8_t* at = job.b + t * kInt4TileBytes + 64;
    for (int64_t set = 0; set < kPairs / 4; ++set, out += 4 * 64) {
      for (int v = 0; v < kVectors; ++v, at += 32) {
        __m256i words = load(at);
        for (int64_t p = 0; p < 4; ++p) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + p * 64 + v * 16), _mm256_and_si256(words, four_bits));
          words = _mm256_srli_epi16(words, 4);
        }
      }
    }
  }
}

// The whole numbers of an INT8 job as bf16.
void expand_int8_numbers(const PanelJob& job) {
  for (int64_t i = 0; i < job.k_tiles * kPanelTileElements; i += 16) {
    const auto eight = [](const uint8_t* from) {
      const __m256i numbers = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
      return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(numbers)), 16);
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(job.tiles + i), join(eight(job.b + i), eight(job.b + i + 8)));
  }
}

template <bool kTerms>
constexpr RowsBodies<kRowsAtOnce> kBodies = {
    .bf16 = kRows<kTerms, uint16_t>,
    .int8 = kRows<kTerms, uint8_t>,
    .expand_int8 = expand_int8_numbers,
};

void multiply(const PanelJob& job) {
  if (job.stored == TileFormat::kInt4) {
    if (job.rows <= kRowsAtOnce) return multiply_by(kInt4Rows<false>, job);
    expand_int4_numbers(job);
    return multiply_by(kInt4Rows<true>, job);
  }
  multiply_by(job.a_low == nullptr ? kBodies<false> : kBodies<true>, job, kRowsAtOnce);
}

void tile_to_bf16(const float* c, int64_t rows, int64_t cols, uint16_t* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, c += 16, out += out_stride) {
    const __m256i row = join(round_bf16(_mm256_loadu_ps(c)), round_bf16(_mm256_loadu_ps(c + 8)));
    alignas(32) uint16_t whole[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole), row);
    for (int64_t i = 0; i < cols; ++i) out[i] = whole[i];
  }
}

void fix(uint16_t* a, int64_t groups, FixedGroup* fixed) {
  for (int64_t g = 0; g < groups; ++g, a += kTileK) {
    const FixedNumbers numbers = fix_group(a, fixed[g]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a), numbers.first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a + 16), numbers.second);
  }
}

void to_f32(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    _mm256_storeu_ps(out + i, even_f32(wide));
  }
  for (; i < n; ++i) out[i] = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(in[i] << 16)));
}

void split(const float* x, uint16_t* high, uint16_t* low) {
  for (int64_t i = 0; i < kTileK; i += 16) {
    const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
    const __m256i ha = round_bf16(a), hb = round_bf16(b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), join(ha, hb));
    const __m256i la = round_bf16(_mm256_sub_ps(a, even_f32(ha))), lb = round_bf16(_mm256_sub_ps(b, even_f32(hb)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), join(la, lb));
  }
}

void add_scaled(const float* part, const float* scale, int64_t rows, const PanelSums& in, const PanelSums& out) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t tile = r / kTileRows, row = r % kTileRows;
    for (int64_t j = 0; j < kPanelOutputs; j += 8) {
      const int64_t h = j / kTileOutputs, column = j % kTileOutputs;
      const __m256 p = _mm256_loadu_ps(part + (tile * 2 + h) * kAccumulators + row * kTileOutputs + column);
      const __m256 before = in.c == nullptr
                                ? _mm256_setzero_ps()
                                : _mm256_loadu_ps(in.c + tile * in.tile + h * in.half + row * in.row + column);
      _mm256_storeu_ps(out.c + tile * out.tile + h * out.half + row * out.row + column,
                       _mm256_fmadd_ps(p, _mm256_loadu_ps(scale + j), before));
    }
  }
}

// e^x to about 1 ulp, x clamped to [-87, 88]: 2^n * e^r, |r| <= ln(2) / 2, Taylor to the seventh order.
inline __m256 exp_avx2(__m256 x) {
  x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);  // ln 2 in two parts, the first one short
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

inline __m256i silu_mul(const float* gate, const float* up) {
  const __m256 g = _mm256_loadu_ps(gate);
  const __m256 e = exp_avx2(_mm256_sub_ps(_mm256_setzero_ps(), g));
  const __m256 y = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
  return round_bf16(_mm256_mul_ps(y, _mm256_loadu_ps(up)));
}

void silu_mul_tile(const float* gate, const float* up, int64_t rows, uint16_t* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, gate += 16, up += 16) {
    const __m256i row = join(silu_mul(gate, up), silu_mul(gate + 8, up + 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * out_stride), row);
  }
}

inline float sum_lanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

void weighted_sum(const float* y, int64_t stride, const float* weights, int64_t count, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 sum = _mm256_setzero_ps();
    for (int64_t j = 0; j < count; ++j)
      sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[j]), _mm256_loadu_ps(y + j * stride + i), sum);
    _mm256_storeu_ps(out + i, sum);
  }
  for (; i < n; ++i) {
    out[i] = 0;
    for (int64_t j = 0; j < count; ++j) out[i] += weights[j] * y[j * stride + i];
  }
}

void dots(const float* x, const float* w, int64_t n, int64_t num_rows, float* out) {
  for (int64_t row = 0; row < num_rows; ++row, w += n) {
    __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      for (int j = 0; j < 4; ++j)
        acc[j] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i + 8 * j), _mm256_loadu_ps(w + i + 8 * j), acc[j]);
    }
    float tail = 0;
    for (; i < n; ++i) tail += x[i] * w[i];
    out[row] = sum_lanes(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]))) + tail;
  }
}

}  // namespace

const PanelKernels kPanelKernelsAvx2 = {
    .rows_at_once = kRowsAtOnce,
    .rows_of_terms = INT64_MAX,
    .multiply = multiply,
    .fix = fix,
    .tile_to_bf16 = tile_to_bf16,
    .split = split,
    .add_scaled = add_scaled,
    .to_f32 = to_f32,
    .silu_mul_tile = silu_mul_tile,
    .weighted_sum = weighted_sum,
    .dots = dots,
};

}  // namespace perigee::cpu

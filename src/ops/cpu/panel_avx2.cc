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
constexpr int64_t kRowsAtOnce = 4;                // whose sums of half of the outputs 16 registers hold
constexpr int64_t kWholeRows = 2;                 // whose sums of all outputs they hold

// k tiles that stay in the first-level cache while rows pass them, with what is asked for meanwhile.
constexpr int64_t kStretch = 4, kInt4Stretch = 8;
// Prefetch distances in bytes, of few rows that pass weights once: these take so many instructions a byte that the
// processor itself looks too short a way ahead. Panels lie one after another. INT4 weights come into the
// second-level cache: lines on their way to the first hold its few buffers for as long as memory takes.
constexpr int64_t kAhead = 4096, kInt4Ahead = 8192;

// Registers of outputs in one pass of R rows.
template <int R>
constexpr int kPass = R <= kWholeRows ? kVectors : kVectors / 2;

inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// Of eight outputs the weights of the even or of the odd input of a pair.
template <bool kOdd>
inline __m256 weights_at(const uint16_t* b) {
  return kOdd ? odd_f32(load(b)) : even_f32(load(b));
}

template <bool kOdd>
inline __m256 weights_at(const uint8_t* b) {
  const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(kOdd ? w : _mm256_slli_epi32(w, 16), 16));
}

// R rows' inputs of a stretch.
template <int R>
using Inputs = float[kStretch][R][kTileK];

// As f32; of two terms what counts is their sum.
template <int R, bool kTerms>
inline void widen(const PanelJob& job, const uint16_t* a, int64_t m, Inputs<R>& out) {
  const auto eight = [](const uint16_t* from) {
    return even_f32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  };
  const int64_t low = kTerms ? job.a_low - job.a : 0;
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK) {
    float* to = out[t][0];
    for (int64_t i = 0; i < R * kTileK; i += kLanes) {
      __m256 x = eight(a + i);
      if constexpr (kTerms) x = _mm256_add_ps(x, eight(a + low + i));
      _mm256_store_ps(to + i, x);
    }
  }
}

// R rows' even or odd inputs of a pair, from x on, times V registers of outputs.
template <bool kOdd, int R, int V, typename Weight>
inline void add_input(const Weight* b, const float* x, __m256 (&sums)[R][V]) {
  __m256 input[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) input[r] = _mm256_set1_ps(x[r * kTileK + kOdd]);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const __m256 w = weights_at<kOdd>(b + v * 16);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][v] = _mm256_fmadd_ps(input[r], w, sums[r][v]);
  }
}

// A k tile of bf16 or INT8: one chain of additions an output.
template <int R, int V, typename Weight>
inline void add_tile(const Weight* b, const float (&x)[R][kTileK], __m256 (&sums)[R][V]) {
  for (int64_t p = 0; p < kPairs; ++p, b += 64) {
    add_input<false>(b, x[0] + 2 * p, sums);
    add_input<true>(b, x[0] + 2 * p, sums);
  }
}

// sums += inputs of whole numbers times the numbers, 0 ... 15, at bits 4 * P of the words of a tile, times 16^P; of the
// topmost ones times 1.
template <int P, int R, int V>
inline void add_numbers(const uint8_t* words, const int32_t* a, __m256i (&sums)[R][V]) {
#pragma GCC unroll 4
  for (int64_t set = 0; set < kPairs / 4; ++set) {
    __m256i numbers[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256i word = load(words + set * 128 + v * 32);
      numbers[v] = P == 3 ? _mm256_srli_epi16(word, 12)
                          : _mm256_and_si256(word, _mm256_set1_epi16(static_cast<int16_t>(15 << 4 * P)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = _mm256_set1_epi32(a[r * kPairs + set * 4 + P]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(x, numbers[v]));
        // The compiler may add whole numbers in any order, and would keep products of many pairs outside registers.
        asm("" : "+x"(sums[r][v]));
      }
    }
  }
}

// R rows of whole numbers times the weights of an INT4 tile. Numbers stay where they are in their words: products are
// then 16 and 256 times too large, and shifted once a sum. With 8 inputs, a sum of the largest is below 2^30.
template <int R, int V>
inline void add_int4_tile(const uint8_t* words, const int32_t* a, const FixedGroup* fixed, __m256i (&sums)[R][V]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = _mm256_setzero_si256();
  add_numbers<2>(words, a, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = _mm256_srai_epi32(sums[r][v], 4);
  add_numbers<1>(words, a, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m256i eights = _mm256_set1_epi32(-8 * fixed[r].sum);
    for (int v = 0; v < V; ++v) sums[r][v] = _mm256_add_epi32(_mm256_srai_epi32(sums[r][v], 4), eights);
  }
  add_numbers<0>(words, a, sums);
  add_numbers<3>(words, a, sums);
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
  constexpr int kV = kPass<R>;
  alignas(32) Inputs<R> x;
  widen<R, kTerms>(job, a, m, x);
  Ahead<kNearest> ahead(job, row, R, kVectors / kV);
  const RowSums in(job.in, row), out(job.out, row);
  for (int first = 0; first < kVectors; first += kV) {
    __m256 sums[R][kV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kV; ++v) sums[r][v] = sum_before(in, r, first + v);
    const auto* b = reinterpret_cast<const Weight*>(job.b) + first * 16;
    for (int64_t t = 0; t < job.k_tiles; ++t, b += kPanelTileElements) {
      ahead.fetch();
      add_tile(b, x[t], sums);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kV; ++v) _mm256_storeu_ps(out.at(r, first + v), sums[r][v]);
  }
}

// The same of INT4 weights. A k tile's sum is a whole number below 2^23, which f32 holds exactly.
template <int R>
void multiply_int4_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  constexpr int kV = kPass<R>;
  Ahead<R <= kWholeRows ? kSecondLevel : kNearest> ahead(job, row, R, kVectors / kV);
  const RowSums in(job.in, row), out(job.out, row);
  for (int first = 0; first < kVectors; first += kV) {
    __m256 sums[R][kV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kV; ++v) sums[r][v] = sum_before(in, r, first + v);
    const uint8_t* b = job.b;
    const auto* x = reinterpret_cast<const int32_t*>(a);
    const FixedGroup* fixed = job.fixed + (a - job.a) / kTileK;
    for (int64_t t = 0; t < job.k_tiles; ++t, x += m * kPairs, fixed += m, b += kInt4TileBytes) {
      ahead.fetch();
      __m256i part[R][kV];
      add_int4_tile(b + 64 + first * 32, x, fixed, part);
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + (first + v) * 16));
        const __m256 scale = even_f32(_mm256_cvtepu16_epi32(bits));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256 one = _mm256_mul_ps(scale, _mm256_set1_ps(fixed[r].step));
          sums[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part[r][v]), one, sums[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kV; ++v) _mm256_storeu_ps(out.at(r, first + v), sums[r][v]);
  }
}

template <bool kTerms, typename Weight>
constexpr RowsBody kRows[kRowsAtOnce] = {multiply_rows<1, kTerms, Weight>, multiply_rows<2, kTerms, Weight>,
                                         multiply_rows<3, kTerms, Weight>, multiply_rows<4, kTerms, Weight>};
constexpr RowsBody kInt4Rows[kRowsAtOnce] = {multiply_int4_rows<1>, multiply_int4_rows<2>, multiply_int4_rows<3>,
                                             multiply_int4_rows<4>};

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

void multiply_stretch(const PanelJob& job) {
  if (job.stored == TileFormat::kInt4) return multiply_by(kInt4Rows, job);
  if (job.stored == TileFormat::kInt8)
    return multiply_by(job.a_low == nullptr ? kRows<false, uint8_t> : kRows<true, uint8_t>, job);
  multiply_by(job.a_low == nullptr ? kRows<false, uint16_t> : kRows<true, uint16_t>, job);
}

// What is read after a stretch follows it in memory, in the same panel or in the next one.
void multiply(const PanelJob& job) {
  const bool once = job.rows <= kWholeRows, int4 = job.stored == TileFormat::kInt4;
  const int64_t bytes = tile_bytes(job.stored);
  const int64_t stretch = !int4 ? kStretch : once ? job.k_tiles : kInt4Stretch;
  PanelJob part = job;
  for (int64_t t = 0; t < job.k_tiles; t += part.k_tiles, part.in = job.out) {
    part.k_begin = job.k_begin + t;
    part.k_tiles = job.k_tiles - t < stretch ? job.k_tiles - t : stretch;
    part.b = job.b + t * bytes;
    part.next = part.b + (!once ? part.k_tiles * bytes : int4 ? kInt4Ahead : kAhead);
    multiply_stretch(part);
  }
}

void tile_to_bf16(const float* c, int64_t rows, int64_t cols, uint16_t* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, c += 16, out += out_stride) {
    const __m256i row = join(round_bf16(_mm256_loadu_ps(c)), round_bf16(_mm256_loadu_ps(c + 8)));
    alignas(32) uint16_t whole[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole), row);
    for (int64_t i = 0; i < cols; ++i) out[i] = whole[i];
  }
}

void fix(uint16_t* a, int64_t groups, int64_t /*rows*/, FixedGroup* fixed) {
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
    .rows_at_once = kWholeRows,
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

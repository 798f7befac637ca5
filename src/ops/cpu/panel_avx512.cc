#include "ops/cpu/panel_avx512.h"

#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_fix.h"
#include "ops/cpu/panel_kernels.h"
#include "ops/cpu/panel_rows.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPairs = kTileK / 2;

inline __m512bh as_bf16(__m512i v) {
  return (__m512bh)v;
}

// 32 weights as bf16 pairs.
inline __m512bh pairs_at(const uint16_t* b) {
  return as_bf16(_mm512_loadu_si512(b));
}

inline __m512bh pairs_at(const uint8_t* b) {
  const auto sixteen = [](const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  };
  return _mm512_cvtne2ps_pbh(sixteen(b + 16), sixteen(b));
}

// Quantised weights take so many instructions a byte that the processor itself looks too short a way ahead: so many
// bytes are asked for. Panels lie one after another. INT4 weights come into the second-level cache: lines on their way
// to the first hold its few buffers for as long as memory takes.
constexpr int64_t kInt8Ahead = 4096, kInt4Ahead = 6144;

// The inputs of some rows, 16 pairs each, one row after another; T terms of each.
template <int T>
struct Inputs {
  Inputs(const PanelJob& job, const uint16_t* a) : term{reinterpret_cast<const int32_t*>(a)} {
    if constexpr (T > 1) term[1] = reinterpret_cast<const int32_t*>(job.a_low + (a - job.a));
  }
  __m512bh at(int t, int64_t i) const { return as_bf16(_mm512_set1_epi32(term[t][i])); }
  const int32_t* term[T];
};

// Of R rows, for each of T terms.
template <int R, int T>
using Sums = __m512[T][R][2];

// sums[0] = the sums of all terms, the others zero.
template <int R, int T>
inline void join_terms(Sums<R, T>& sums) {
  if constexpr (T > 1) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) {
        sums[0][r][h] = _mm512_add_ps(sums[0][r][h], sums[1][r][h]);
        sums[1][r][h] = _mm512_setzero_ps();
      }
  }
}

// R rows times a k tile of bf16 or INT8: one chain of additions an output and term.
template <int R, int T, typename Weight>
inline void add_tile(const Weight* b, const Inputs<T>& inputs, Sums<R, T>& sums) {
  for (int64_t p = 0; p < kPairs; ++p, b += 64) {
    if constexpr (sizeof(Weight) == 1) _mm_prefetch(b + kInt8Ahead, _MM_HINT_T0);
    const __m512bh b0 = pairs_at(b), b1 = pairs_at(b + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const __m512bh x = inputs.at(t, r * kPairs + p);
        sums[t][r][0] = _mm512_dpbf16_ps(sums[t][r][0], x, b0);
        sums[t][r][1] = _mm512_dpbf16_ps(sums[t][r][1], x, b1);
      }
  }
}

// Whole numbers of R rows times those of an INT4 tile, 0 ... 15: sums over the low bytes of the inputs, which are
// unsigned, and over the high ones, which have the sign.
template <int R>
struct ByteSums {
  __m512i low[R][2], high[R][2];
};

template <int R>
inline void add_int4_tile(const uint8_t* tile, const uint16_t* a, ByteSums<R>& sums) {
  const auto* inputs = reinterpret_cast<const int32_t*>(a);  // of a set of each row: see fix_avx512()
  const __m512i four_bits = _mm512_set1_epi8(15);
  _mm_prefetch(tile + kInt4Ahead, _MM_HINT_T1);
  for (int64_t set = 0; set < kPairs / 4; ++set) {
    const uint8_t* words = tile + 64 + set * 128;
    _mm_prefetch(words + kInt4Ahead, _MM_HINT_T1);
    _mm_prefetch(words + 64 + kInt4Ahead, _MM_HINT_T1);
    const __m512i w0 = _mm512_loadu_si512(words), w1 = _mm512_loadu_si512(words + 64);
    const __m512i numbers[2][2] = {
        {_mm512_and_si512(w0, four_bits), _mm512_and_si512(w1, four_bits)},
        {_mm512_and_si512(_mm512_srli_epi16(w0, 4), four_bits), _mm512_and_si512(_mm512_srli_epi16(w1, 4), four_bits)}};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int32_t* x = inputs + r * kPairs + 4 * set + 2 * i;
        const __m512i low = _mm512_set1_epi32(x[0]), high = _mm512_set1_epi32(x[1]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          sums.low[r][h] = _mm512_dpbusd_epi32(sums.low[r][h], low, numbers[i][h]);
          sums.high[r][h] = _mm512_dpbusd_epi32(sums.high[r][h], numbers[i][h], high);
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
  float* c;
  int64_t row, half;
};

template <int R>
inline void load_sums(const RowSums& at, __m512 (&sums)[R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    sums[r][0] = at.c == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(at.c + r * at.row);
    sums[r][1] = at.c == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(at.c + r * at.row + at.half);
  }
}

template <int R>
inline void store_sums(const RowSums& at, const __m512 (&sums)[R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(at.c + r * at.row, sums[r][0]);
    _mm512_storeu_ps(at.c + r * at.row + at.half, sums[r][1]);
  }
}

// R rows from `row` of the job on, `a` within their row tile of m rows; weights are bf16 or INT8. The terms' sums are
// joined wherever a job of many rows may end, so that they are the same however many rows there are.
template <int R, int T, typename Weight>
void multiply_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  Sums<R, T> sums = {};
  load_sums({job.in, row}, sums[0]);
  Ahead<kSecondLevel> ahead = job.rows > R ? Ahead<kSecondLevel>(job, row, R, 1) : Ahead<kSecondLevel>();
  const auto* b = reinterpret_cast<const Weight*>(job.b);
  for (int64_t k = 1; k <= job.k_tiles; ++k, a += m * kTileK, b += kPanelTileElements) {
    ahead.fetch();
    add_tile(b, Inputs<T>(job, a), sums);
    if (k == job.k_tiles || k % kExpandedTiles == 0) join_terms<R, T>(sums);
  }
  store_sums({job.out, row}, sums[0]);
}

inline __m512 bf16_to_f32(const uint8_t* bits) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits))), 16));
}

// The first lines after a panel, which are likely to be read next: until the processor gets there, it asks for nothing.
inline void fetch_following(const uint8_t* end) {
  for (int64_t i = 0; i < 8; ++i) _mm_prefetch(end + 64 * i, _MM_HINT_T0);
}

// The same of INT4 weights. A k tile's sum is a whole number below 2^23 times a power of two, which f32 holds exactly:
// the bits are those of any order of additions, the one of AMX tiles too (panel_int4_amx.cc). Nothing is stored
// before the panel's end: a store delays later reads from the same place of other pages, and so the whole stream.
template <int R>
void multiply_int4_rows(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row) {
  const FixedGroup* fixed = job.fixed + (a - job.a) / kTileK;
  __m512 sums[R][2];
  load_sums({job.in, row}, sums);
  const uint8_t* b = job.b;
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK, fixed += m, b += kInt4TileBytes) {
    const __m512 scale[2] = {bf16_to_f32(b), bf16_to_f32(b + 32)};
    ByteSums<R> part;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      part.low[r][0] = part.low[r][1] = _mm512_set1_epi32(-8 * fixed[r].sum);
      part.high[r][0] = part.high[r][1] = _mm512_setzero_si512();
    }
    add_int4_tile(b, a, part);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m512i whole = _mm512_add_epi32(part.low[r][h], _mm512_slli_epi32(part.high[r][h], 8));
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(fixed[r].step));
        sums[r][h] = _mm512_fmadd_ps(sum, scale[h], sums[r][h]);
      }
  }
  fetch_following(b);
  store_sums({job.out, row}, sums);
}

// 16 accumulators: enough to hide the latency of additions, and not spilled.
constexpr int64_t kRowsAtOnce = 8, kRowsOfTermsAtOnce = 4;

template <typename Weight>
constexpr RowsBody kRows[kRowsAtOnce] = {
    multiply_rows<1, 1, Weight>, multiply_rows<2, 1, Weight>, multiply_rows<3, 1, Weight>, multiply_rows<4, 1, Weight>,
    multiply_rows<5, 1, Weight>, multiply_rows<6, 1, Weight>, multiply_rows<7, 1, Weight>, multiply_rows<8, 1, Weight>};
template <typename Weight>
constexpr RowsBody kRowsOfTerms[kRowsOfTermsAtOnce] = {multiply_rows<1, 2, Weight>, multiply_rows<2, 2, Weight>,
                                                       multiply_rows<3, 2, Weight>, multiply_rows<4, 2, Weight>};
// The sums of two bytes are four registers a row.
constexpr RowsBody kInt4Rows[] = {multiply_int4_rows<1>, multiply_int4_rows<2>, multiply_int4_rows<3>,
                                  multiply_int4_rows<4>};

constexpr RowsBodies<kRowsAtOnce> kBodies = {
    .bf16 = kRows<uint16_t>,
    .int8 = kRows<uint8_t>,
    .expand_int8 = [](const PanelJob& job) { expand_int8_avx512(job.b, job.k_tiles, job.tiles); },
};

void multiply(const PanelJob& job) {
  if (job.stored == TileFormat::kInt4) return multiply_int4_avx512(job);
  if (job.a_low == nullptr) return multiply_by(kBodies, job, kTileRows);
  multiply_by(job.stored == TileFormat::kInt8 ? kRowsOfTerms<uint8_t> : kRowsOfTerms<uint16_t>, job);
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

void multiply_int4_avx512(const PanelJob& job) {
  multiply_by(kInt4Rows, job);
}

// Of each set of eight numbers x the low bytes of x0 x4 x1 x5, then their high ones, then those of x2 x6 x3 x7: as
// the bytes of a word of weights have them in their low and in their high four bits.
void fix_avx512(uint16_t* a, int64_t groups, int64_t /*rows*/, FixedGroup* fixed) {
  const __m128i order = _mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15);
  const __m512i of_each_set = _mm512_broadcast_i32x4(order);
  for (int64_t g = 0; g < groups; ++g, a += kTileK) {
    const FixedNumbers numbers = fix_group(a, fixed[g]);
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(numbers.first), numbers.second, 1);
    _mm512_storeu_si512(a, _mm512_shuffle_epi8(all, of_each_set));
  }
}

void expand_int8_avx512(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles) {
  for (int64_t i = 0; i < k_tiles * kPanelTileElements; i += 32)
    _mm512_storeu_si512(tiles + i, (__m512i)pairs_at(packed + i));
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
    .rows_at_once = kRowsAtOnce,
    .rows_of_terms = kRowsOfTermsAtOnce,
    .multiply = multiply,
    .fix = fix_avx512,
    .tile_to_bf16 = tile_to_bf16_avx512,
    .split = split_avx512,
    .add_scaled = add_scaled_avx512,
    .to_f32 = to_f32_avx512,
    .silu_mul_tile = silu_mul_tile_avx512,
    .weighted_sum = weighted_sum_avx512,
    .dots = dots_avx512,
};

}  // namespace perigee::cpu

#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPairs = kTileK / 2;

inline __m256 even_f32(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

inline __m256 odd_f32(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// R rows of a row tile of m rows times the 16 outputs of one B tile: R x 2 accumulators of 8, one chain each.
template <int R>
void multiply_rows(const PanelJob& job, int64_t half, const uint16_t* a, int64_t m, int64_t row) {
  const bool adds = job.in.c != nullptr;
  const float* in =
      !adds ? nullptr : job.in.c + row / kTileRows * job.in.tile + row % kTileRows * job.in.row + half * job.in.half;
  float* out = job.out.c + row / kTileRows * job.out.tile + row % kTileRows * job.out.row + half * job.out.half;
  __m256 acc[R][2];
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) acc[r][h] = adds ? _mm256_loadu_ps(in + r * job.in.row + h * 8) : _mm256_setzero_ps();
  }
  const uint16_t* b = job.int4 ? job.tiles : reinterpret_cast<const uint16_t*>(job.b);
  b += half * kPanelTileElements / 2;
  for (int64_t t = 0; t < job.k_tiles; ++t, a += m * kTileK, b += kPanelTileElements) {
    const auto* pairs = reinterpret_cast<const int32_t*>(a);
    for (int64_t p = 0; p < kPairs; ++p) {
      const __m256i b0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + p * 32));
      const __m256i b1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + p * 32 + 16));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i x = _mm256_set1_epi32(pairs[r * kPairs + p]);
        acc[r][0] = _mm256_fmadd_ps(even_f32(x), even_f32(b0), acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(even_f32(x), even_f32(b1), acc[r][1]);
        acc[r][0] = _mm256_fmadd_ps(odd_f32(x), odd_f32(b0), acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(odd_f32(x), odd_f32(b1), acc[r][1]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * job.out.row + h * 8, acc[r][h]);
  }
}

// `first` is the row of the job that the row tile begins with.
void multiply_row_tile(const PanelJob& job, const uint16_t* a, int64_t m, int64_t first) {
  using Body = void (*)(const PanelJob&, int64_t, const uint16_t*, int64_t, int64_t);
  constexpr Body kBodies[] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>};
  for (int64_t row = 0; row < m; row += 4) {
    const int64_t rows = m - row < 4 ? m - row : 4;
    for (int64_t half = 0; half < 2; ++half) kBodies[rows - 1](job, half, a + row * kTileK, m, first + row);
  }
}

void expand_int4(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles);

void multiply(const PanelJob& job) {
  if (job.int4) expand_int4(job.b, job.k_tiles, job.tiles);
  for (int64_t row = 0; row < job.rows; row += kTileRows) {
    const int64_t m = job.rows - row < kTileRows ? job.rows - row : kTileRows;
    const int64_t tile = row / kTileRows;
    multiply_row_tile(job, job.a + tile * job.a_stride + job.k_begin * m * kTileK, m, row);
  }
}

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

inline __m256i int4_pairs(__m256i words, int shift, __m256 scale) {
  const __m256i nibbles = _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(15));
  const __m256 q = _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
  return round_bf16(_mm256_mul_ps(q, scale));
}

// Eight rows of a quarter of a B tile (8 outputs): 16 words, scales of outputs 0-3 and 4-7, each twice.
void expand_half(const uint8_t* words, const __m256 scale[2], uint16_t* out) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 32));
  for (int j = 0; j < 8; ++j) {
    const __m256i row = join(int4_pairs(low, 4 * j, scale[0]), int4_pairs(high, 4 * j, scale[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + j * 32), row);
  }
}

void expand_int4(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles) {
  for (int64_t i = 0; i < 4 * k_tiles; ++i) {  // k tile, B tile, half of it
    const uint8_t* base = packed + i / 4 * kInt4TileBytes;
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + i % 4 * 16));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
    const __m256i spread = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i spread_high = _mm256_add_epi32(spread, _mm256_set1_epi32(4));
    const __m256 scale[2] = {_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(wide, spread)),
                             _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(wide, spread_high))};
    const uint8_t* words = base + 64 + i % 4 * 128;
    uint16_t* out = tiles + i / 2 * kPanelTileElements / 2 + i % 2 * 16;
    expand_half(words, scale, out);
    expand_half(words + 64, scale, out + 256);
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
    .int4_streams = false,
    .multiply = multiply,
    .expand_int4 = expand_int4,
    .tile_to_bf16 = tile_to_bf16,
    .split = split,
    .add_scaled = add_scaled,
    .to_f32 = to_f32,
    .silu_mul_tile = silu_mul_tile,
    .weighted_sum = weighted_sum,
    .dots = dots,
};

}  // namespace perigee::cpu

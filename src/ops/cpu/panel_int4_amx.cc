// INT4 weights with AMX (ADR 0028). A k tile's sums of whole numbers are exact, so that it does not matter who adds
// them up: few rows go through AVX-512, more of them through tiles, to the same bits.
#include <immintrin.h>

#include "ops/cpu/panel_amx.h"
#include "ops/cpu/panel_avx512.h"
#include "ops/cpu/panel_fix.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kStretch = 8;   // k tiles expanded at once: with the rest of the work they fit the first-level cache
constexpr int64_t kAhead = 6144;  // prefetch distance in bytes
constexpr int64_t kRing = 4;      // k tiles whose sums wait in memory to be scaled
constexpr int64_t kBehind = 2;    // k tiles from a product to the scaling of its sums: no load waits for a tile's store
static_assert(kStretch <= kExpandedTiles && kBehind < kRing);

// -8 ... 7 as bf16, twice: a look-up reads five bits of its index.
inline __m512i whole_numbers() {
  const __m512i numbers =
      _mm512_sub_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(8));
  const __m512 f32 = _mm512_cvtepi32_ps(numbers);
  return (__m512i)_mm512_cvtne2ps_pbh(f32, f32);
}

// The whole numbers of an INT4 k tile, as a bf16 panel has its elements.
inline void expand_numbers(const uint8_t* tile, const __m512i numbers, uint16_t* out) {
  _mm_prefetch(tile + kAhead, _MM_HINT_T1);
  for (int64_t set = 0; set < 4; ++set) {
    const uint8_t* words = tile + 64 + set * 128;
    for (int64_t half = 0; half < 2; ++half) {
      const __m512i w = _mm512_loadu_si512(words + 64 * half);
      _mm_prefetch(words + 64 * half + kAhead, _MM_HINT_T1);
      uint16_t* rows = out + set * 256 + half * kLine;
      _mm512_storeu_si512(rows, _mm512_permutexvar_epi16(w, numbers));
      _mm512_storeu_si512(rows + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), numbers));
      _mm512_storeu_si512(rows + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 8), numbers));
      _mm512_storeu_si512(rows + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 12), numbers));
    }
  }
}

// Some k tiles of a row tile times 16 outputs.
struct Product {
  const uint16_t* a = nullptr;
  int64_t rows = 0;
  const uint16_t* b = nullptr;      // whole numbers: a B tile of each k tile
  const uint8_t* scales = nullptr;  // of the first k tile
  int64_t k_tiles = 0;
  const float* in = nullptr;  // null: zero
  int64_t in_row = 0;
  float* out = nullptr;
  int64_t out_row = 0;
};

// At most R rows. The sums of all k tiles stay in registers. Activations are streamed past the first-level cache.
template <int R>
void multiply(const Product& p) {
  const int64_t rows = p.rows, k_tiles = p.k_tiles;
  const auto live = [&](int r) { return static_cast<__mmask16>(r < rows ? 0xFFFF : 0); };
  __m512 sums[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sums[r] = _mm512_setzero_ps();
    if (p.in != nullptr) sums[r] = _mm512_maskz_loadu_ps(live(r), p.in + r * p.in_row);
  }
  alignas(64) float of_k_tile[kRing][kAccumulators];
  for (int64_t r = rows; r < R; ++r)
    for (int64_t i = 0; i < kRing; ++i) _mm512_store_ps(of_k_tile[i] + r * kTileOutputs, _mm512_setzero_ps());
  for (int64_t t = 0; t < k_tiles + kBehind; ++t) {
    if (t < k_tiles) {
      _tile_stream_loadd(0, p.a + t * rows * kLine, 64);
      _tile_loadd(2, p.b + t * kPanelTileElements, kWeightRow);
      _tile_zero(4);
      _tile_dpbf16ps(4, 0, 2);
      _tile_stored(4, of_k_tile[t % kRing], kTileOutputs * 4);
    }
    if (t < kBehind) continue;
    const float* whole = of_k_tile[(t - kBehind) % kRing];
    const auto* bits = reinterpret_cast<const __m256i*>(p.scales + (t - kBehind) * kInt4TileBytes);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(bits)), 16));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = _mm512_fmadd_ps(_mm512_load_ps(whole + r * kTileOutputs), scale, sums[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) _mm512_mask_storeu_ps(p.out + r * p.out_row, live(r), sums[r]);
}

// The row tile that begins at `row`, over `k_tiles` whose whole numbers are in job.tiles, `k` and more of the job.
void multiply_row_tile(const PanelJob& job, int64_t row, int64_t rows, int64_t k, int64_t k_tiles) {
  const PanelSums& in = k == 0 ? job.in : job.out;
  const int64_t tile = row / kTileRows;
  for (int64_t half = 0; half < 2; ++half) {
    const Product p{.a = job.a + tile * job.a_stride + (job.k_begin + k) * rows * kLine,
                    .rows = rows,
                    .b = job.tiles + half * kLine,
                    .scales = job.b + k * kInt4TileBytes + half * kTileOutputs * 2,
                    .k_tiles = k_tiles,
                    .in = in.c == nullptr ? nullptr : in.c + tile * in.tile + half * in.half,
                    .in_row = in.row,
                    .out = job.out.c + tile * job.out.tile + half * job.out.half,
                    .out_row = job.out.row};
    rows <= 8 ? multiply<8>(p) : multiply<16>(p);
  }
}

}  // namespace

void multiply_int4_amx(const PanelJob& job) {
  if (job.rows <= kVectorRowsAmx) return multiply_int4_avx512(job);
  const __m512i numbers = whole_numbers();
  const int64_t full = job.rows / kTileRows * kTileRows, rest = job.rows - full;
  if (full == 0) configure_tiles_amx(rest, 0);
  for (int64_t k = 0; k < job.k_tiles; k += kStretch) {
    const int64_t k_tiles = job.k_tiles - k < kStretch ? job.k_tiles - k : kStretch;
    for (int64_t t = 0; t < k_tiles; ++t)
      expand_numbers(job.b + (k + t) * kInt4TileBytes, numbers, job.tiles + t * kPanelTileElements);
    before_tile_loads();
    if (full > 0) configure_tiles_amx(kTileRows, 0);
    for (int64_t row = 0; row < full; row += kTileRows) multiply_row_tile(job, row, kTileRows, k, k_tiles);
    if (full > 0 && rest > 0) configure_tiles_amx(rest, 0);
    if (rest > 0) multiply_row_tile(job, full, rest, k, k_tiles);
  }
  _tile_release();
}

// bf16 holds what is left: a number that was rounded is at most 128, any other is the input itself, of 8 bits.
void fix_amx(uint16_t* a, int64_t groups, int64_t rows, FixedGroup* fixed) {
  if (rows <= kVectorRowsAmx) return fix_avx512(a, groups, rows, fixed);
  for (int64_t g = 0; g < groups; ++g, a += kTileK) {
    const FixedNumbers numbers = fix_group(a, fixed[g]);
    const __m512 step = _mm512_set1_ps(fixed[g].step);
    const auto rounded = [&](__m256i whole) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(whole)), step);
    };
    _mm512_storeu_si512(a, (__m512i)_mm512_cvtne2ps_pbh(rounded(numbers.second), rounded(numbers.first)));
  }
}

}  // namespace perigee::cpu

// AMX: TDPBF16PS multiplies a row tile [16, 32] by a B tile [32, 16] into f32 [16, 16] in 16 cycles.
#include "ops/cpu/panel_amx.h"

#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_avx512.h"
#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void set_tile(TileConfig& config, int tile, int64_t rows) {
  config.rows[tile] = static_cast<uint8_t>(rows);
  config.bytes[tile] = rows > 0 ? 64 : 0;
}

// Fetches `lines` lines from p on towards the second-level cache.
inline void prefetch_lines(const uint8_t* p, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) _mm_prefetch(p + i * 64, _MM_HINT_T1);
}

// A row tile of a job.
struct RowTile {
  const uint16_t* a = nullptr;
  const uint16_t* low = nullptr;  // its second term; null: none
  int64_t rows = 0;
  int64_t step = 0;           // elements from one k tile to the next
  const float* in = nullptr;  // null: zero
  float* out = nullptr;
};

RowTile row_tile(const PanelJob& job, int64_t row, int64_t rows) {
  const int64_t at = row / kTileRows * job.a_stride + job.k_begin * rows * kLine;
  return {.a = job.a + at,
          .low = job.a_low == nullptr ? nullptr : job.a_low + at,
          .rows = rows,
          .step = rows * kLine,
          .in = job.in.c == nullptr ? nullptr : job.in.c + row / kTileRows * job.in.tile,
          .out = job.out.c + row / kTileRows * job.out.tile};
}

// Two row tiles, two output tiles. Activations are streamed past the first-level cache, which then keeps the panel for
// the next pair of row tiles. `ahead` lines of job.next are fetched with each k tile, from line `fetched` on.
void multiply_pair(const PanelJob& job, RowTile r0, RowTile r1, int64_t fetched, int64_t ahead) {
  if (r0.in != nullptr) {
    const int64_t stride = job.in.row * 4;
    _tile_loadd(4, r0.in, stride);
    _tile_loadd(5, r0.in + job.in.half, stride);
    _tile_loadd(6, r1.in, stride);
    _tile_loadd(7, r1.in + job.in.half, stride);
  } else {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  const auto* b = reinterpret_cast<const uint16_t*>(job.b);
  const uint8_t* next = job.next + fetched * 64;
  for (int64_t t = 0; t < job.k_tiles; ++t, b += kPanelTileElements, r0.a += r0.step, r1.a += r1.step) {
    prefetch_lines(next, ahead);
    next += ahead * 64;
    if (t < kTileRows) {  // where the sums will go, a row of each tile with each k tile
      for (const float* out : {r0.out, r1.out}) {
        _mm_prefetch(out + t * job.out.row, _MM_HINT_T0);
        _mm_prefetch(out + t * job.out.row + job.out.half, _MM_HINT_T0);
      }
    }
    _tile_loadd(2, b, kWeightRow);
    _tile_stream_loadd(0, r0.a, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b + kLine, kWeightRow);
    _tile_dpbf16ps(5, 0, 3);
    _tile_stream_loadd(1, r1.a, 64);
    _tile_dpbf16ps(6, 1, 2);
    _tile_dpbf16ps(7, 1, 3);
  }
  const int64_t stride = job.out.row * 4;
  _tile_stored(4, r0.out, stride);
  _tile_stored(5, r0.out + job.out.half, stride);
  _tile_stored(6, r1.out, stride);
  _tile_stored(7, r1.out + job.out.half, stride);
}

void load_single(const float* c, const PanelSums& layout) {
  _tile_loadd(4, c, layout.row * 4);
  _tile_loadd(5, c + layout.half, layout.row * 4);
}

void store_single(const RowTile& r, const PanelSums& layout) {
  _tile_stored(4, r.out, layout.row * 4);
  _tile_stored(5, r.out + layout.half, layout.row * 4);
}

// Stores the sums of both terms, in tiles 4 and 5 and in tiles 6 and 7, added.
void join_terms(const RowTile& r, const PanelSums& layout) {
  alignas(64) float low[2][kAccumulators];
  _tile_stored(6, low[0], kTileOutputs * 4);
  _tile_stored(7, low[1], kTileOutputs * 4);
  store_single(r, layout);
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t row = 0; row < r.rows; ++row) {
      float* sum = r.out + half * layout.half + row * layout.row;
      _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), _mm512_load_ps(low[half] + row * kTileOutputs)));
    }
}

// One row tile of T terms, two output tiles. It is bound by memory: fetch well ahead. INT8 weights become bf16 one k
// tile before they are used, so that both kinds of work overlap. Terms are joined wherever a job of many rows may end.
template <int T, bool kInt8>
void multiply_single(const PanelJob& job, const RowTile& r) {
  constexpr int64_t kAhead = 4 * kPanelTileElements * 2, kRing = 4;
  if (r.in != nullptr) {
    load_single(r.in, job.in);
  } else {
    _tile_zero(4);
    _tile_zero(5);
  }
  if constexpr (T > 1) {
    _tile_zero(6);
    _tile_zero(7);
  }
  const auto expand = [&](int64_t t) {
    expand_int8_avx512(job.b + t * kInt8TileBytes, 1, job.tiles + t % kRing * kPanelTileElements);
    before_tile_loads();
  };
  if constexpr (kInt8) expand(0);
  for (int64_t t = 0; t < job.k_tiles; ++t) {
    const uint16_t* b = job.tiles + t % kRing * kPanelTileElements;
    if constexpr (kInt8) {
      if (t + 1 < job.k_tiles) expand(t + 1);
    } else {
      b = reinterpret_cast<const uint16_t*>(job.b) + t * kPanelTileElements;
      prefetch_lines(reinterpret_cast<const uint8_t*>(b) + kAhead, kPanelTileElements * 2 / 64);
    }
    _tile_loadd(0, r.a + t * r.step, 64);
    _tile_loadd(2, b, kWeightRow);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b + kLine, kWeightRow);
    _tile_dpbf16ps(5, 0, 3);
    if constexpr (T > 1) {
      _tile_loadd(1, r.low + t * r.step, 64);
      _tile_dpbf16ps(6, 1, 2);
      _tile_dpbf16ps(7, 1, 3);
      if ((t + 1) % kExpandedTiles == 0 && t + 1 < job.k_tiles) {
        join_terms(r, job.out);
        before_tile_loads();
        load_single(r.out, job.out);
        _tile_zero(6);
        _tile_zero(7);
      }
    }
  }
  T > 1 ? join_terms(r, job.out) : store_single(r, job.out);
}

// At most 16 rows.
void multiply_few(const PanelJob& job) {
  const RowTile r = row_tile(job, 0, job.rows);
  configure_tiles_amx(job.rows, r.low == nullptr ? 0 : job.rows);
  if (job.stored == TileFormat::kInt8) {
    r.low == nullptr ? multiply_single<1, true>(job, r) : multiply_single<2, true>(job, r);
  } else {
    r.low == nullptr ? multiply_single<1, false>(job, r) : multiply_single<2, false>(job, r);
  }
  _tile_release();
}

// More than 16 rows; `b` is bf16.
void multiply_many(const PanelJob& job) {
  const int64_t full = job.rows / 32 * 32;
  const int64_t pairs = full / 32;
  const int64_t next_lines = job.next != nullptr && pairs > 0 ? kPanelTileElements * 2 / 64 * job.k_tiles : 0;
  const int64_t ahead = next_lines > 0 ? (next_lines + pairs * job.k_tiles - 1) / (pairs * job.k_tiles) : 0;
  if (full > 0) configure_tiles_amx(16, 16);
  for (int64_t row = 0; row < full; row += 32) {
    multiply_pair(job, row_tile(job, row, 16), row_tile(job, row + 16, 16), row / 32 * ahead * job.k_tiles, ahead);
  }
  const int64_t rest = job.rows - full;
  if (rest > 16) {
    configure_tiles_amx(16, rest - 16);
    multiply_pair(job, row_tile(job, full, 16), row_tile(job, full + 16, rest - 16), 0, 0);
  } else if (rest > 0) {
    configure_tiles_amx(rest, 0);
    multiply_single<1, false>(job, row_tile(job, full, rest));
  }
  _tile_release();
}

void multiply(const PanelJob& job) {
  if (job.stored == TileFormat::kInt4) return multiply_int4_amx(job);
  if (job.rows <= kTileRows) return multiply_few(job);
  if (job.stored == TileFormat::kBF16) return multiply_many(job);
  expand_int8_avx512(job.b, job.k_tiles, job.tiles);
  before_tile_loads();
  PanelJob of_bf16 = job;
  of_bf16.b = reinterpret_cast<const uint8_t*>(job.tiles);
  of_bf16.stored = TileFormat::kBF16;
  multiply_many(of_bf16);
}

}  // namespace

void configure_tiles_amx(int64_t rows0, int64_t rows1) {
  TileConfig config;
  for (const int tile : {0, 4, 5}) set_tile(config, tile, rows0);
  for (const int tile : {1, 6, 7}) set_tile(config, tile, rows1);
  for (const int tile : {2, 3}) set_tile(config, tile, 16);
  // GCC 12's intrinsic says that it reads eight bytes only: keep the stores to the rest before it.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

const PanelKernels kPanelKernelsAmx = {
    .rows_at_once = kTileRows,
    .rows_of_terms = kTileRows,
    .multiply = multiply,
    .fix = fix_amx,
    .tile_to_bf16 = tile_to_bf16_avx512,
    .split = split_avx512,
    .add_scaled = add_scaled_avx512,
    .to_f32 = to_f32_avx512,
    .silu_mul_tile = silu_mul_tile_avx512,
    .weighted_sum = weighted_sum_avx512,
    .dots = dots_avx512,
};

}  // namespace perigee::cpu

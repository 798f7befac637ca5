// AMX: TDPBF16PS multiplies a row tile [16, 32] by a B tile [32, 16] into f32 [16, 16] in 16 cycles.
#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_avx512.h"
#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLine = 32;        // bf16 of one cache line, a tile row
constexpr int64_t kWeightRow = 128;  // bytes from one row of a B tile to the next

// Tiles 0-1: activations, 2-3: weights, 4-7: accumulators (row tile, output tile).
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

// Row tiles of rows0 and rows1 rows; rows1 may be 0, then tiles 1, 6 and 7 are not to be used.
void configure(int64_t rows0, int64_t rows1) {
  TileConfig config;
  for (const int tile : {0, 4, 5}) set_tile(config, tile, rows0);
  for (const int tile : {1, 6, 7}) set_tile(config, tile, rows1);
  for (const int tile : {2, 3}) set_tile(config, tile, 16);
  // GCC 12's intrinsic says that it reads eight bytes only: keep the stores to the rest before it.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Fetches `lines` lines from p on towards the second-level cache.
inline void prefetch_lines(const uint8_t* p, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) _mm_prefetch(p + i * 64, _MM_HINT_T1);
}

// One row tile of a pair.
struct RowTile {
  const uint16_t* a = nullptr;
  int64_t step = 0;           // elements from one k tile to the next
  const float* in = nullptr;  // null: zero
  float* out = nullptr;
};

RowTile row_tile(const PanelJob& job, int64_t row, int64_t rows) {
  return {.a = job.a + row / kTileRows * job.a_stride + job.k_begin * rows * kLine,
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
  const auto* b = job.stored == TileFormat::kBF16 ? reinterpret_cast<const uint16_t*>(job.b) : job.tiles;
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

void begin_single(const PanelJob& job, const RowTile& r) {
  if (r.in != nullptr) {
    _tile_loadd(4, r.in, job.in.row * 4);
    _tile_loadd(5, r.in + job.in.half, job.in.row * 4);
  } else {
    _tile_zero(4);
    _tile_zero(5);
  }
}

void end_single(const PanelJob& job, const RowTile& r) {
  _tile_stored(4, r.out, job.out.row * 4);
  _tile_stored(5, r.out + job.out.half, job.out.row * 4);
}

inline void step_single(const uint16_t* a, const uint16_t* b) {
  _tile_loadd(0, a, 64);
  _tile_loadd(2, b, kWeightRow);
  _tile_dpbf16ps(4, 0, 2);
  _tile_loadd(3, b + kLine, kWeightRow);
  _tile_dpbf16ps(5, 0, 3);
}

// One row tile, two output tiles. A single row tile is bound by memory: fetch well ahead.
void multiply_single(const PanelJob& job, RowTile r) {
  constexpr int64_t kAhead = 4 * kPanelTileElements * 2;
  begin_single(job, r);
  const bool tiles = job.stored != TileFormat::kBF16;
  const auto* b = tiles ? job.tiles : reinterpret_cast<const uint16_t*>(job.b);
  for (int64_t t = 0; t < job.k_tiles; ++t, b += kPanelTileElements, r.a += r.step) {
    if (!tiles) prefetch_lines(reinterpret_cast<const uint8_t*>(b) + kAhead, kPanelTileElements * 2 / 64);
    step_single(r.a, b);
  }
  end_single(job, r);
}

// The same of a quantised panel, expanded one k tile before it is used, so that both kinds of work overlap.
template <void (*kExpand)(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles), int64_t kTileBytes>
void multiply_single_quantised(const PanelJob& job, RowTile r) {
  begin_single(job, r);
  kExpand(job.b, 1, job.tiles);
  for (int64_t t = 0; t < job.k_tiles; ++t, r.a += r.step) {
    const uint8_t* following = job.b + (t + 1) * kTileBytes;
    if (t + 1 < job.k_tiles) kExpand(following, 1, job.tiles + (t + 1) % 4 * kPanelTileElements);
    step_single(r.a, job.tiles + t % 4 * kPanelTileElements);
  }
  end_single(job, r);
}

auto single_of(TileFormat format) {
  switch (format) {
    case TileFormat::kInt8: return multiply_single_quantised<expand_int8_avx512, kInt8TileBytes>;
    case TileFormat::kInt4: return multiply_single_quantised<expand_int4_avx512, kInt4TileBytes>;
    case TileFormat::kBF16: break;
  }
  return multiply_single;
}

void multiply(const PanelJob& job) {
  if (job.rows <= kTileRows) {
    configure(job.rows, 0);
    single_of(job.stored)(job, row_tile(job, 0, job.rows));
    _tile_release();
    return;
  }
  if (job.stored == TileFormat::kInt4) expand_int4_avx512(job.b, job.k_tiles, job.tiles);
  if (job.stored == TileFormat::kInt8) expand_int8_avx512(job.b, job.k_tiles, job.tiles);
  const int64_t full = job.rows / 32 * 32;
  const int64_t pairs = full / 32;
  const int64_t next_lines = job.next != nullptr && pairs > 0 ? kPanelTileElements * 2 / 64 * job.k_tiles : 0;
  const int64_t ahead = next_lines > 0 ? (next_lines + pairs * job.k_tiles - 1) / (pairs * job.k_tiles) : 0;
  if (full > 0) configure(16, 16);
  for (int64_t row = 0; row < full; row += 32) {
    multiply_pair(job, row_tile(job, row, 16), row_tile(job, row + 16, 16), row / 32 * ahead * job.k_tiles, ahead);
  }
  const int64_t rest = job.rows - full;
  if (rest > 16) {
    configure(16, rest - 16);
    multiply_pair(job, row_tile(job, full, 16), row_tile(job, full + 16, rest - 16), 0, 0);
  } else if (rest > 0) {
    configure(rest, 0);
    multiply_single(job, row_tile(job, full, rest));
  }
  _tile_release();
}

}  // namespace

const PanelKernels kPanelKernelsAmx = {
    .rows_at_once = kTileRows,
    .multiply = multiply,
    .tile_to_bf16 = tile_to_bf16_avx512,
    .split = split_avx512,
    .add_scaled = add_scaled_avx512,
    .to_f32 = to_f32_avx512,
    .silu_mul_tile = silu_mul_tile_avx512,
    .weighted_sum = weighted_sum_avx512,
    .dots = dots_avx512,
};

}  // namespace perigee::cpu

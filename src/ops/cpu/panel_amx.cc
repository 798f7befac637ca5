// AMX: TDPBF16PS multiplies a row tile [16, 32] by a B tile [32, 16] into f32 [16, 16] in 16 cycles.
#include <immintrin.h>

#include <initializer_list>

#include "ops/cpu/panel_avx512.h"
#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLine = 32;  // bf16 of one cache line, a tile row

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

// Fetches the lines that the B stream reaches `kAhead` elements from here: single rows are bound by memory.
inline void prefetch_panel_tile(const uint16_t* b) {
  constexpr int64_t kAhead = 4 * kPanelTileElements;
  for (int64_t i = 0; i < kPanelTileElements; i += kLine) _mm_prefetch(b + kAhead + i, _MM_HINT_T0);
}

// Two row tiles, two output tiles.
void multiply_pair(const PanelJob& job, const uint16_t* a0, const uint16_t* a1, int64_t rows1, float* c) {
  float* c1 = c + 2 * kAccumulators;
  if (job.accumulate) {
    _tile_loadd(4, c, 64);
    _tile_loadd(5, c + kAccumulators, 64);
    _tile_loadd(6, c1, 64);
    _tile_loadd(7, c1 + kAccumulators, 64);
  } else {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  const uint16_t* b = job.b;
  for (int64_t t = 0; t < job.k_tiles; ++t, b += kPanelTileElements, a0 += 16 * kLine, a1 += rows1 * kLine) {
    _tile_loadd(2, b, 64);
    _tile_loadd(0, a0, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b + kPanelTileElements / 2, 64);
    _tile_dpbf16ps(5, 0, 3);
    _tile_loadd(1, a1, 64);
    _tile_dpbf16ps(6, 1, 2);
    _tile_dpbf16ps(7, 1, 3);
  }
  _tile_stored(4, c, 64);
  _tile_stored(5, c + kAccumulators, 64);
  _tile_stored(6, c1, 64);
  _tile_stored(7, c1 + kAccumulators, 64);
}

// One row tile, two output tiles.
void multiply_single(const PanelJob& job, const uint16_t* a, int64_t rows, float* c) {
  if (job.accumulate) {
    _tile_loadd(4, c, 64);
    _tile_loadd(5, c + kAccumulators, 64);
  } else {
    _tile_zero(4);
    _tile_zero(5);
  }
  const uint16_t* b = job.b;
  for (int64_t t = 0; t < job.k_tiles; ++t, b += kPanelTileElements, a += rows * kLine) {
    prefetch_panel_tile(b);
    _tile_loadd(0, a, 64);
    _tile_loadd(2, b, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(3, b + kPanelTileElements / 2, 64);
    _tile_dpbf16ps(5, 0, 3);
  }
  _tile_stored(4, c, 64);
  _tile_stored(5, c + kAccumulators, 64);
}

void multiply(const PanelJob& job) {
  const int64_t full = job.rows / 32 * 32;
  const auto row_tile = [&](int64_t row, int64_t rows) {
    return job.a + row / kTileRows * job.a_stride + job.k_begin * rows * kLine;
  };
  const auto c_tile = [&](int64_t row) { return job.c + row / kTileRows * 2 * kAccumulators; };
  if (full > 0) configure(16, 16);
  for (int64_t row = 0; row < full; row += 32) {
    multiply_pair(job, row_tile(row, 16), row_tile(row + 16, 16), 16, c_tile(row));
  }
  const int64_t rest = job.rows - full;
  if (rest > 16) {
    configure(16, rest - 16);
    multiply_pair(job, row_tile(full, 16), row_tile(full + 16, rest - 16), rest - 16, c_tile(full));
  } else if (rest > 0) {
    configure(rest, 0);
    multiply_single(job, row_tile(full, rest), rest, c_tile(full));
  }
  _tile_release();
}

}  // namespace

const PanelKernels kPanelKernelsAmx = {
    .multiply = multiply,
    .expand_int4 = expand_int4_avx512,
    .tile_to_bf16 = tile_to_bf16_avx512,
    .to_f32 = to_f32_avx512,
    .silu_mul_tile = silu_mul_tile_avx512,
    .weighted_sum = weighted_sum_avx512,
    .dots = dots_avx512,
};

}  // namespace perigee::cpu

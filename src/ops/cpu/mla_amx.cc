#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kFullTiles;

// Sums of a block live in tiles 0 ... 3, operands in 4 ... 7. Tile numbers are part of the instruction, hence macros.
#define PERIGEE_SUMS_IN(tile, pointer)          \
  if (p.accumulate) {                           \
    _tile_loadd(tile, pointer, p.c_stride * 4); \
  } else {                                      \
    _tile_zero(tile);                           \
  }

// 2 tiles of rows by 2 panels.
void block_2x2(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a0 = p.a + row * p.a_stride;
  const uint16_t* a1 = a0 + kPanel * p.a_stride;
  const uint32_t* b0 = p.b + panel * p.panel_stride;
  const uint32_t* b1 = b0 + p.panel_stride;
  float* c0 = p.c + row * p.c_stride + panel * kPanel;
  float* c1 = c0 + kPanel * p.c_stride;
  PERIGEE_SUMS_IN(0, c0)
  PERIGEE_SUMS_IN(1, c0 + kPanel)
  PERIGEE_SUMS_IN(2, c1)
  PERIGEE_SUMS_IN(3, c1 + kPanel)
  for (int64_t k = 0; k < p.k; k += kDepth) {
    _tile_loadd(4, a0 + k, p.a_stride * 2);
    _tile_loadd(6, b0 + k / 2 * kPanel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + k / 2 * kPanel, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + k, p.a_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c0, p.c_stride * 4);
  _tile_stored(1, c0 + kPanel, p.c_stride * 4);
  _tile_stored(2, c1, p.c_stride * 4);
  _tile_stored(3, c1 + kPanel, p.c_stride * 4);
}

// 4 tiles of rows by 1 panel.
void block_4x1(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a = p.a + row * p.a_stride;
  const int64_t step = kPanel * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  const int64_t c_step = kPanel * p.c_stride;
  PERIGEE_SUMS_IN(0, c)
  PERIGEE_SUMS_IN(1, c + c_step)
  PERIGEE_SUMS_IN(2, c + 2 * c_step)
  PERIGEE_SUMS_IN(3, c + 3 * c_step)
  for (int64_t k = 0; k < p.k; k += kDepth) {
    _tile_loadd(7, b + k / 2 * kPanel, 64);
    _tile_loadd(4, a + k, p.a_stride * 2);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, a + step + k, p.a_stride * 2);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, a + 2 * step + k, p.a_stride * 2);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, a + 3 * step + k, p.a_stride * 2);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, c, p.c_stride * 4);
  _tile_stored(1, c + c_step, p.c_stride * 4);
  _tile_stored(2, c + 2 * c_step, p.c_stride * 4);
  _tile_stored(3, c + 3 * c_step, p.c_stride * 4);
}

// 1 tile of rows by 4 panels.
void block_1x4(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a = p.a + row * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  PERIGEE_SUMS_IN(0, c)
  PERIGEE_SUMS_IN(1, c + kPanel)
  PERIGEE_SUMS_IN(2, c + 2 * kPanel)
  PERIGEE_SUMS_IN(3, c + 3 * kPanel)
  for (int64_t k = 0; k < p.k; k += kDepth) {
    _tile_loadd(7, a + k, p.a_stride * 2);
    _tile_loadd(4, b + k / 2 * kPanel, 64);
    _tile_dpbf16ps(0, 7, 4);
    _tile_loadd(5, b + p.panel_stride + k / 2 * kPanel, 64);
    _tile_dpbf16ps(1, 7, 5);
    _tile_loadd(6, b + 2 * p.panel_stride + k / 2 * kPanel, 64);
    _tile_dpbf16ps(2, 7, 6);
    _tile_loadd(4, b + 3 * p.panel_stride + k / 2 * kPanel, 64);
    _tile_dpbf16ps(3, 7, 4);
  }
  _tile_stored(0, c, p.c_stride * 4);
  _tile_stored(1, c + kPanel, p.c_stride * 4);
  _tile_stored(2, c + 2 * kPanel, p.c_stride * 4);
  _tile_stored(3, c + 3 * kPanel, p.c_stride * 4);
}

void block_1x1(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a = p.a + row * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  PERIGEE_SUMS_IN(0, c)
  for (int64_t k = 0; k < p.k; k += kDepth) {
    _tile_loadd(4, a + k, p.a_stride * 2);
    _tile_loadd(5, b + k / 2 * kPanel, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, c, p.c_stride * 4);
}

// Tile state is set and released here, so that nothing outside depends on it. An element's sum runs over k in steps
// of 32 whichever block it falls in.
void multiply_one(const Product& p) {
  _tile_loadconfig(&kFullTiles);
  const int64_t m = round_up(p.m, kPanel), panels = p.panels();
  int64_t row = 0;
  for (; row + 2 * kPanel <= m; row += 2 * kPanel) {
    for (int64_t panel = 0; panel + 2 <= panels; panel += 2) block_2x2(p, row, panel);
  }
  for (; row < m; row += kPanel) {
    int64_t panel = 0;
    for (; panel + 4 <= panels; panel += 4) block_1x4(p, row, panel);
    for (; panel < panels / 2 * 2; ++panel) block_1x1(p, row, panel);
  }
  if (panels % 2 != 0) {
    row = 0;
    for (; row + 4 * kPanel <= m; row += 4 * kPanel) block_4x1(p, row, panels - 1);
    for (; row < m; row += kPanel) block_1x1(p, row, panels - 1);
  }
  _tile_release();
}

void multiply(const Product& p) {
  multiply_one(p);
  if (p.a_low == nullptr && p.b_low == nullptr) return;
  Product low = p;
  if (p.a_low != nullptr) low.a = p.a_low;
  if (p.b_low != nullptr) low.b = p.b_low;
  low.accumulate = true;
  multiply_one(low);
}

#undef PERIGEE_SUMS_IN

}  // namespace

const MlaKernels kMlaAmx = mla_loops(multiply);

}  // namespace perigee::cpu

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

int64_t query_words(int64_t depth) {
  return depth / 2 * kPanel;
}

void scores(const Scores& p) {
  multiply_one({.a = p.keys.rows,
                .a_stride = p.keys.stride,
                .b = p.queries,
                .panel_stride = query_words(p.depth),
                .c = p.out,
                .c_stride = p.out_stride,
                .m = p.num_keys,
                .k = p.depth,
                .columns = p.num_queries});
}

// Values of a step as panels: rows 2p and 2p + 1 of a block become word row p.
constexpr int64_t kValuePanels = 4, kValueStride = kStepKeys / 2 * kPanel;

void interleave(const BlockRows& block, int64_t column, int64_t panels, int64_t num_rows, uint32_t* out) {
  static const uint16_t kZeros[kPanel] = {};
  for (int64_t r = 0; r < round_up(num_rows, kDepth); r += 2) {
    const uint16_t* low = block.rows + r * block.stride + column;
    for (int64_t n = 0; n < panels; ++n) {
      const uint16_t* a = r < num_rows ? low + n * kPanel : kZeros;
      const uint16_t* b = r + 1 < num_rows ? low + block.stride + n * kPanel : kZeros;
      uint32_t* to = out + n * kValueStride + r / 2 * kPanel;
      for (int64_t j = 0; j < kPanel; ++j) to[j] = a[j] | static_cast<uint32_t>(b[j]) << 16;
    }
  }
}

void values(const Values& p) {
  static thread_local uint32_t interleaved[kValuePanels * kValueStride];
  for (int64_t column = 0; column < p.columns; column += kValuePanels * kPanel) {
    const int64_t left = (p.columns - column) / kPanel, panels = left < kValuePanels ? left : kValuePanels;
    for (int64_t key = 0; key < p.num_keys; key += kBlockKeys) {
      const int64_t rows = p.num_keys - key < kBlockKeys ? p.num_keys - key : kBlockKeys;
      interleave(p.blocks[key / kBlockKeys], column, panels, rows, interleaved + key / 2 * kPanel);
    }
    multiply_one({.a = p.weights,
                  .a_stride = p.weight_stride,
                  .b = interleaved,
                  .panel_stride = kValueStride,
                  .c = p.out + column,
                  .c_stride = p.out_stride,
                  .m = p.num_queries,
                  .k = round_up(p.num_keys, kDepth),
                  .columns = panels * kPanel,
                  .accumulate = p.accumulate});
  }
}

}  // namespace

const MlaKernels kMlaAmx = mla_loops(
    {.multiply = multiply, .query_words = query_words, .pack_queries = pack_rows, .scores = scores, .values = values});

}  // namespace perigee::cpu

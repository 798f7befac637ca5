// PanelMatrix: a weight matrix in the packed layout of panel_kernels.h, and packing, once at load.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/panel_kernels.h"
#include "ops/cpu/thread_pool.h"
#include "ops/weights.h"
#include "tensor/arena.h"

namespace perigee::cpu {

// A view; the owner of the bytes is a PackedWeight. Outputs and inputs beyond the matrix are zero weights.
struct PanelMatrix {
  bool int4 = false;  // 4-bit with scales, else bf16
  int64_t out = 0, in = 0;
  int64_t num_panels = 0, k_tiles = 0;
  uint8_t* data = nullptr;

  int64_t k_tile_bytes() const { return int4 ? kInt4TileBytes : kPanelTileElements * 2; }
  int64_t panel_bytes() const { return k_tiles * k_tile_bytes(); }
  int64_t bytes() const { return num_panels * panel_bytes(); }
  const uint8_t* at(int64_t panel, int64_t k_tile) const {
    return data + panel * panel_bytes() + k_tile * k_tile_bytes();
  }
};

// One output of a packed matrix: a row of a checkpoint matrix, or nothing (padding).
struct OutputRow {
  const RawMatrix* matrix = nullptr;
  int64_t row = 0;
};

// The shape of a packed matrix of `out` outputs, data still null.
PanelMatrix panel_matrix(int64_t out, int64_t in, bool int4);

// Fills m.data (m.bytes() zeroed bytes); rows.size() = 32 * m.num_panels. Every row has m.in inputs, and is
// kInt4Group32 if m.int4. FP8, F16 and F32 elements are rounded to bf16 after scaling.
void pack_panels(ThreadPool& pool, const PanelMatrix& m, std::span<const OutputRow> rows);

// Rows of the matrices one after another.
std::vector<OutputRow> stacked_rows(std::span<const RawMatrix> stacked);

// Packs activations: rows `ids` of x (null: rows 0 ...) into row tiles of k_tiles each; `first` is a multiple of 16.
// Row tile i of the destination begins at a + i * 16 * 32 * k_tiles. Inputs beyond x.cols are zero.
void pack_row_tile(const Tensor& x, const int32_t* ids, int64_t first, int64_t rows, uint16_t* a);

inline int64_t ceil_div(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

}  // namespace perigee::cpu

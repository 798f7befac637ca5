// PanelMatrix: a weight matrix in the packed layout of panel_kernels.h, and packing, once at load.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "ops/cpu/panel_kernels.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

enum class PanelFormat : uint8_t {
  kBF16,
  kInt4,    // 4-bit with scales inside the panels
  kScaled,  // FP8 values as bf16, which holds them exactly; f32 scales of 128 inputs apart, applied to sums
  kInt8,    // 8-bit with a f32 scale of each output, applied to sums: OnlineQuantization::kInt8PerChannel
};
inline constexpr int64_t kScaleTiles = 128 / kTileK;  // k tiles under one scale of kScaled

// A view; the owner of the bytes is a PackedWeight. Outputs and inputs beyond the matrix are zero weights.
//
// A window of a quantised matrix may begin between scales. Its first k tile then begins where the stored matrix's does,
// with `front` inputs that are not the window's; and `first_scale_tile` tiles of its first block of 128 are missing.
struct PanelMatrix {
  PanelFormat format = PanelFormat::kBF16;
  int64_t out = 0, in = 0;
  int64_t front = 0, first_scale_tile = 0;
  int64_t num_panels = 0, k_tiles = 0;
  uint8_t* data = nullptr;

  bool int4() const { return format == PanelFormat::kInt4; }
  bool int8() const { return format == PanelFormat::kInt8; }
  bool scaled() const { return format == PanelFormat::kScaled; }
  TileFormat tiles() const { return int4() ? TileFormat::kInt4 : int8() ? TileFormat::kInt8 : TileFormat::kBF16; }
  int64_t k_tile_bytes() const { return int4() ? kInt4TileBytes : int8() ? kInt8TileBytes : kPanelTileElements * 2; }
  int64_t panel_bytes() const { return k_tiles * k_tile_bytes(); }
  int64_t scale_block(int64_t k_tile) const { return (first_scale_tile + k_tile) / kScaleTiles; }
  int64_t scale_blocks() const { return scaled() ? scale_block(k_tiles - 1) + 1 : int8() ? 1 : 0; }
  int64_t bytes() const { return num_panels * (panel_bytes() + scale_blocks() * kPanelOutputs * 4); }
  // The scales of a panel's outputs for a block of inputs, of kInt8 for all inputs; after all panels.
  float* scales(int64_t panel, int64_t block) const {
    const int64_t at = panel * scale_blocks() + block;
    return reinterpret_cast<float*>(data + num_panels * panel_bytes()) + at * kPanelOutputs;
  }
  const uint8_t* at(int64_t panel, int64_t k_tile) const {
    return data + panel * panel_bytes() + k_tile * k_tile_bytes();
  }
};

// One output of a packed matrix: a row of a stored matrix, or nothing (padding).
struct OutputRow {
  const RawMatrix* matrix = nullptr;
  int64_t row = 0;
};

// The shape of a packed matrix of `out` outputs, data still null. `first_column`: RawMatrix::first_column.
PanelMatrix panel_matrix(int64_t out, int64_t in, PanelFormat format, int64_t first_column = 0);
// That of matrices stacked by rows.
PanelMatrix stacked_panels(std::span<const RawMatrix> stacked, OnlineQuantization quantization);
// The format of matrices stacked. All INT4 or all FP8, and cut alike between scales, they stay as they are stored;
// others are `dense`.
PanelFormat panel_format(std::span<const RawMatrix> stacked, PanelFormat dense);
// What matrices without a format of their own become.
inline PanelFormat dense_format(OnlineQuantization quantization) {
  return quantization == OnlineQuantization::kInt8PerChannel ? PanelFormat::kInt8 : PanelFormat::kBF16;
}

// Fills m.data (m.bytes() zeroed bytes); rows.size() = 32 * m.num_panels. Every row has m.in inputs, and is
// kInt4Group32 or kF8Block128 as m.format wants. For kBF16 F16 and F32 elements are rounded to bf16, for kInt8 all
// elements to whole parts of the row's largest magnitude / 127; a row with an infinity or NaN gives NaN.
void pack_panels(ThreadPool& pool, const PanelMatrix& m, std::span<const OutputRow> rows);

// Rows of the matrices one after another.
std::vector<OutputRow> stacked_rows(std::span<const RawMatrix> stacked);

// Packs activations for `w`: rows `ids` of x (null: rows 0 ...) into row tiles of w.k_tiles each; `first` is a multiple
// of 16. Row tile i of the destination begins at a + i * 16 * 32 * w.k_tiles. Inputs around x.cols are zero.
void pack_row_tile(const PanelMatrix& w, const Tensor& x, const int32_t* ids, int64_t first, int64_t rows, uint16_t* a);
// The same of f32 rows 0 ... as two terms: high + low is x to 16 bits.
void pack_row_tile_terms(const PanelKernels& kernels, const PanelMatrix& w, const Tensor& x, int64_t first,
                         uint16_t* high, uint16_t* low);

inline int64_t ceil_div(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

}  // namespace perigee::cpu

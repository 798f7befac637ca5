// Matrix kernels, one set per instruction set, over one packed layout.
//
// Weights: a panel is 32 outputs. A bf16 panel holds, for each k tile (32 inputs), 16 rows of 128 bytes; row p has, for
// each output, the pair (input 2p, input 2p + 1). Lines of outputs 0-15 and 16-31 alternate: few rows of activations
// read a panel from its first byte to its last, and each half is a B tile of TDPBF16PS with rows 128 bytes apart.
// An INT4 panel holds 576 bytes a k tile: 32 bf16 scales, then four sets (8 inputs) of a 32-bit word an output. The low
// half of a word has the even inputs of the set, four bits each, the high half the odd ones.
// An INT8 panel holds the elements of a bf16 panel in the same order, a signed byte each: whole numbers, to whose sums
// the caller applies a scale an output (add_scaled).
//
// Activations: a row tile is 16 rows (the last one fewer, m). For each k tile it holds m rows of 32 bf16. Those that
// meet INT4 weights are what PanelKernels::fix makes of them: whole parts of a power of two (ADR 0028).
//
// An output is one chain of additions in ascending k, whatever the number of rows, so it does not depend on the rows
// that it is computed with. Two terms of the activations are one of f32 (AVX2), or have a chain each, joined every
// kExpandedTiles k tiles (others). The order inside a k tile is the instruction set's own. INT4 weights are exact: the
// sum of a k tile over whole numbers, exact itself, is multiplied by the scale (ADR 0017).
//
// This header is included by files compiled for one instruction set: it must stay free of inline functions.
#pragma once

#include <cstdint>

namespace perigee::cpu {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileOutputs = 16;
inline constexpr int64_t kTileK = 32;
inline constexpr int64_t kPanelOutputs = 32;
inline constexpr int64_t kPanelTileElements = kPanelOutputs * kTileK;  // bf16 elements of one k tile of a panel
inline constexpr int64_t kInt4TileBytes = 576;
inline constexpr int64_t kInt8TileBytes = kPanelTileElements;
inline constexpr int64_t kExpandedTiles = 16;  // k tiles of a quantised job of more than rows_at_once rows, at most
inline constexpr int64_t kVectorRowsAmx = 6;   // with AMX so many rows meet INT4 weights without tiles, which is faster
inline constexpr int64_t kAccumulators = kTileRows * kTileOutputs;  // f32 of one C tile

// Where the f32 sums of a panel are, in elements: output 16h + j of row 16t + r is at c[t * tile + h * half + r * row +
// j].
struct PanelSums {
  float* c = nullptr;
  int64_t row = kTileOutputs, half = kAccumulators, tile = 2 * kAccumulators;
};

// Of a row's k tile that meets INT4 weights: what its whole numbers are to be multiplied by, and their sum.
struct FixedGroup {
  float step = 0;
  int32_t sum = 0;
};

enum class TileFormat : uint8_t { kBF16, kInt8, kInt4 };  // of the k tiles of a panel

// out[rows, 32] = in[rows, 32] + A[rows, k tiles] * panel.
struct PanelJob {
  const uint16_t* a = nullptr;            // row tile 0
  const uint16_t* a_low = nullptr;        // a second term of each element, in the same places; null: none
  const FixedGroup* fixed = nullptr;      // of each 32 elements of `a`; null unless b is INT4
  int64_t a_stride = 0;                   // elements from one row tile to the next: 16 * padded k
  int64_t k_begin = 0;                    // first k tile within a row tile
  int64_t k_tiles = 0;                    // how many
  int64_t rows = 0;                       // > 0
  const uint8_t* b = nullptr;             // the panel at k tile k_begin
  TileFormat stored = TileFormat::kBF16;  // of b
  uint16_t* tiles = nullptr;              // unless b is bf16: kExpandedTiles bf16 tiles, working memory
  PanelSums in;                           // what is added to; c null: zero
  PanelSums out;                          // may be the same place
  const uint8_t* next = nullptr;          // what is read next, k_tiles bf16 tiles: a hint, may be null
};

struct PanelKernels {
  int64_t rows_at_once;  // jobs of so many rows pass a panel once, and may have any number of k tiles
  // multiply() takes two terms of so many rows, unless times INT4; else they are two jobs, whose sums are added after
  // each kExpandedTiles k tiles.
  int64_t rows_of_terms;
  void (*multiply)(const PanelJob& job);
  // Rounds groups of 32 bf16 in place to whole parts of a step, the power of two with which the group's largest
  // magnitude takes 15 bits, at least 2^-114: magnitudes of at least 1/128 of the largest one stay exact, smaller ones
  // are rounded. With a magnitude of 2^120 or more, an infinity or NaN the step is NaN. What is left are whole numbers
  // of 16 bits, in an order of bytes of the instruction set's own; with AMX, for jobs of more than kVectorRowsAmx rows,
  // bf16. Requires: `rows` is PanelJob::rows of every job that reads these groups.
  void (*fix)(uint16_t* a, int64_t groups, int64_t rows, FixedGroup* fixed);
  // out[r][0..cols) = bf16 of row r of a C tile, to nearest even, NaN stays NaN; rows of out are out_stride apart.
  void (*tile_to_bf16)(const float* c, int64_t rows, int64_t cols, uint16_t* out, int64_t out_stride);
  // Two terms of x[32]: high = bf16(x), low = bf16(x - high).
  void (*split)(const float* x, uint16_t* high, uint16_t* low);
  // out[rows, 32] = in[rows, 32] + part[rows, 32] * scale[32]; in.c null: zero. `part` as PanelSums lays out by
  // default.
  void (*add_scaled)(const float* part, const float* scale, int64_t rows, const PanelSums& in, const PanelSums& out);
  void (*to_f32)(const uint16_t* in, float* out, int64_t n);
  // out[r][0..16) = bf16(silu(gate[r][j]) * up[r][j]) for C tiles gate and up; rows of out are out_stride apart.
  void (*silu_mul_tile)(const float* gate, const float* up, int64_t rows, uint16_t* out, int64_t out_stride);
  // out[i] = sum over j = 0 ... count - 1, in this order, of weights[j] * y[j * stride + i]; i < n.
  void (*weighted_sum)(const float* y, int64_t stride, const float* weights, int64_t count, float* out, int64_t n);
  // out[i] = dot(x[n], w[i][n]), i < num_rows, each in one fixed order.
  void (*dots)(const float* x, const float* w, int64_t n, int64_t num_rows, float* out);
};

// The set of each instruction set; enter only after detect_isa() named it.
extern const PanelKernels kPanelKernelsAvx2;
extern const PanelKernels kPanelKernelsAvx512;
extern const PanelKernels kPanelKernelsAmx;  // AMX tiles; elementwise work as in AVX-512

}  // namespace perigee::cpu

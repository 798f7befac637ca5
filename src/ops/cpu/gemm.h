// y = W x over packed panels: blocking for the caches, and the split over threads.
#pragma once

#include "ops/cpu/context.h"
#include "ops/cpu/panels.h"

namespace perigee::cpu {

const PanelKernels& panel_kernels(Isa isa);

// Rows of activations in row tiles (pack_row_tile), borrowed.
struct PackedRows {
  const uint16_t* a = nullptr;
  int64_t rows = 0;
  const uint16_t* low = nullptr;  // the second term of each activation; null: there is one only
  // Of `a` and of `low` as PanelJob::fixed says; for INT4 weights.
  const FixedGroup *fixed = nullptr, *low_fixed = nullptr;
};

inline constexpr int64_t kMaxBlockRows = 256;                      // rows whose accumulators are kept at once
inline constexpr int64_t kBlockPanels = 16;                        // panels of one task
inline constexpr int64_t kPanelC = kMaxBlockRows * kPanelOutputs;  // f32 accumulators of one panel

// Working memory of one thread of a multiplication.
struct PanelScratch {
  float* c = nullptr;         // [kBlockPanels][kPanelC]
  uint16_t* tiles = nullptr;  // [kExpandedTiles * kPanelTileElements]
  float* part = nullptr;      // [kPanelC]: sums under one scale
  float* low = nullptr;       // [kPanelC]: sums of a second term
};
std::span<PanelScratch> panel_scratches(const CpuContext& cpu);  // one a thread, from cpu.scratch

struct KRange {
  int64_t begin = 0, end = 0;  // k tiles
};

// rows * panel over the k tiles of `range`, added to `sums` unless it begins at 0, and left in `sums`, or in `out`
// (which may be the same place) once the last k tile is in. rows <= kMaxBlockRows. With `fetch_next` the panel after
// this one is brought near meanwhile.
struct PanelCall {
  const PanelMatrix& w;
  int64_t panel = 0;
  PackedRows rows;
  KRange range;
  const PanelScratch& scratch;  // its tiles and part
  PanelSums sums, out;
  bool fetch_next = false;
};
void multiply_panel(const PanelKernels& kernels, const PanelCall& call);

// x [n, in] bf16, or f32 multiplied as two terms -> arena tensor [n, out] of dtype `out` (f32 or bf16).
Tensor linear(const CpuContext& cpu, const Tensor& x, const PanelMatrix& w, DType out);

}  // namespace perigee::cpu

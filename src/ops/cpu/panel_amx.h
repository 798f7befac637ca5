// What the files of the AMX set share. See panel_kernels.h.
#pragma once

#include <cstdint>

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {

// Tiles 0-1: activations, 2-3: weights, 4-7: accumulators (row tile, output tile); _tile_release() ends it. Row tiles
// have rows0 and rows1 rows; rows1 may be 0, then tiles 1, 6 and 7 are not to be used.
void configure_tiles_amx(int64_t rows0, int64_t rows1);

inline constexpr int64_t kLine = 32;        // bf16 of one cache line, a tile row
inline constexpr int64_t kWeightRow = 128;  // bytes from one row of a B tile to the next

namespace {

// Keeps stores before tile loads that read them: GCC 12's do not say that they read memory.
inline void before_tile_loads() {
  asm volatile("" : : : "memory");
}

}  // namespace

// A job of INT4 weights, whose inputs fix_amx made.
void multiply_int4_amx(const PanelJob& job);
void fix_amx(uint16_t* a, int64_t groups, int64_t rows, FixedGroup* fixed);

}  // namespace perigee::cpu

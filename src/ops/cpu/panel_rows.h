// How a job of any number of rows passes through bodies for one row, two rows, and so on. Included only by files
// compiled for one instruction set, each of which compiles its own copy.
#pragma once

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

// `a`: the first of the body's rows in its row tile of `m`; `row`: that row among all of the job.
using RowsBody = void (*)(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row);

// Body i is of i + 1 rows. A body stays inside a row tile.
template <int64_t kRowsAtOnce>
void multiply_by(const RowsBody (&bodies)[kRowsAtOnce], const PanelJob& job) {
  for (int64_t row = 0; row < job.rows;) {
    const int64_t tile = row / kTileRows, in_tile = row % kTileRows;
    const int64_t m = job.rows - tile * kTileRows < kTileRows ? job.rows - tile * kTileRows : kTileRows;
    const int64_t rows = m - in_tile < kRowsAtOnce ? m - in_tile : kRowsAtOnce;
    const uint16_t* a = job.a + tile * job.a_stride + (job.k_begin * m + in_tile) * kTileK;
    bodies[rows - 1](job, a, m, row);
    row += rows;
  }
}

}  // namespace
}  // namespace perigee::cpu

// How a job of any number of rows, of weights of any format, passes through bodies for one row, two rows, and so on.
// Included only by files compiled for one instruction set, each of which compiles its own copy.
#pragma once

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t tile_bytes(TileFormat format) {
  switch (format) {
    case TileFormat::kBF16: break;
    case TileFormat::kInt8: return kInt8TileBytes;
    case TileFormat::kInt4: return kInt4TileBytes;
  }
  return kPanelTileElements * 2;
}

constexpr int kNearest = 3, kSecondLevel = 2;  // caches, as __builtin_prefetch counts them

// What of the stretch at job.next some rows ask for in their passes over this one, some lines with each k tile: all
// rows together ask for all of it. The processor itself asks for nothing while rows pass what is near.
template <int kNear>
class Ahead {
 public:
  Ahead() = default;
  Ahead(const PanelJob& job, int64_t row, int64_t rows, int64_t passes) {
    if (job.next == nullptr) return;
    const int64_t lines = job.k_tiles * tile_bytes(job.stored) / 64;
    at_ = job.next + lines * row / job.rows * 64;
    end_ = job.next + lines * (row + rows) / job.rows * 64;
    of_tile_ = ((end_ - at_) / 64 + passes * job.k_tiles - 1) / (passes * job.k_tiles) * 64;
  }
  void fetch() {
    for (const uint8_t* stop = end_ - at_ < of_tile_ ? end_ : at_ + of_tile_; at_ < stop; at_ += 64)
      __builtin_prefetch(at_, 0, kNear);
  }

 private:
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int64_t of_tile_ = 0;
};

// `a`: the first of the body's rows in its row tile of `m`; `row`: that row among all of the job.
using RowsBody = void (*)(const PanelJob& job, const uint16_t* a, int64_t m, int64_t row);

// Body i is of i + 1 rows. A body stays inside a row tile.
template <int64_t kRowsAtOnce>
void multiply_by(const RowsBody (&bodies)[kRowsAtOnce], const PanelJob& job) {
  for (int64_t row = 0; row < job.rows;) {
    const int64_t tile = row / kTileRows, in_tile = row % kTileRows;
    const int64_t m = job.rows - tile * kTileRows < kTileRows ? job.rows - tile * kTileRows : kTileRows;
    const int64_t left = m - in_tile, passes = (left + kRowsAtOnce - 1) / kRowsAtOnce;
    const int64_t rows = (left + passes - 1) / passes;  // of about the same length
    const uint16_t* a = job.a + tile * job.a_stride + (job.k_begin * m + in_tile) * kTileK;
    bodies[rows - 1](job, a, m, row);
    row += rows;
  }
}

// Bodies for weights of bf16 and INT8, and what turns the whole numbers of an INT8 job into bf16 in job.tiles.
template <int64_t kRowsAtOnce>
struct RowsBodies {
  const RowsBody (&bf16)[kRowsAtOnce];
  const RowsBody (&int8)[kRowsAtOnce];
  void (*expand_int8)(const PanelJob& job);
};

// More than share_from rows share one expansion; an expanded INT8 job is one of bf16.
template <int64_t kRowsAtOnce>
void multiply_by(const RowsBodies<kRowsAtOnce>& bodies, const PanelJob& job, int64_t share_from) {
  if (job.stored == TileFormat::kBF16) return multiply_by(bodies.bf16, job);
  if (job.rows <= share_from) return multiply_by(bodies.int8, job);
  bodies.expand_int8(job);
  PanelJob of_bf16 = job;
  of_bf16.b = reinterpret_cast<const uint8_t*>(job.tiles);
  multiply_by(bodies.bf16, of_bf16);
}

}  // namespace
}  // namespace perigee::cpu

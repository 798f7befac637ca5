#include "ops/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace perigee::cpu {
namespace {

// k tiles of a row block (256 x 2048 bf16, 1 MB) that stay in the second-level cache while the panels pass.
constexpr int64_t kOuterTiles = 64;
constexpr int64_t kFewRows = 2 * kTileRows;  // need no such blocks: all their k tiles stay there anyway

struct Task {
  int64_t first_row = 0, rows = 0;
  int64_t first_panel = 0, num_panels = 0;
};

// Blocks of rows, then groups of panels: neighbours share their rows.
struct TaskGrid {
  TaskGrid(int64_t rows, int64_t panels, int num_threads) : rows_(rows), panels_(panels) {
    const int64_t row_blocks = ceil_div(rows, kMaxBlockRows);
    // Four tasks a thread if there is so much, so that threads end together. Few rows are split by panels.
    const int64_t groups_wanted = ceil_div(4 * num_threads, row_blocks);
    group_ = rows <= kFewRows ? 1 : std::clamp<int64_t>(panels / groups_wanted, 1, kBlockPanels);
    groups_ = ceil_div(panels, group_);
    num_tasks_ = row_blocks * groups_;
  }
  int64_t num_tasks() const { return num_tasks_; }
  // Of the block that a row is in.
  int64_t block_rows(int64_t row) const { return std::min(kMaxBlockRows, rows_ - row / kMaxBlockRows * kMaxBlockRows); }
  Task task(int64_t i) const {
    const int64_t row = i / groups_ * kMaxBlockRows, panel = i % groups_ * group_;
    return {.first_row = row,
            .rows = block_rows(row),
            .first_panel = panel,
            .num_panels = std::min(group_, panels_ - panel)};
  }

 private:
  int64_t rows_, panels_, group_ = 1, groups_ = 1, num_tasks_ = 0;
};

// One C tile to the output, whose columns end at out.cols.
void store_tile(const PanelKernels& kernels, const float* c, int64_t first_row, int64_t rows, int64_t column,
                const Tensor& out) {
  const int64_t columns = std::min(kTileOutputs, out.cols - column);
  if (columns <= 0) return;
  if (out.dtype == DType::kBF16) {
    kernels.tile_to_bf16(c, rows, columns, out.row<uint16_t>(first_row) + column, out.row_stride);
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(out.row<float>(first_row + r) + column, c + r * kTileOutputs, static_cast<size_t>(columns) * 4);
}

void store_panel(const PanelKernels& kernels, const float* c, const Task& task, int64_t panel, const Tensor& out) {
  for (int64_t row = 0; row < task.rows; row += kTileRows, c += 2 * kAccumulators) {
    const int64_t rows = std::min(kTileRows, task.rows - row);
    const int64_t column = panel * kPanelOutputs;
    store_tile(kernels, c, task.first_row + row, rows, column, out);
    store_tile(kernels, c + kAccumulators, task.first_row + row, rows, column + kTileOutputs, out);
  }
}

void run_task(const PanelKernels& kernels, const PanelMatrix& w, const PackedRows& x, const Task& task,
              const PanelScratch& scratch, const Tensor& out) {
  const int64_t begins = task.first_row * w.k_tiles * kTileK;
  const auto from = [](const auto* all, int64_t at) { return all == nullptr ? nullptr : all + at; };
  const PackedRows rows{.a = x.a + begins,
                        .rows = task.rows,
                        .low = from(x.low, begins),
                        .fixed = from(x.fixed, begins / kTileK),
                        .low_fixed = from(x.low_fixed, begins / kTileK)};
  const int64_t outer = task.rows <= kFewRows ? w.k_tiles : kOuterTiles;
  for (int64_t begin = 0, end = 0; begin < w.k_tiles; begin = end) {
    end = begin + outer;  // not inside a block of scales
    if (end < w.k_tiles) end -= (w.first_scale_tile + end) % kScaleTiles;
    const KRange range{.begin = begin, .end = std::min(end, w.k_tiles)};
    for (int64_t p = 0; p < task.num_panels; ++p) {
      const int64_t panel = task.first_panel + p;
      // Whole f32 panels end where they belong, others by way of the scratch.
      const bool direct = out.dtype == DType::kF32 && (panel + 1) * kPanelOutputs <= out.cols;
      const PanelSums sums{.c = scratch.c + p * kPanelC};
      PanelSums place = sums;
      if (direct) {
        place = {.c = out.row<float>(task.first_row) + panel * kPanelOutputs,
                 .row = out.row_stride,
                 .half = kTileOutputs,
                 .tile = kTileRows * out.row_stride};
      }
      multiply_panel(kernels, {.w = w,
                               .panel = panel,
                               .rows = rows,
                               .range = range,
                               .scratch = scratch,
                               .sums = sums,
                               .out = place,
                               .fetch_next = panel + 1 < w.num_panels});
      if (!direct && range.end == w.k_tiles) store_panel(kernels, sums.c, task, panel, out);
    }
  }
}

}  // namespace

const PanelKernels& panel_kernels(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return kPanelKernelsAmx;
    case Isa::kAvx512: return kPanelKernelsAvx512;
    case Isa::kAvx2: break;
  }
  return kPanelKernelsAvx2;
}

std::span<PanelScratch> panel_scratches(const CpuContext& cpu) {
  const std::span<PanelScratch> all = cpu.scratch.array<PanelScratch>(cpu.pool.size());
  for (PanelScratch& one : all) {
    one = {.c = cpu.scratch.array<float>(kBlockPanels * kPanelC).data(),
           .tiles = cpu.scratch.array<uint16_t>(kExpandedTiles * kPanelTileElements).data(),
           .part = cpu.scratch.array<float>(kPanelC).data(),
           .low = cpu.scratch.array<float>(kPanelC).data()};
  }
  return all;
}

namespace {

bool takes_terms(const PanelKernels& kernels, const PanelCall& call) {
  return !call.w.int4() && call.rows.rows <= kernels.rows_of_terms;
}

// One stretch of k tiles. Where its terms are two jobs, both follow each other while the stretch is in the first-level
// cache.
void multiply_stretch(const PanelKernels& kernels, const PanelCall& call, PanelJob job) {
  static constexpr std::array<float, kPanelOutputs> kOnes = [] {
    std::array<float, kPanelOutputs> ones{};
    ones.fill(1.0f);
    return ones;
  }();
  const PackedRows& rows = call.rows;
  const bool two_jobs = rows.low != nullptr && !takes_terms(kernels, call);
  job.a = rows.a;
  job.a_low = two_jobs ? nullptr : rows.low;
  job.fixed = rows.fixed;
  kernels.multiply(job);
  if (!two_jobs) return;
  const PanelSums out = job.out;
  job.a = rows.low;
  job.fixed = rows.low_fixed;
  job.in = {};
  job.out = {.c = call.scratch.low};
  job.next = nullptr;
  kernels.multiply(job);
  kernels.add_scaled(call.scratch.low, kOnes.data(), rows.rows, out, out);
}

}  // namespace

void multiply_panel(const PanelKernels& kernels, const PanelCall& call) {
  const PanelMatrix& w = call.w;
  const KRange range = call.range;
  // Few rows pass a panel once: nothing to keep in the first-level cache.
  const bool once = call.rows.rows <= kernels.rows_at_once && (call.rows.low == nullptr || takes_terms(kernels, call));
  const int64_t step = once ? range.end - range.begin : kExpandedTiles;
  PanelJob job{.a_stride = kTileRows * w.k_tiles * kTileK,
               .rows = call.rows.rows,
               .stored = w.tiles(),
               .tiles = call.scratch.tiles};
  for (int64_t k = range.begin; k < range.end; k += job.k_tiles) {
    job.k_begin = k;
    job.k_tiles = std::min(w.scaled() ? kScaleTiles - (w.first_scale_tile + k) % kScaleTiles : step, range.end - k);
    const PanelSums in = k > 0 ? call.sums : PanelSums{};
    const bool last = k + job.k_tiles == w.k_tiles;
    const PanelSums out = last && !w.int8() ? call.out : call.sums;
    job.in = w.scaled() ? PanelSums{} : in;
    job.out = w.scaled() ? PanelSums{.c = call.scratch.part} : out;
    job.b = w.at(call.panel, k);
    job.next = call.fetch_next && job.stored == TileFormat::kBF16 ? w.at(call.panel + 1, k) : nullptr;
    multiply_stretch(kernels, call, job);
    if (w.scaled())
      kernels.add_scaled(call.scratch.part, w.scales(call.panel, w.scale_block(k)), call.rows.rows, in, out);
    if (w.int8() && last) kernels.add_scaled(call.sums.c, w.scales(call.panel, 0), call.rows.rows, {}, call.out);
  }
}

Tensor linear(const CpuContext& cpu, const Tensor& x, const PanelMatrix& w, DType out_type) {
  const bool terms = x.dtype == DType::kF32;
  CHECK((terms || x.dtype == DType::kBF16) && x.cols == w.in, "linear of ", dtype_name(x.dtype), " [", x.rows, ", ",
        x.cols, "] with ", w.in, " inputs");
  CHECK(out_type == DType::kF32 || out_type == DType::kBF16, "linear to ", dtype_name(out_type));
  const Tensor out = cpu.arena.tensor(out_type, x.rows, w.out);
  if (x.rows == 0) return out;
  cpu.scratch.reset();
  const int64_t row_tiles = ceil_div(x.rows, kTileRows);
  const int64_t elements = row_tiles * kTileRows * w.k_tiles * kTileK;
  uint16_t* a = cpu.scratch.array<uint16_t>(terms ? 2 * elements : elements).data();
  const PanelKernels& kernels = panel_kernels(cpu.isa);
  const bool fix = w.int4();
  const int64_t groups = fix ? elements / kTileK : 0;
  FixedGroup* fixed = cpu.scratch.array<FixedGroup>(terms ? 2 * groups : groups).data();
  const PackedRows rows{.a = a,
                        .rows = x.rows,
                        .low = terms ? a + elements : nullptr,
                        .fixed = fix ? fixed : nullptr,
                        .low_fixed = fix && terms ? fixed + groups : nullptr};
  const std::span<PanelScratch> scratches = panel_scratches(cpu);
  const TaskGrid grid(x.rows, w.num_panels, cpu.pool.size());
  cpu.pool.run(row_tiles, [&](int64_t tile, int) {
    if (terms) {
      pack_row_tile_terms(kernels, w, x, tile * kTileRows, a, a + elements);
    } else {
      pack_row_tile(w, x, nullptr, tile * kTileRows, x.rows, a);
    }
    if (!fix) return;
    const int64_t row = tile * kTileRows, first = row * w.k_tiles;
    const int64_t count = std::min(kTileRows, x.rows - row) * w.k_tiles;
    kernels.fix(a + first * kTileK, count, grid.block_rows(row), fixed + first);
    if (terms) kernels.fix(a + elements + first * kTileK, count, grid.block_rows(row), fixed + groups + first);
  });
  cpu.pool.run(grid.num_tasks(), [&](int64_t i, int thread) {
    run_task(kernels, w, rows, grid.task(i), scratches[static_cast<size_t>(thread)], out);
  });
  return out;
}

}  // namespace perigee::cpu

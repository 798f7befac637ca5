#include "ops/cpu/experts.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ops/cpu/gemm.h"

namespace perigee::cpu {
namespace {

// Rows of one expert that are computed together.
struct Group {
  int32_t expert = 0;
  int64_t first = 0;       // into Step::outputs
  int64_t rows = 0;        // <= kMaxBlockRows
  int64_t first_tile = 0;  // row tiles before it in the packed activations
};

// What one call works on, all in the scratch arena.
struct Step {
  const PackedExperts& experts;
  const PanelKernels& kernels;
  std::span<Group> groups = {};
  // Each choice of an expert that is here: by expert, tokens ascending within one.
  std::span<int32_t> outputs = {};  // its row of y
  std::span<int32_t> tokens = {};
  int64_t num_tiles = 0;
  uint16_t* x = nullptr;  // packed rows of all groups, [num_tiles * 16, hidden padded]
  uint16_t* h = nullptr;  // silu(gate) * up, packed likewise, [num_tiles * 16, inter padded]
  FixedGroup *x_fixed = nullptr, *h_fixed = nullptr;  // of x and h, for INT4 weights
  // Of token t from t * k on, in the order of k: what its experts here give, and their weights.
  float* y = nullptr;  // [n * k, hidden]
  std::span<float> weights = {};
  std::span<int32_t> counts = {};  // [n]
  std::span<PanelScratch> scratches = {};
};

// The format that all matrices of all experts have in common.
PanelFormat format_of(std::span<const RawExpert> experts, PanelFormat dense) {
  std::vector<RawMatrix> up, down;
  for (const RawExpert& e : experts) {
    up.insert(up.end(), {e.gate, e.up});
    down.push_back(e.down);
  }
  const PanelFormat format = panel_format(up, dense);
  return panel_format(down, dense) == format ? format : dense;
}

// Outputs become the inputs of `down` panel by panel, so they begin where those do.
std::vector<OutputRow> gate_up_rows(const RawExpert& expert, const PanelMatrix& gate_up, const PanelMatrix& down) {
  std::vector<OutputRow> rows(static_cast<size_t>(gate_up.num_panels * kPanelOutputs));
  for (int64_t r = 0; r < expert.gate.out; ++r) {
    const int64_t output = down.front + r;
    const int64_t at = output / kPanelOutputs * 2 * kPanelOutputs + output % kPanelOutputs;
    rows[static_cast<size_t>(at)] = {&expert.gate, r};
    rows[static_cast<size_t>(at + kPanelOutputs)] = {&expert.up, r};
  }
  return rows;
}

// Stable counting sort of the choices by expert; also cuts experts into groups.
void group_choices(const CpuContext& cpu, const Routing& routing, Step& step) {
  const int64_t num_choices = routing.num_tokens * routing.top_k;
  const int64_t num_experts = step.experts.num_experts;
  const std::span<int64_t> end = cpu.scratch.array<int64_t>(num_experts + 1);
  std::fill(end.begin(), end.end(), 0);
  for (int64_t c = 0; c < num_choices; ++c) {
    CHECK(routing.ids[c] < num_experts, "expert ", routing.ids[c], " of ", num_experts);
    if (routing.ids[c] >= 0) ++end[static_cast<size_t>(routing.ids[c]) + 1];
  }
  int64_t num_groups = 0;
  step.groups = cpu.scratch.array<Group>(num_experts + num_choices / kMaxBlockRows);
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = end[static_cast<size_t>(e) + 1];
    end[static_cast<size_t>(e) + 1] += end[static_cast<size_t>(e)];
    for (int64_t at = 0; at < count; at += kMaxBlockRows) {
      Group& group = step.groups[static_cast<size_t>(num_groups++)];
      group = {.expert = static_cast<int32_t>(e),
               .first = end[static_cast<size_t>(e)] + at,
               .rows = std::min(kMaxBlockRows, count - at),
               .first_tile = step.num_tiles};
      step.num_tiles += ceil_div(group.rows, kTileRows);
    }
  }
  step.groups = step.groups.first(static_cast<size_t>(num_groups));
  step.outputs = cpu.scratch.array<int32_t>(num_choices);
  step.tokens = cpu.scratch.array<int32_t>(num_choices);
  step.weights = cpu.scratch.array<float>(num_choices);
  step.counts = cpu.scratch.array<int32_t>(routing.num_tokens);
  for (int64_t token = 0; token < routing.num_tokens; ++token) {
    const int64_t first = token * routing.top_k;
    int32_t count = 0;
    for (int64_t c = first; c < first + routing.top_k; ++c) {
      if (routing.ids[c] < 0) continue;
      const auto at = static_cast<size_t>(end[static_cast<size_t>(routing.ids[c])]++);
      step.outputs[at] = static_cast<int32_t>(first + count);
      step.tokens[at] = static_cast<int32_t>(token);
      step.weights[static_cast<size_t>(first + count++)] = routing.weights[c];
    }
    step.counts[static_cast<size_t>(token)] = count;
  }
}

// Calls f(group, panel, thread) for every panel of every group.
template <typename F>
void for_panels(ThreadPool& pool, std::span<const Group> groups, int64_t num_panels, F&& f) {
  pool.run(std::ssize(groups) * num_panels, [&](int64_t task, int thread) {
    f(groups[static_cast<size_t>(task / num_panels)], task % num_panels, thread);
  });
}

// A group's of all packed rows.
PackedRows packed_rows(const Group& group, const PanelMatrix& w, const uint16_t* a, const FixedGroup* fixed) {
  const int64_t groups = group.first_tile * kTileRows * w.k_tiles;
  return {.a = a + groups * kTileK, .rows = group.rows, .fixed = fixed == nullptr ? nullptr : fixed + groups};
}

// Panel p of gate and of up, joined: k tile p of the packed rows of `h`.
void gate_up_panel(const Step& step, const Group& group, int64_t panel, const PanelScratch& scratch) {
  const PanelMatrix w = step.experts.gate_up_of(group.expert);
  const PackedRows rows = packed_rows(group, w, step.x, step.x_fixed);
  const KRange whole{.begin = 0, .end = w.k_tiles};
  float* gate = scratch.c;
  float* up = scratch.c + kPanelC;
  for (const auto& [c, at] : {std::pair{gate, 2 * panel}, {up, 2 * panel + 1}}) {
    multiply_panel(step.kernels, {.w = w,
                                  .panel = at,
                                  .rows = rows,
                                  .range = whole,
                                  .scratch = scratch,
                                  .sums = {.c = c},
                                  .out = {.c = c},
                                  .fetch_next = at + 1 < w.num_panels});
  }
  const int64_t tile_elements = kTileRows * step.experts.down.k_tiles * kTileK;
  for (int64_t row = 0; row < group.rows; row += kTileRows, gate += 2 * kAccumulators, up += 2 * kAccumulators) {
    const int64_t m = std::min(kTileRows, group.rows - row);
    const int64_t at = (group.first_tile + row / kTileRows) * tile_elements + panel * m * kTileK;
    uint16_t* out = step.h + at;
    step.kernels.silu_mul_tile(gate, up, m, out, kTileK);
    step.kernels.silu_mul_tile(gate + kAccumulators, up + kAccumulators, m, out + kTileOutputs, kTileK);
    if (step.h_fixed != nullptr) step.kernels.fix(out, m, group.rows, step.h_fixed + at / kTileK);
  }
}

void down_panel(const Step& step, const Group& group, int64_t panel, const PanelScratch& scratch) {
  const PanelMatrix w = step.experts.down_of(group.expert);
  const PackedRows rows = packed_rows(group, w, step.h, step.h_fixed);
  multiply_panel(step.kernels, {.w = w,
                                .panel = panel,
                                .rows = rows,
                                .range = {.begin = 0, .end = w.k_tiles},
                                .scratch = scratch,
                                .sums = {.c = scratch.c},
                                .out = {.c = scratch.c},
                                .fetch_next = panel + 1 < w.num_panels});
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanelOutputs + half * kTileOutputs;
    const int64_t columns = std::min(kTileOutputs, w.out - column);
    if (columns <= 0) return;
    for (int64_t r = 0; r < group.rows; ++r) {
      const float* c = scratch.c + (r / kTileRows * 2 + half) * kAccumulators + r % kTileRows * kTileOutputs;
      float* y = step.y + step.outputs[static_cast<size_t>(group.first + r)] * w.out + column;
      std::memcpy(y, c, static_cast<size_t>(columns) * sizeof(float));
    }
  }
}

// out = sum of weight_k * y_k in the order of k.
void sum_token(const Step& step, int64_t token, int32_t top_k, float* out) {
  const int64_t hidden = step.experts.hidden, first = token * top_k;
  step.kernels.weighted_sum(step.y + first * hidden, hidden, step.weights.data() + first,
                            step.counts[static_cast<size_t>(token)], out, hidden);
}

}  // namespace

PanelMatrix PackedExperts::gate_up_of(int64_t expert) const {
  PanelMatrix m = gate_up;
  m.data += expert * gate_up_stride;
  return m;
}

PanelMatrix PackedExperts::down_of(int64_t expert) const {
  PanelMatrix m = down;
  m.data += expert * down_stride;
  return m;
}

PackedExperts expert_panels(std::span<const RawExpert> experts, OnlineQuantization quantization) {
  CHECK(!experts.empty(), "no experts");
  const RawExpert& first = experts.front();
  const PanelFormat format = format_of(experts, dense_format(quantization));
  PackedExperts out;
  out.num_experts = static_cast<int64_t>(experts.size());
  out.hidden = first.gate.in;
  out.inter = first.gate.out;
  out.down = panel_matrix(out.hidden, out.inter, format, first.down.first_column);
  out.gate_up = panel_matrix(out.down.k_tiles * 2 * kPanelOutputs, out.hidden, format, first.gate.first_column);
  out.gate_up_stride = out.gate_up.bytes();
  out.down_stride = out.down.bytes();
  return out;
}

ExpertWeights pack_experts(ThreadPool& pool, std::span<const RawExpert> experts, OnlineQuantization quantization) {
  auto packed = std::make_shared<PackedExperts>(expert_panels(experts, quantization));
  packed->buffer = Buffer(static_cast<size_t>(packed->panel_bytes()));
  packed->gate_up.data = packed->buffer.data();
  packed->down.data = packed->buffer.data() + packed->num_experts * packed->gate_up_stride;
  for (int64_t e = 0; e < packed->num_experts; ++e) {
    const RawExpert& raw = experts[static_cast<size_t>(e)];
    const bool same = raw.gate.out == packed->inter && raw.gate.in == packed->hidden && raw.up.out == packed->inter &&
                      raw.up.in == packed->hidden && raw.down.out == packed->hidden && raw.down.in == packed->inter;
    CHECK(same, "expert ", e, " has other shapes than expert 0");
    pack_panels(pool, packed->gate_up_of(e), gate_up_rows(raw, packed->gate_up, packed->down));
    pack_panels(pool, packed->down_of(e), stacked_rows(std::span(&raw.down, 1)));
  }
  return {.num_experts = packed->num_experts, .hidden = packed->hidden, .inter = packed->inter, .packed = packed};
}

Tensor moe_experts(const CpuContext& cpu, const Tensor& x, const Routing& routing, const PackedExperts& experts) {
  CHECK(x.dtype == DType::kBF16 && x.cols == experts.hidden && x.rows == routing.num_tokens, "experts of ", x.rows,
        " rows of ", x.cols, ", routed ", routing.num_tokens);
  const Tensor out = cpu.arena.tensor(DType::kF32, x.rows, experts.hidden);
  cpu.scratch.reset();
  Step step{.experts = experts, .kernels = panel_kernels(cpu.isa)};
  group_choices(cpu, routing, step);
  const int64_t rows = step.num_tiles * kTileRows;
  step.x = cpu.scratch.array<uint16_t>(rows * experts.gate_up.k_tiles * kTileK).data();
  step.h = cpu.scratch.array<uint16_t>(rows * experts.down.k_tiles * kTileK).data();
  const bool fix = experts.gate_up.int4();
  if (fix) {
    step.x_fixed = cpu.scratch.array<FixedGroup>(rows * experts.gate_up.k_tiles).data();
    step.h_fixed = cpu.scratch.array<FixedGroup>(rows * experts.down.k_tiles).data();
  }
  step.y = cpu.scratch.array<float>(routing.num_tokens * routing.top_k * experts.hidden).data();
  step.scratches = panel_scratches(cpu);
  cpu.pool.run(static_cast<int64_t>(step.groups.size()), [&](int64_t i, int) {
    const Group& group = step.groups[static_cast<size_t>(i)];
    const int64_t first = group.first_tile * kTileRows * experts.gate_up.k_tiles;
    uint16_t* a = step.x + first * kTileK;
    for (int64_t row = 0; row < group.rows; row += kTileRows)
      pack_row_tile(experts.gate_up, x, step.tokens.data() + group.first, row, group.rows, a);
    if (fix) step.kernels.fix(a, group.rows * experts.gate_up.k_tiles, group.rows, step.x_fixed + first);
  });
  for_panels(cpu.pool, step.groups, experts.down.k_tiles, [&](const Group& group, int64_t panel, int thread) {
    gate_up_panel(step, group, panel, step.scratches[static_cast<size_t>(thread)]);
  });
  for_panels(cpu.pool, step.groups, experts.down.num_panels, [&](const Group& group, int64_t panel, int thread) {
    down_panel(step, group, panel, step.scratches[static_cast<size_t>(thread)]);
  });
  cpu.pool.run(x.rows, [&](int64_t token, int) { sum_token(step, token, routing.top_k, out.row<float>(token)); });
  return out;
}

}  // namespace perigee::cpu

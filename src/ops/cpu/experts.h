// Routed experts of the CPU backend: tokens gathered by expert, gate and up, silu, down, weighted sum.
#pragma once

#include "ops/cpu/context.h"
#include "ops/cpu/panels.h"

namespace perigee::cpu {

// All experts of a layer in one buffer. gate_up has panels 2p (outputs 32p ... of gate) and 2p + 1 (of up).
struct PackedExperts final : PackedWeight {
  int64_t num_experts = 0, hidden = 0, inter = 0;
  PanelMatrix gate_up, down;  // of expert 0; those of expert e are e * stride bytes further
  int64_t gate_up_stride = 0, down_stride = 0;
  Buffer buffer;

  int64_t panel_bytes() const { return num_experts * (gate_up_stride + down_stride); }
  int64_t bytes() const override { return static_cast<int64_t>(buffer.size()); }
  PanelMatrix gate_up_of(int64_t expert) const;
  PanelMatrix down_of(int64_t expert) const;
};

// Their shapes and places, without memory.
PackedExperts expert_panels(std::span<const RawExpert> experts, OnlineQuantization quantization);
// Where all matrices are INT4 they stay 4-bit, where all are FP8 they keep their scales; everything else becomes bf16,
// or INT8 by quantization.
ExpertWeights pack_experts(ThreadPool& pool, std::span<const RawExpert> experts,
                           OnlineQuantization quantization = OnlineQuantization::kNone);

// x [n, H] bf16 -> [n, H] f32: sum over k, ascending, of weight_k * down(bf16(silu(gate x) * (up x))). Negative
// ids are those of experts elsewhere. A token's result does not depend on the others.
Tensor moe_experts(const CpuContext& cpu, const Tensor& x, const Routing& routing, const PackedExperts& experts);

}  // namespace perigee::cpu

// Expert choice of the CPU backend (DeepSeek-V3 2024, section 2.1.2): every token by itself, in f32.
#pragma once

#include "ops/cpu/context.h"
#include "ops/weights.h"

namespace perigee::cpu {

// x [n, H] bf16 -> ids and weights [n, k] in the arena. Each score is one dot product in one fixed order.
Routing route(const CpuContext& cpu, const Tensor& x, const RouterWeight& router);

}  // namespace perigee::cpu

// Kimi Delta Attention of the CPU backend (Kimi Linear 2025, section 3), all in f32.
//
// Decode and verify rows run the recurrence itself, one pass over a head's state a token; a row's result, and the
// state it leaves, are the same bits whatever runs beside it, and whether a token's inputs come from the batch or are
// replayed from the ring. Prefill rows (commit_all) run the chunk form, cut at absolute multiples of 16 positions: on a
// processor longer chunks only mean more arithmetic.
// Only decays between a token and a later one are formed, as products of numbers <= 1: nothing overflows.
#pragma once

#include "ops/batch.h"
#include "ops/cpu/context.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

// As Ops::kda_attend, f32 throughout. Heads of 128, convolutions of 4 taps.
Tensor kda_attend(const CpuContext& cpu, const KdaInputs& in, const KdaWeights& w, const Batch& batch,
                  const StateLayer& state);

}  // namespace perigee::cpu

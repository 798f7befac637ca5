// PlanLimits: what a plan may hold. The scheduler keeps to it, and every rank reserves for it. Plain values.
#pragma once

#include <cstdint>

#include "control/place.h"

namespace perigee {

struct PlanLimits {
  int32_t max_sequences = 128;     // slots: sequences that run at once
  int32_t max_step_tokens = 2048;  // token budget of a step, prefill and decode together
  int32_t dcp_size = 1;            // how many pools the blocks of a sequence are dealt to
  int32_t num_drafts = 0;          // tokens that a decode row verifies after its own, at most (speculation)
  // Same bits whatever runs beside a sequence, cached or not: one form of attention everywhere, prefix hits, chunk and
  // resume points at fixed absolute multiples only, and blocks at the ranks that their numbers name (D10).
  bool deterministic = false;

  Dealing dealing() const { return deterministic ? Dealing::kInTurn : Dealing::kFewest; }
};

}  // namespace perigee

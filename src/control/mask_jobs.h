// MaskJob: what the masks of one constrained row are made of. The scheduler says what they must hold for
// (Scheduler::take_mask_jobs); whoever runs it makes them, on any threads, and sends them to the ranks (StepMasks).
//
// A row's masks follow from the ids before it, so they can be made only when every step before it has its result; by
// then its forward pass may have run.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "control/constraint.h"
#include "control/plan.h"

namespace perigee {

struct MaskJob {
  SequenceId sequence;
  SlotId slot;
  ConstraintState* state = nullptr;  // no other job has it
  DraftIds drafts;                   // that the row verifies
  int32_t ids_left = 0;
  std::span<const int32_t> stop_ids;  // that are not allowed, if anything else is, ...
  int32_t num_without_stop = 0;       // ... at the first so many places (min_tokens)

  size_t num_places() const { return 1 + drafts.size(); }
};

// Fills in the words of each place, one after the other. False: the constraint allows no id at all.
bool make_masks(const MaskJob& job, int64_t vocab, std::vector<uint32_t>& words);

}  // namespace perigee

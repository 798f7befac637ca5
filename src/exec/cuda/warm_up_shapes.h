// The steps that a worker warms up with, so that its memory has its final size before the first request.
//
// What an op takes grows with the step's rows, its prefills, the rows that attend in absorbed form, and with the
// context of a chunk that attends in expanded form. So some steps at the edge of what is possible take the most of all.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/batch.h"

namespace perigee {

struct StepLimits {
  int32_t sequences = 0;        // of a step
  int32_t tokens = 0;           // of a step, at least `sequences`
  int32_t sequence_tokens = 0;  // of one sequence, its context included
  bool recurrent = false;
};

// Decode rows come first, as in every plan. The last sequence has the longest context.
std::vector<std::vector<SequenceRows>> warm_up_shapes(const StepLimits& limits);

}  // namespace perigee

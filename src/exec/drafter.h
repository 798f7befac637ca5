// Drafter: makes the tokens that each sequence's next row verifies. Runs on the rank's thread after a step has sampled;
// the plan of the next row may be there already.
#pragma once

#include "control/plan.h"
#include "exec/slots.h"
#include "model/model.h"

namespace perigee {

// A step that has sampled. The slots have gone on to its end.
struct SampledStep {
  const StepPlan& plan;
  const Batch& batch;
  const ModelOutput& output;
  const StepResult& result;
  Ops& ops;  // whose step this still is
  const PagePool& pool;
  Slots& slots;
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual void start(const SequenceStart&) {}
  // Sets Slot::drafts of each row that has sampled.
  virtual void draft(const SampledStep& step) = 0;
};

}  // namespace perigee

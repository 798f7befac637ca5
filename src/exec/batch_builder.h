// BatchBuilder: turns a plan into the flat arrays that a model reads. Reuses its memory from step to step.
#pragma once

#include <vector>

#include "control/plan.h"
#include "exec/slots.h"
#include "model/model.h"
#include "ops/batch.h"

namespace perigee {

// What a sequence brought when it entered its slot.
struct Admission {
  int32_t num_prompt_tokens = 0, num_cached_tokens = 0;
  int32_t num_tokens = 0;  // the prompt and former outputs
};
// Form of a row's attention. It depends on the admission, never on how that is cut into chunks, and a chunk has tokens
// of one kind: so chunk sizes change no bit.
MlaForm form_of(const PlanRow& row, const Admission& admission, const Model& model, bool deterministic);

class BatchBuilder {
 public:
  BatchBuilder(const Model& model, bool deterministic, int32_t dcp_index = 0)
      : model_(model), deterministic_(deterministic), dcp_index_(dcp_index) {}

  // Requires the plan's starts and appends to be in `slots` already. Valid until the next build().
  const Batch& build(const StepPlan& plan, const Slots& slots);

  // The row's logit rows in the model's output: one after each token under prompt_logprobs and of a verify row, else
  // one if the row samples.
  int32_t logit_row(size_t plan_row) const { return first_logit_[plan_row]; }
  int32_t num_logits(size_t plan_row) const { return first_logit_[plan_row + 1] - first_logit_[plan_row]; }

 private:
  void add_row(const PlanRow& row, const StepPlan& plan, const Slot& slot);
  void add_state(const PlanRow& row, const Slot& slot, SequenceRows& rows) const;
  void add_checkpoints(const StepPlan& plan, const Slots& slots);
  void place_checkpoint(const CheckpointWrite& write, const PlanRow& row, const Slots& slots, const SequenceRows& rows);

  const Model& model_;
  const bool deterministic_;
  const int32_t dcp_index_;
  Batch batch_;
  std::vector<int32_t> tokens_, positions_, logit_rows_, first_logit_;
  std::vector<int32_t> checkpoint_pages_;
  std::vector<StateCheckpoint> checkpoints_;
  std::vector<SequenceRows> sequences_;
};

}  // namespace perigee

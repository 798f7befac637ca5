// PlanDraft: a plan in the making, what it will hold in flight, and what is left to give.
#pragma once

#include "control/plan.h"
#include "control/plans_in_flight.h"

namespace perigee {

struct PlanDraft {
  StepPlan plan;
  StateTraffic traffic;
  int32_t budget_tokens = 0;
  bool awaits_pages = false;                             // one that runs does, so that nobody starts
  bool ends_lease = false;                               // another node waits for the result of one of its rows
  int32_t prompt_logprob_tokens = kPromptLogprobTokens;  // rows of logits for them that are left
};

}  // namespace perigee

#include "control/plans_in_flight.h"

namespace perigee {

void PlansInFlight::launch(const StepPlan& plan, StateTraffic traffic) {
  CHECK(!full() && plan.step == next_step_, "step ", plan.step, " is launched as step ", next_step_);
  Flight& flight = this->flight(next_step_);
  flight.step = next_step_;
  flight.rows.assign(plan.rows.begin(), plan.rows.end());
  flight.traffic = std::move(traffic);
  flight.awaits_masks =
      std::any_of(flight.rows.begin(), flight.rows.end(), [](const PlanRow& row) { return row.masked; });
  next_step_ = StepId(next_step_.value + 1);
}

PlansInFlight::Flight& PlansInFlight::file(const StepResult& result) {
  CHECK(result.step >= oldest_step_ && result.step < next_step_, "step ", result.step, " is not in flight");
  Flight& arrived = flight(result.step);
  CHECK(result.rows.size() == arrived.rows.size(), "step ", result.step, " has ", arrived.rows.size(),
        " rows, its result ", result.rows.size());
  CHECK(!arrived.early, "step ", result.step, " came twice");
  for (size_t i = 0; i < arrived.rows.size(); ++i)
    CHECK(result.rows[i].slot == arrived.rows[i].slot && result.rows[i].sequence == arrived.rows[i].sequence, "step ",
          result.step, " row ", i, " is of another sequence");
  return arrived;
}

void PlansInFlight::retire_oldest(std::vector<SlotId>& free_slots) {
  Flight& returned = flight(oldest_step_);
  const uint32_t plan = bit(oldest_step_);
  oldest_step_ = StepId(oldest_step_.value + 1);
  returned.step = {};
  returned.traffic = {};
  quarantine_.plan_returned(plan, free_slots);
}

void PlansInFlight::check_integrity() const {
  CHECK(quarantine_.empty() || !empty(), "pages wait for no plan");
}

}  // namespace perigee

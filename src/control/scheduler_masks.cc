// Rows under a constraint: their masks, and what of sampling the masks do.

#include <algorithm>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {

// Sampling forbids stop ids before that many outputs, and where the constraint allows no other id nothing would be left
// to sample. Masks know better (make_masks).
void Scheduler::Impl::leave_min_tokens_to_masks(Sequence& sequence) {
  sequence.min_outputs = sequence.sampling().min_tokens;
  if (sequence.min_outputs == 0) return;
  auto sampling = std::make_shared<SamplingParams>(sequence.sampling());
  sampling->min_tokens = 0;
  sequence.request.sampling = std::move(sampling);
}

void Scheduler::Impl::take_mask_jobs(PlansInFlight::Flight& flight, std::vector<MaskJob>& jobs) {
  jobs.clear();
  flight.awaits_masks = false;
  for (const PlanRow& row : flight.rows) {
    if (!row.masked) continue;
    Sequence* sequence = at_slot(row.slot);
    if (sequence == nullptr || sequence->id() != row.sequence) continue;  // ended or preempted since
    const MaskJob& job = jobs.emplace_back(mask_job(row, *sequence));
    if (planted(Fault::kConstraintUnconfirmed) && !job.drafts.empty()) job.state->accept(job.drafts[0]);
  }
  if (planted(Fault::kMaskForgotten) && !jobs.empty()) jobs.pop_back();
}

MaskJob Scheduler::Impl::mask_job(const PlanRow& row, Sequence& sequence) const {
  MaskJob job{.sequence = sequence.id(),
              .slot = row.slot,
              .state = sequence.constraint.get(),
              .drafts = {},
              .ids_left = sequence.max_outputs - sequence.num_outputs(),
              .stop_ids = sequence.sampling().stop_ids,
              .num_without_stop = sequence.min_outputs - sequence.num_outputs()};
  const DraftIds& drafts = sequence.running().drafts;
  const auto num_drafts = std::min(static_cast<size_t>(row.num_drafts()), drafts.size());
  job.drafts.append(drafts.begin(), drafts.begin() + num_drafts);
  return job;
}

}  // namespace perigee

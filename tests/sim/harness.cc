#include "sim/harness.h"

#include <algorithm>
#include <utility>

#include "control/faults.h"
#include "exec/mask_box.h"

namespace perigee::sim {

void Counts::add(const Counts& other) {
  steps += other.steps;
  preemptions += other.preemptions;
  cancels_in_flight += other.cancels_in_flight;
  reordered += other.reordered;
  hits += other.hits;
  requests += other.requests;
  ids += other.ids;
  resumes_hit += other.resumes_hit;
  expired += other.expired;
  errors += other.errors;
  hybrid_steps += other.hybrid_steps;
  checkpoint_writes += other.checkpoint_writes;
  checkpoint_hits += other.checkpoint_hits;
  checkpoint_evictions += other.checkpoint_evictions;
  checkpoint_skips += other.checkpoint_skips;
  lost_writes += other.lost_writes;
  shared_copies += other.shared_copies;
  rows_of_several += other.rows_of_several;
  most_overtaken = std::max(most_overtaken, other.most_overtaken);
  verify_rows += other.verify_rows;
  all_accepted += other.all_accepted;
  none_accepted += other.none_accepted;
  late_ranks += other.late_ranks;
  lost_ranks += other.lost_ranks;
  unwritten += other.unwritten;
  dealt += other.dealt;
  spilled += other.spilled;
  dealt_in_turn += other.dealt_in_turn;
  masked_rows += other.masked_rows;
  masked_verify_rows += other.masked_verify_rows;
  masks_missing += other.masks_missing;
  log_hash = mix64(log_hash * 31 + other.log_hash);
}

Harness::Harness(const Judge& judge, const Rng& rng, const SchedulerConfig& config, int32_t num_ranks)
    : judge_(judge),
      rng_(rng),
      config_(config),
      scheduler_(config_),
      ranks_(static_cast<size_t>(num_ranks), FakeWorker(
                                                 judge_,
                                                 [this](SequenceId sequence) -> const std::vector<int32_t>& {
                                                   return requests_[static_cast<size_t>(sequence.value)].expected.ids;
                                                 },
                                                 config_.dcp_size, config_.num_pages, config_.max_sequences)),
      slots_(static_cast<size_t>(config_.max_sequences)) {}

void Harness::submit(Submit submit) {
  Request request;
  request.max_outputs = submit.sampling->max_tokens;
  judge_.require(submit.sequence.value == std::ssize(requests_), "sequence ", submit.sequence, " is not the next one");
  judge_.require(scheduler_.fits(std::ssize(*submit.prompt), request.max_outputs), "a request does not fit");
  scheduler_.submit(submit);
  request.expected =
      run_alone(*submit.prompt, *submit.sampling, request.max_outputs, num_state_pages(), submit.constraint.get());
  live_.push_back(submit.sequence.value);
  request.submit = std::move(submit);
  requests_.push_back(std::move(request));
}

// Of one that lives, has ended, or never was.
void Harness::cancel(SequenceId sequence, FinishReason reason) {
  const bool known = sequence.value < std::ssize(requests_);
  const bool alive = known && !requests_[static_cast<size_t>(sequence.value)].ended;
  if (alive && has_row_in_flight(sequence)) ++counts_.cancels_in_flight;
  if (alive) requests_[static_cast<size_t>(sequence.value)].cancelled = true;
  scheduler_.cancel({sequence, reason});
  take_updates();
  judge_.require(!alive || requests_[static_cast<size_t>(sequence.value)].ended, "cancelled sequence ", sequence,
                 " did not end at once");
}

void Harness::run_ranks() {
  if (ranks_.size() > 1 && rng_.chance(0.05)) {
    late_rank_ = rng_.below(ranks_.size());
    counts_.late_ranks += late_rank_ > 0 ? 1 : 0;
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    for (uint64_t i = rank > 0 && rank == late_rank_ ? 0 : rng_.below(6); i > 0; --i) ranks_[rank].run_one(rng_);
}

// All ranks have run the step, and found the same.
StepResult Harness::join(StepId step) {
  StepResult result = ranks_[0].collect(step);
  for (const StepResult& late : std::exchange(unchecked_, {}))
    judge_.require(ranks_.back().collect(late.step) == late, "ranks disagree about step ", late.step);
  const bool forgets = planted(Fault::kRankForgotten);
  if (forgets) unchecked_.push_back(result);
  for (size_t rank = 1; rank + (forgets ? 1 : 0) < ranks_.size(); ++rank)
    judge_.require(ranks_[rank].collect(step) == result, "ranks disagree about step ", step);
  return result;
}

void Harness::count_verify(const StepPlan& plan, const StepResult& result) {
  size_t num_written = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    num_written += result.rows[i].checkpoints.size();
    if (plan.rows[i].num_drafts() == 0) continue;
    ++counts_.verify_rows;
    counts_.all_accepted += static_cast<int32_t>(result.rows[i].ids.size()) == plan.rows[i].max_ids() ? 1 : 0;
    counts_.none_accepted += result.rows[i].ids.size() == 1 ? 1 : 0;
  }
  counts_.unwritten += static_cast<int64_t>(plan.checkpoints.size() - num_written);
}

void Harness::plan_step() {
  std::optional<StepPlan> plan = scheduler_.next_plan(now_s_);
  take_imports();
  take_updates();
  check_deadlines();
  if (!plan) {
    judge_.require(!flights_.empty() || !imports_.empty() || !leases_.empty() || scheduler_.idle(),
                   "nothing is in flight and nothing is planned");
    return;
  }
  ++counts_.steps;
  check_plan(*plan);
  for (FakeWorker& rank : ranks_) rank.launch(*plan);
  Flight flight;
  flight.pages = reach(*plan);
  for (const SequenceStart& start : plan->starts)
    for (const Placement& place : start.checkpoint) flight.copied.set(bit_of(place));
  flight.plan = std::move(*plan);
  for (const PlanRow& row : flight.plan.rows) {
    const bool constrained = requests_[static_cast<size_t>(row.sequence.value)].submit.constraint != nullptr;
    judge_.require(row.masked == (constrained && row.samples()), "sequence ", row.sequence,
                   row.masked ? " has a masked row" : " has a row without masks");
    flight.awaits_masks |= row.masked;
    counts_.masked_rows += row.masked ? 1 : 0;
    counts_.masked_verify_rows += row.masked && row.num_drafts() > 0 ? 1 : 0;
  }
  flights_.push_back(std::move(flight));
}

// Of the plan whose turn it is, if it has masked rows and no masks yet: whenever, but before its rows run.
void Harness::give_masks() {
  std::vector<MaskJob> jobs;
  const std::optional<StepId> step = scheduler_.take_mask_jobs(jobs);
  if (!step) return;
  auto masks = std::make_shared<StepMasks>(StepMasks{.step = *step, .rows = {}});
  for (const MaskJob& job : jobs) {
    RowMask& row = masks->rows.emplace_back(RowMask{.slot = job.slot, .words = {}});
    judge_.require(make_masks(job, kVocabulary, row.words), "sequence ", job.sequence, " may say nothing");
  }
  for (Flight& flight : flights_) {
    if (flight.plan.step != *step) continue;
    flight.awaits_masks = false;
    MaskCursor cursor(*masks);  // as ranks read them: in the order of the plan's rows
    for (const PlanRow& row : flight.plan.rows)
      if (row.masked) cursor.of(row.slot);
    cursor.check_end();
    counts_.masks_missing += std::count_if(flight.plan.rows.begin(), flight.plan.rows.end(),
                                           [&](const PlanRow& row) { return row.masked; }) -
                             std::ssize(jobs);
  }
  for (FakeWorker& rank : ranks_) rank.set_masks(masks);
}

void Harness::deliver() {
  size_t index = 0;
  if (flights_[0].awaits_masks) give_masks();
  if (flights_.size() > 1 && rng_.chance(0.3) && !flights_[1].awaits_masks) {
    index = 1;
    ++counts_.reordered;
  }
  for (const CheckpointWrite& write : flights_[index].plan.checkpoints)
    for (const PlanRow& row : flights_[index].plan.rows)
      if (row.slot == write.slot && requests_[static_cast<size_t>(row.sequence.value)].ended) ++counts_.lost_writes;
  const StepResult result = join(flights_[index].plan.step);
  count_verify(flights_[index].plan, result);
  flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(index));
  scheduler_.apply(result);
  take_updates();
}

}  // namespace perigee::sim

// A step's result: confirms positions, delivers ids, publishes blocks, ends sequences.

#include <algorithm>
#include <utility>

#include "base/prefetch.h"
#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {

void Scheduler::Impl::apply(const StepResult& result) {
  plans_.accept(result, free_slots_,
                [this](PlansInFlight::Flight& flight, const StepResult& in_order) { digest(flight, in_order); });
}

// What this step and the next plan read of the sequences lies all over memory, and while a device works at a step the
// caches come to hold other things.
void Scheduler::Impl::prefetch_sequences(std::span<const PlanRow> rows) {
  for (const PlanRow& row : rows)
    if (const Sequence* sequence = at_slot(row.slot)) prefetch(sequence, sizeof(*sequence));
  for (const PlanRow& row : rows)
    if (const Sequence* sequence = at_slot(row.slot)) {
      prefetch(&sequence->sampling(), sizeof(SamplingParams));
      prefetch(sequence->input.get(), 1);
      prefetch(sequence->request.prompt.get(), 1);
      prefetch(sequence->generated.data() + sequence->generated.size(), 1);
    }
  for (const PlanRow& row : rows)
    if (const Sequence* sequence = at_slot(row.slot)) prefetch(sequence->sampling().stop_ids.data(), 1);
}

void Scheduler::Impl::digest(PlansInFlight::Flight& flight, const StepResult& result) {
  prefetch_sequences(flight.rows);
  std::span<CheckpointInFlight> writes = flight.traffic.writes;  // of the rows from here on
  for (size_t i = 0; i < flight.rows.size(); ++i) {
    const PlanRow& row = flight.rows[i];
    size_t num_writes = 0;
    while (num_writes < writes.size() && writes[num_writes].slot == row.slot) ++num_writes;
    const std::span<CheckpointInFlight> row_writes = writes.first(num_writes);
    writes = writes.subspan(num_writes);
    Sequence* sequence = at_slot(row.slot);
    if (sequence == nullptr || sequence->id() != row.sequence) {  // ended or preempted while the row was in flight
      if (planted(Fault::kLateIdsDelivered)) {
        SequenceUpdate& late = updates_.emplace_back();
        late.sequence = row.sequence;
        late.ids = result.rows[i].ids;
      }
      continue;
    }
    sequence->running().plans &= ~PlansInFlight::bit(flight.step);
    accept_row(*sequence, row, result.rows[i], row_writes);
  }
}

void Scheduler::Impl::accept_row(Sequence& sequence, const PlanRow& row, const RowResult& result,
                                 std::span<CheckpointInFlight> writes) {
  if (!result.finite) return fail(sequence, result);
  if (result.num_drafts > 0) count_drafts(result);
  if (row.scores_prompt()) accept_prompt_logprobs(sequence, row, result);
  advance(sequence, row, result);
  const int32_t num_confirmed = sequence.running().num_confirmed;
  if (!row.samples()) {
    states_.keep_checkpoints(sequence, writes, result);
    states_.publish_blocks(sequence, num_confirmed);
    if (sequence.request.lease == LeaseWish::kFromStart) handovers_.grow(sequence);
    return;
  }
  SequenceUpdate& update = add_update(sequence);
  const std::optional<FinishReason> finish = append_ids(sequence, result, update);
  if (row.masked) sequence.running().drafts = result.drafts;
  update.num_drafts = result.num_drafts;
  update.num_accepted =
      std::min(static_cast<int32_t>(std::min(result.ids.size() - 1, update.ids.size())), result.num_drafts);
  states_.keep_checkpoints(sequence, writes, result);
  states_.publish_blocks(sequence, std::min(num_confirmed, sequence.num_tokens()));
  if (sequence.request.lease == LeaseWish::kFromStart) handovers_.grow(sequence);
  if (planted(Fault::kDoubleDelivery) && num_confirmed % kBlockTokens == 0)
    update.ids.append(result.ids.begin(), result.ids.end());
  if (planted(Fault::kLastDraftLost) && result.ids.size() > 1 &&
      static_cast<int32_t>(result.ids.size()) == row.max_ids())
    update.ids.resize(update.ids.size() - 1);
  if (finish) end(sequence, *finish, update);
}

// Ids before the one whose logits are not finite count, and one of them may have ended the sequence.
void Scheduler::Impl::fail(Sequence& sequence, const RowResult& result) {
  SequenceUpdate& update = add_update(sequence);
  if (const auto finish = append_ids(sequence, result, update)) return end(sequence, *finish, update);
  ++totals_.not_finite;
  update.error = "the model's output for this request is not finite";
  cache_.forget_blocks(sequence);
  end(sequence, FinishReason::kError, update);
}

// Entry i is of position row.position + 1 + i; it is a prefill row, whose position is exact. A chunk that is computed
// again after a preemption repeats entries that are delivered already; the last entry of the last chunk is of the first
// output, no prompt token.
void Scheduler::Impl::accept_prompt_logprobs(Sequence& sequence, const PlanRow& row, const RowResult& result) {
  const int32_t position = row.position.least;
  const int32_t first = std::max(position + 1, sequence.prompt_logprobs_known + 1);
  const int32_t end = std::min(position + row.num_tokens(), sequence.num_prompt() - 1) + 1;
  if (first >= end) return;
  const auto entries = result.prompt_logprobs.begin() - (position + 1);
  CHECK(end - position - 1 <= static_cast<int32_t>(result.prompt_logprobs.size()), "sequence ", sequence.id(),
        " lacks prompt logprobs");
  add_update(sequence).prompt_logprobs.assign(entries + first, entries + end);
  sequence.prompt_logprobs_known = end - 1;
}

// Moves the confirmed position. A prefill chunk confirms its tokens; a decode or verify row the token that it starts
// with and each id that it accepted but the last, whose cache entry the next row writes.
void Scheduler::Impl::advance(Sequence& sequence, const PlanRow& row, const RowResult& result) {
  Running& run = sequence.running();
  CHECK(row.position.contains(run.num_confirmed), "sequence ", sequence.id(), ": row at ", row.position.least, " to ",
        row.position.most, ", confirmed ", run.num_confirmed);
  CHECK(row.samples() == !result.ids.empty(), "sequence ", sequence.id(), ": ids come from rows that sample");
  const bool keeps_all = row.prefill() != nullptr || planted(Fault::kAllDraftsConfirmed);
  const int32_t num_kept = keeps_all ? row.num_tokens() : static_cast<int32_t>(result.ids.size());
  CHECK(num_kept <= row.num_tokens(), "sequence ", sequence.id(), " accepted ", num_kept, " of ", row.num_tokens());
  run.ids_in_flight -= row.max_ids();
  const int32_t more = num_kept - row.min_tokens(), less = row.num_tokens() - num_kept;
  run.scheduled = {run.scheduled.least + more, run.scheduled.most - less};
  const int32_t began = std::exchange(run.num_confirmed, run.num_confirmed + num_kept);
  const bool is_latest = run.scheduled.most == run.num_confirmed;
  if (!is_latest)
    run.committed = {run.committed.least + more, run.committed.most - less};
  else if (row.prefill() == nullptr)
    run.committed = {began, began};
  if (!sequence.prompt_confirmed && run.num_confirmed >= sequence.num_prompt()) confirm_prompt(sequence);
}

// The last id of a row is the model's own, those before it were drafts.
void Scheduler::Impl::count_drafts(const RowResult& result) {
  SpeculationTotals& totals = totals_.speculation;
  const size_t num_accepted = result.ids.size() - 1;
  CHECK(num_accepted <= static_cast<size_t>(result.num_drafts), "slot ", result.slot, " accepted ", num_accepted,
        " of ", result.num_drafts, " drafts");
  ++totals.rows;
  totals.drafts += result.num_drafts;
  for (size_t i = 0; i < num_accepted; ++i) ++totals.accepted_at[i];
}

void Scheduler::Impl::confirm_prompt(Sequence& sequence) {
  sequence.prompt_confirmed = true;
  totals_.prompt_tokens += sequence.num_prompt();
  totals_.cached_prompt_tokens += sequence.num_cached_tokens;
  release_followers(sequence);
}

// Adds ids up to the one that ends the sequence, if one does; what follows it is dropped.
std::optional<FinishReason> Scheduler::Impl::append_ids(Sequence& sequence, const RowResult& result,
                                                        SequenceUpdate& update) {
  const SamplingParams& sampling = sequence.sampling();
  for (size_t i = 0; i < result.ids.size(); ++i) {
    const int32_t id = result.ids[i];
    if (sequence.constraint && !sequence.constraint->accept(id)) {  // a fault of the constraint, which may be anybody's
      const std::string_view fault = sequence.constraint->fault();
      update.error =
          fault.empty() ? str_cat("token ", id, " is not what the request's constraint allows") : str_cat(fault);
      return FinishReason::kError;
    }
    const bool may_stop = sequence.num_outputs() >= sampling.min_tokens;
    sequence.generated.push_back(id);
    update.ids.push_back(id);
    if (i < result.logprobs.size()) update.logprobs.push_back(result.logprobs[i]);
    ++totals_.generated_tokens;
    if (may_stop && std::find(sampling.stop_ids.begin(), sampling.stop_ids.end(), id) != sampling.stop_ids.end()) {
      update.stop_id = id;
      return FinishReason::kStop;
    }
    if (sequence.num_outputs() >= sequence.max_outputs) return FinishReason::kLength;
  }
  return std::nullopt;
}

}  // namespace perigee

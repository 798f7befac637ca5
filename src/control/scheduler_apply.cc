// A step's result: confirms positions, delivers ids, publishes blocks, ends sequences.

#include <algorithm>
#include <array>
#include <utility>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {

// Results are digested in the order of their steps; one that comes early is kept until the step before it is in.
void Scheduler::Impl::apply(const StepResult& result) {
  CHECK(result.step >= oldest_step_ && result.step < next_step_, "step ", result.step, " is not in flight");
  InFlight& arrived = flight(result.step);
  CHECK(result.rows.size() == arrived.rows.size(), "step ", result.step, " has ", arrived.rows.size(), " rows, not ",
        result.rows.size());
  CHECK(!arrived.early, "step ", result.step, " came twice");
  if (result.step != oldest_step_) {
    arrived.early = result;
    return;
  }
  digest(arrived, result);
  while (plans_in_flight() > 0 && flight(oldest_step_).early) {
    InFlight& next = flight(oldest_step_);
    const StepResult early = std::move(*next.early);
    next.early.reset();
    digest(next, early);
  }
}

void Scheduler::Impl::digest(InFlight& flight, const StepResult& result) {
  const uint32_t bit = plan_bit(flight.step);
  std::span<WriteInFlight> writes = flight.traffic.writes;  // of the rows from here on
  for (size_t i = 0; i < flight.rows.size(); ++i) {
    const PlanRow& row = flight.rows[i];
    const RowResult& row_result = result.rows[i];
    CHECK(row_result.slot == row.slot && row_result.sequence == row.sequence, "step ", flight.step, " row ", i,
          " is of another sequence");
    size_t num_writes = 0;
    while (num_writes < writes.size() && writes[num_writes].slot == row.slot) ++num_writes;
    const std::span<WriteInFlight> row_writes = writes.first(num_writes);
    writes = writes.subspan(num_writes);
    Sequence* sequence = at_slot(row.slot);
    if (sequence == nullptr || sequence->id() != row.sequence) {  // ended or preempted while the row was in flight
      if (planted(Fault::kLateIdsDelivered)) {
        SequenceUpdate& late = updates_.emplace_back();
        late.sequence = row.sequence;
        late.ids = row_result.ids;
      }
      continue;
    }
    sequence->plans &= ~bit;
    accept_row(*sequence, row, row_result, row_writes);
  }
  oldest_step_ = StepId(oldest_step_.value + 1);
  flight.step = {};
  flight.traffic = {};
  quarantine_.plan_returned(bit, free_slots_);
}

void Scheduler::Impl::accept_row(Sequence& sequence, const PlanRow& row, const RowResult& result,
                                 std::span<WriteInFlight> writes) {
  if (!result.finite) {
    ++totals_.not_finite;
    SequenceUpdate& update = add_update(sequence);
    update.error = "the model's output for this request is not finite";
    forget_blocks(sequence);
    end(sequence, FinishReason::kError, update);
    return;
  }
  if (row.scores_prompt()) accept_prompt_logprobs(sequence, row, result);
  advance(sequence, row, result);
  if (!row.samples()) {
    keep_checkpoints(sequence, writes, result);
    publish_blocks(sequence, sequence.num_confirmed);
    return;
  }
  SequenceUpdate& update = add_update(sequence);
  const std::optional<FinishReason> finish = append_ids(sequence, result, update);
  keep_checkpoints(sequence, writes, result);
  publish_blocks(sequence, std::min(sequence.num_confirmed, sequence.num_tokens()));
  if (planted(Fault::kDoubleDelivery) && sequence.num_confirmed % kBlockTokens == 0)
    update.ids.append(result.ids.begin(), result.ids.end());
  if (finish) end(sequence, *finish, update);
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
  CHECK(row.position.contains(sequence.num_confirmed), "sequence ", sequence.id(), ": row at ", row.position.least,
        " to ", row.position.most, ", confirmed ", sequence.num_confirmed);
  CHECK(row.samples() == !result.ids.empty(), "sequence ", sequence.id(), ": ids come from rows that sample");
  sequence.ids_in_flight -= row.max_ids();
  const int32_t num_kept = row.prefill() != nullptr ? row.num_tokens() : static_cast<int32_t>(result.ids.size());
  CHECK(num_kept <= row.num_tokens(), "sequence ", sequence.id(), " accepted ", num_kept, " of ", row.num_tokens());
  sequence.scheduled.least += num_kept - row.min_tokens();
  sequence.scheduled.most -= row.num_tokens() - num_kept;
  sequence.num_confirmed += num_kept;
  if (!sequence.prompt_confirmed && sequence.num_confirmed >= sequence.num_prompt()) confirm_prompt(sequence);
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

// Enters the full blocks of the first num_tokens tokens into the prefix index. A block that another page holds already
// keeps that page there; the chain goes on from it.
void Scheduler::Impl::publish_blocks(Sequence& sequence, int32_t num_tokens) {
  if (!config_.prefix_caching) return;
  if (is_recurrent() && config_.deterministic) num_tokens = std::min(num_tokens, num_chunked(sequence));
  std::array<int32_t, kBlockTokens> scratch;
  while (!sequence.chain_broken && (sequence.num_chained + 1) * kBlockTokens <= num_tokens) {
    const int32_t block = sequence.num_chained;
    const PageId page = sequence.pages[static_cast<size_t>(block)].page();
    const auto node = index_.publish(sequence.chain, sequence.block_tokens(block, scratch), sequence.request.cache_salt,
                                     page, sequence.extra_key(block));
    if (!node) {
      sequence.chain_broken = true;
      return;
    }
    if (node->page == page) pool_.publish(page);
    sequence.chain = *node;
    ++sequence.num_chained;
  }
}

}  // namespace perigee

// The recurrent state of a sequence and its checkpoints: pages taken, written, copied from, kept.

#include <algorithm>
#include <utility>

#include "control/faults.h"
#include "control/scheduler_impl.h"

namespace perigee {

std::vector<PageHandle> Scheduler::Impl::take_pages(PageOwner owner, int32_t count) {
  std::vector<PageHandle> pages;
  pages.reserve(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    pages.push_back(pool_.allocate(owner));
    CHECK(pages.back(), "pages that were counted are not there");
  }
  return pages;
}

// Plans in flight, or the one in the making, hold pages for a moment only.
bool Scheduler::Impl::pages_come_back(const Draft& draft) const {
  const auto holds = [](const StateTraffic& traffic) { return !traffic.writes.empty() || !traffic.copied.empty(); };
  return !quarantine_.empty() || holds(draft.traffic) ||
         std::any_of(flights_.begin(), flights_.end(), [&](const InFlight& flight) { return holds(flight.traffic); });
}

// The state begins as a copy of the hit's checkpoint, whose pages are held until the plan that copies them returns.
void Scheduler::Impl::start_state(Sequence& sequence, std::vector<PageHandle> checkpoint, SequenceStart& start,
                                  Draft& draft) {
  sequence.state_pages = take_pages(PageOwner::kState, config_.state_pages);
  for (const PageHandle& handle : sequence.state_pages) start.state_pages.push_back(handle.placement());
  if (checkpoint.empty()) return;
  ++totals_.checkpoint_hits;
  if (checkpoints_.contains(sequence.newest_checkpoint)) checkpoints_.count_start(sequence.newest_checkpoint);
  for (PageHandle& handle : checkpoint) {
    start.checkpoint.push_back(handle.placement());
    if (!planted(Fault::kCheckpointFreeUnderCopy)) draft.traffic.copied.push_back(std::move(handle));
  }
}

// How much of its input chunks compute. The state after a chunk differs in its last bits from the state after the same
// tokens one by one. So where each bit counts, outputs stay out of the cache, and what a preempted sequence had given
// runs again as it ran at first.
int32_t Scheduler::Impl::num_chunked(const Sequence& sequence) const {
  return is_recurrent() && config_.deterministic ? sequence.num_prompt() : sequence.num_input();
}

// Where the next chunk ends at the latest.
int32_t Scheduler::Impl::chunk_stop(const Sequence& sequence) const {
  const int32_t first = sequence.scheduled.most, end = num_chunked(sequence);
  return first < end ? end : std::min(first + 1, sequence.num_input());
}

// A chunk commits all its tokens. A decode or verify row commits the position that it starts from, wherever in its
// range that is: its own tokens may prove to be too many.
void Scheduler::Impl::plan_checkpoints(Sequence& sequence, const PlanRow& row, Draft& draft) {
  if (row.prefill() != nullptr) return plan_chunk_checkpoints(sequence, row, draft);
  if (config_.deterministic) return;  // see num_chunked
  const int32_t late = planted(Fault::kCheckpointLate) ? 1 : 0;
  const int32_t boundary = (row.position.most - late) / kBlockTokens * kBlockTokens;
  if (boundary < row.position.least - late) return;  // a row before this one commits it
  const CheckpointPolicy::Keep keep = policy_.in_decode(boundary);
  if (keep == CheckpointPolicy::Keep::kNo || boundary <= sequence.num_input()) return;
  if (num_checkpoints_that_fit() == 0) {
    ++totals_.checkpoint_skips;
    return;
  }
  write_checkpoint(sequence, {row.position.least - 1, row.position.most}, keep == CheckpointPolicy::Keep::kTurn, draft);
}

// Where pages are short, the first positions go without: a later checkpoint supersedes an earlier one.
void Scheduler::Impl::plan_chunk_checkpoints(Sequence& sequence, const PlanRow& row, Draft& draft) {
  const auto next = [&](int32_t from) { return policy_.next_in_input(from, num_chunked(sequence), sequence.junction); };
  const int32_t first = next(row.position.least), end = row.position.least + row.num_tokens();
  int32_t num_positions = 0;
  for (int32_t position = first; position <= end; position = next(position)) ++num_positions;
  int32_t num_skipped = std::max(num_positions - num_checkpoints_that_fit(), 0);
  totals_.checkpoint_skips += num_skipped;
  for (int32_t position = first; position <= end; position = next(position))
    if (--num_skipped < 0) write_checkpoint(sequence, {position - 1, position}, false, draft);
  std::vector<CheckpointWrite>& writes = draft.plan.checkpoints;
  if (planted(Fault::kCheckpointsSwapped) && writes.size() > 1 && writes.end()[-2].slot == row.slot)
    std::swap(writes.end()[-2], writes.end()[-1]);
}

// Best effort: they may evict what nobody uses, but leave a page for each running sequence and preempt none.
int32_t Scheduler::Impl::num_checkpoints_that_fit() const {
  return std::max(pool_.num_available() - static_cast<int32_t>(running_.size()), 0) / config_.state_pages;
}

// For the boundary inside (bounds.least, bounds.most].
void Scheduler::Impl::write_checkpoint(Sequence& sequence, PositionRange bounds, bool is_turn, Draft& draft) {
  std::vector<CheckpointWrite>& writes = draft.plan.checkpoints;
  if (planted(Fault::kCheckpointsAtFirst) && !writes.empty() && writes.back().slot == sequence.slot)
    bounds = {writes.back().lower, writes.back().upper};
  CheckpointWrite& planned = writes.emplace_back();
  planned.slot = sequence.slot;
  planned.lower = bounds.least;
  planned.upper = bounds.most;
  WriteInFlight& write = draft.traffic.writes.emplace_back();
  write = {sequence.slot, sequence.id(), bounds.most / kBlockTokens * kBlockTokens, is_turn,
           take_pages(PageOwner::kCheckpoint, config_.state_pages)};
  planned.pages.reserve(write.pages.size());
  for (const PageHandle& handle : write.pages) planned.pages.push_back(handle.placement());
  if (planted(Fault::kCheckpointUnconfirmed) && write.boundary <= sequence.num_input()) {
    publish_blocks(sequence, write.boundary);
    keep_checkpoint(sequence, write);
  }
}

// Those of the row's checkpoints that were written; the pages of the others are free again.
void Scheduler::Impl::keep_checkpoints(Sequence& sequence, std::span<WriteInFlight> writes, const RowResult& result) {
  size_t num_written = 0;
  for (WriteInFlight& write : writes) {
    if (num_written == result.checkpoints.size() || result.checkpoints[num_written] != write.boundary) continue;
    ++num_written;
    keep_checkpoint(sequence, write);
  }
  CHECK(num_written == result.checkpoints.size(), "sequence ", sequence.id(), " wrote a checkpoint at ",
        result.checkpoints[num_written], " that no plan has");
}

// The state after `boundary` tokens is in the write's pages: they become the checkpoint of the block that ends there,
// unless that has one or is gone.
void Scheduler::Impl::keep_checkpoint(Sequence& sequence, WriteInFlight& write) {
  publish_blocks(sequence, std::min({write.boundary, sequence.num_confirmed, sequence.num_tokens()}));
  if (sequence.chain_broken || sequence.num_chained * kBlockTokens != write.boundary) return;
  if (write.pages.empty() || !index_.contains(sequence.chain)) return;
  const PageId block = sequence.chain.page;
  const CheckpointRef former = std::exchange(sequence.newest_checkpoint, checkpoints_.at(block));
  const bool former_is_turn = std::exchange(sequence.newest_is_turn, false);
  if (sequence.newest_checkpoint.serial == 0) {
    sequence.newest_checkpoint = checkpoints_.attach(block, std::exchange(write.pages, {}));
    sequence.newest_is_turn = write.is_turn;
    ++totals_.checkpoint_writes;
  }
  if (!checkpoints_.contains(former)) return;
  former_is_turn ? checkpoints_.drop(former.block) : checkpoints_.supersede(former);
}

// All handles of a sequence that stops, in the order in which they should survive: the checkpoint that goes on from it
// longest, then its blocks from the first, so that eviction takes the last blocks and with them their checkpoint first.
std::vector<PageHandle> Scheduler::Impl::take_all_pages(Sequence& sequence) {
  if (!is_recurrent()) return std::exchange(sequence.pages, {});
  std::vector<PageHandle> handles;
  handles.reserve(sequence.pages.size() + 2 * sequence.state_pages.size());
  if (checkpoints_.contains(sequence.newest_checkpoint)) checkpoints_.share(sequence.newest_checkpoint, handles);
  for (auto* pages : {&sequence.pages, &sequence.state_pages}) {
    if (pages == &sequence.state_pages && planted(Fault::kStateFreeUnderFlight)) break;
    std::move(pages->begin(), pages->end(), std::back_inserter(handles));
  }
  sequence.pages.clear();
  sequence.state_pages.clear();
  return handles;
}

}  // namespace perigee

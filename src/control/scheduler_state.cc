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
void Scheduler::Impl::start_state(Sequence& sequence, Hit hit, SequenceStart& start, Draft& draft) {
  sequence.state_pages = take_pages(PageOwner::kState, config_.state_pages);
  for (const PageHandle& handle : sequence.state_pages) start.state_pages.push_back(handle.page());
  if (hit.checkpoint.empty()) return;
  ++totals_.checkpoint_hits;
  if (checkpoints_.contains(sequence.newest_checkpoint)) checkpoints_.count_start(sequence.newest_checkpoint);
  for (PageHandle& handle : hit.checkpoint) {
    start.checkpoint.push_back(handle.page());
    if (!planted(Fault::kCheckpointFreeUnderCopy)) draft.traffic.copied.push_back(std::move(handle));
  }
}

// How much of its input chunks compute. The state after a chunk differs in its last bits from the state after the same
// tokens one by one. So where each bit counts, outputs stay out of the cache, and what a preempted sequence had given
// runs again as it ran at first.
int32_t Scheduler::Impl::num_chunked(const Sequence& sequence) const {
  return is_recurrent() && config_.deterministic ? sequence.num_prompt() : sequence.num_input();
}

// Where the next chunk ends at the latest: a row writes one checkpoint, wherever in it that lies.
int32_t Scheduler::Impl::chunk_stop(const Sequence& sequence) const {
  const int32_t first = sequence.num_scheduled, end = num_chunked(sequence);
  if (first >= end) return std::min(first + 1, sequence.num_input());
  if (!keeps_checkpoints()) return end;
  const int32_t next = policy_.next_in_input(first, end, sequence.junction);
  if (next == CheckpointPolicy::kNone) return end;
  const bool another = policy_.next_in_input(next, end, sequence.junction) != CheckpointPolicy::kNone;
  return another ? next : end;
}

// A chunk commits all its tokens. A decode row commits the position that it starts from: its own token may prove to be
// one too many.
void Scheduler::Impl::plan_checkpoint(Sequence& sequence, const PlanRow& row, Draft& draft) {
  if (!row.is_decode()) {
    const int32_t next = policy_.next_in_input(row.position, num_chunked(sequence), sequence.junction);
    if (next <= row.position + row.num_tokens) write_checkpoint(sequence, next, false, draft);
    return;
  }
  if (config_.deterministic) return;  // see num_chunked
  const int32_t position = row.position - (planted(Fault::kCheckpointLate) ? 1 : 0);
  const CheckpointPolicy::Keep keep = policy_.in_decode(position);
  if (keep != CheckpointPolicy::Keep::kNo && position > sequence.num_input())
    write_checkpoint(sequence, position, keep == CheckpointPolicy::Keep::kTurn, draft);
}

// Best effort: it may evict what nobody uses, but leaves a page for each running sequence and preempts none.
void Scheduler::Impl::write_checkpoint(Sequence& sequence, int32_t position, bool is_turn, Draft& draft) {
  if (pool_.num_available() < config_.state_pages + static_cast<int32_t>(running_.size())) {
    ++totals_.checkpoint_skips;
    return;
  }
  CheckpointWrite& planned = draft.plan.checkpoints.emplace_back();
  planned.slot = sequence.slot;
  planned.position = position + (planted(Fault::kCheckpointLate) && position < sequence.num_scheduled ? 1 : 0);
  WriteInFlight& write = draft.traffic.writes.emplace_back();
  write = {sequence.slot, sequence.id(), position, is_turn, take_pages(PageOwner::kCheckpoint, config_.state_pages)};
  planned.pages.reserve(write.pages.size());
  for (const PageHandle& handle : write.pages) planned.pages.push_back(handle.page());
  if (planted(Fault::kCheckpointUnconfirmed) && position <= sequence.num_input()) {
    publish_blocks(sequence, position);
    keep_checkpoint(sequence, write);
  }
}

// The state after `position` tokens is in the write's pages: they become the checkpoint of the block that ends there,
// unless that has one or is gone.
void Scheduler::Impl::keep_checkpoint(Sequence& sequence, WriteInFlight& write) {
  publish_blocks(sequence, std::min({write.position, sequence.num_confirmed, sequence.num_tokens()}));
  if (sequence.chain_broken || sequence.num_chained * kBlockTokens != write.position) return;
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

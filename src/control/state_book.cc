#include "control/state_book.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "control/faults.h"

namespace perigee {

int32_t StateBook::num_chunked(const Sequence& sequence) const {
  return rules_.is_recurrent() && rules_.config.deterministic ? sequence.num_prompt() : sequence.num_input();
}

int32_t StateBook::chunk_end(const Sequence& sequence, int32_t first) const {
  const int32_t end = num_chunked(sequence);
  return first < end ? end : std::min(first + 1, sequence.num_input());
}

void StateBook::start(Sequence& sequence, std::vector<PageHandle> checkpoint, SequenceStart& start,
                      StateTraffic& traffic) {
  if (!rules_.is_recurrent()) return;
  Running& run = sequence.running();
  const bool brings_one = !run.state_pages.empty();
  if (!brings_one) run.state_pages = cache_.pools().allocate_everywhere(PageOwner::kState, rules_.config.state_pages);
  for (const PageHandle& handle : run.state_pages) start.state_pages.push_back(handle.placement());
  if (brings_one) start.checkpoint = start.state_pages;
  if (checkpoint.empty()) return;
  ++totals_.hits;
  Checkpoints& checkpoints = cache_.checkpoints();
  if (checkpoints.contains(run.newest_checkpoint)) checkpoints.count_start(run.newest_checkpoint);
  for (PageHandle& handle : checkpoint) {
    start.checkpoint.push_back(handle.placement());
    if (!planted(Fault::kCheckpointFreeUnderCopy)) traffic.copied.push_back(std::move(handle));
  }
}

// A chunk commits all its tokens. A decode or verify row commits the position that it starts from, wherever in its
// range that is: its own tokens may prove to be too many.
void StateBook::plan_checkpoints(Sequence& sequence, const PlanRow& row, int32_t num_running, PlanDraft& draft) {
  if (!rules_.keeps_checkpoints()) return;
  const int32_t num_that_fit = cache_.pools().num_everywhere(rules_.config.state_pages, num_running);
  if (row.prefill() != nullptr) return plan_chunk_checkpoints(sequence, row, num_that_fit, draft);
  if (rules_.config.deterministic) return;  // see num_chunked
  const int32_t late = planted(Fault::kCheckpointLate) ? 1 : 0;
  const int32_t before = sequence.running().committed.least;
  const int32_t boundary = (row.position.most - late) / kBlockTokens * kBlockTokens;
  if (boundary <= before - late) return;  // a row before this one commits it
  const CheckpointPolicy::Keep keep = rules_.checkpoints.in_decode(boundary);
  if (keep == CheckpointPolicy::Keep::kNo || boundary <= sequence.num_input()) return;
  if (num_that_fit == 0) {
    ++totals_.skips;
    return;
  }
  write_checkpoint(sequence, {before, row.position.most}, keep == CheckpointPolicy::Keep::kRolling, draft);
}

// Where pages are short, the first positions go without: a later checkpoint supersedes an earlier one.
void StateBook::plan_chunk_checkpoints(Sequence& sequence, const PlanRow& row, int32_t num_that_fit, PlanDraft& draft) {
  const int32_t junction = sequence.running().junction, num_tokens = num_chunked(sequence);
  const auto next = [&](int32_t from) { return rules_.checkpoints.next_in_input(from, num_tokens, junction); };
  const int32_t first = next(row.position.least), end = row.position.least + row.num_tokens();
  int32_t num_positions = 0;
  for (int32_t position = first; position <= end; position = next(position)) ++num_positions;
  int32_t num_skipped = std::max(num_positions - num_that_fit, 0);
  totals_.skips += num_skipped;
  for (int32_t position = first; position <= end; position = next(position))
    if (--num_skipped < 0) write_checkpoint(sequence, {position - 1, position}, false, draft);
  std::vector<CheckpointWrite>& writes = draft.plan.checkpoints;
  if (planted(Fault::kCheckpointsSwapped) && writes.size() > 1 && writes.end()[-2].slot == row.slot)
    std::swap(writes.end()[-2], writes.end()[-1]);
}

// For the boundary inside (bounds.least, bounds.most].
void StateBook::write_checkpoint(Sequence& sequence, PositionRange bounds, bool is_rolling, PlanDraft& draft) {
  std::vector<CheckpointWrite>& writes = draft.plan.checkpoints;
  if (planted(Fault::kCheckpointsAtFirst) && !writes.empty() && writes.back().slot == sequence.running().slot)
    bounds = {writes.back().lower, writes.back().upper};
  CheckpointWrite& planned = writes.emplace_back();
  planned.slot = sequence.running().slot;
  planned.lower = bounds.least;
  planned.upper = bounds.most;
  CheckpointInFlight& write = draft.traffic.writes.emplace_back();
  write = {sequence.running().slot, bounds.most / kBlockTokens * kBlockTokens, is_rolling,
           cache_.pools().allocate_everywhere(PageOwner::kCheckpoint, rules_.config.state_pages)};
  planned.pages.reserve(write.pages.size());
  for (const PageHandle& handle : write.pages) planned.pages.push_back(handle.placement());
  if (planted(Fault::kCheckpointUnconfirmed) && write.boundary <= sequence.num_input()) {
    publish_blocks(sequence, write.boundary);
    keep_checkpoint(sequence, write);
  }
}

// Those of the row's checkpoints that were written; the pages of the others are free again.
void StateBook::keep_checkpoints(Sequence& sequence, std::span<CheckpointInFlight> writes, const RowResult& result) {
  size_t num_written = 0;
  for (CheckpointInFlight& write : writes) {
    const bool written = num_written < result.checkpoints.size() && result.checkpoints[num_written] == write.boundary;
    if (!written && !planted(Fault::kCheckpointAssumed)) continue;
    num_written += written ? 1 : 0;
    keep_checkpoint(sequence, write);
  }
  CHECK(num_written == result.checkpoints.size(), "sequence ", sequence.id(), " wrote a checkpoint at ",
        result.checkpoints[num_written], " that no plan has");
}

// The state after `boundary` tokens is in the write's pages: they become the checkpoint of the block that ends there,
// unless that has one or is gone.
void StateBook::keep_checkpoint(Sequence& sequence, CheckpointInFlight& write) {
  Running& run = sequence.running();
  Checkpoints& checkpoints = cache_.checkpoints();
  publish_blocks(sequence, std::min({write.boundary, run.num_confirmed, sequence.num_tokens()}));
  if (run.chain_broken || run.num_chained * kBlockTokens != write.boundary) return;
  if (write.pages.empty() || !cache_.index().contains(run.chain)) return;
  const PlaceId block = run.chain.page;
  const CheckpointRef former = std::exchange(run.newest_checkpoint, checkpoints.at(block));
  const bool former_is_rolling = std::exchange(run.newest_is_rolling, false);
  if (run.newest_checkpoint.serial == 0) {
    run.newest_checkpoint = checkpoints.attach(block, std::exchange(write.pages, {}));
    run.newest_is_rolling = write.is_rolling;
    ++totals_.writes;
  }
  if (!checkpoints.contains(former)) return;
  former_is_rolling ? checkpoints.drop(former.block) : checkpoints.supersede(former);
}

void StateBook::publish_blocks(Sequence& sequence, int32_t num_tokens) {
  if (!rules_.config.prefix_caching) return;
  const bool outputs_too = !rules_.is_recurrent() || !rules_.config.deterministic;
  cache_.publish_blocks(sequence, outputs_too ? num_tokens : std::min(num_tokens, num_chunked(sequence)));
}

// The checkpoint that goes on from it survives longest, then its blocks from the first, so that eviction takes the last
// blocks and with them their checkpoint first.
std::vector<PageHandle> StateBook::take_all_pages(Running& run) {
  if (!rules_.is_recurrent()) return std::exchange(run.pages, {});
  std::vector<PageHandle> handles;
  handles.reserve(run.pages.size() + 2 * run.state_pages.size());
  Checkpoints& checkpoints = cache_.checkpoints();
  if (checkpoints.contains(run.newest_checkpoint)) checkpoints.share(run.newest_checkpoint, handles);
  std::move(run.pages.begin(), run.pages.end(), std::back_inserter(handles));
  if (!planted(Fault::kStateFreeUnderFlight))
    std::move(run.state_pages.begin(), run.state_pages.end(), std::back_inserter(handles));
  return handles;
}

}  // namespace perigee

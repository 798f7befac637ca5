// StateBook: the recurrent state of sequences, and its checkpoints: which are written, copied from and kept.
//
// Without recurrent layers it has nothing to do. When checkpoints are worth their pages is CheckpointPolicy's to say.
#pragma once

#include <span>
#include <vector>

#include "control/plan_draft.h"
#include "control/prefix_cache.h"
#include "control/scheduler_rules.h"

namespace perigee {

class StateBook {
 public:
  StateBook(const SchedulerRules& rules, PrefixCache& cache) : rules_(rules), cache_(cache) {}

  // How much of its input chunks compute. The state after a chunk differs in its last bits from the state after the
  // same tokens one by one. So in deterministic mode outputs stay out of the cache, and what a preempted sequence had
  // given runs again as it ran at first.
  int32_t num_chunked(const Sequence& sequence) const;
  // Where a chunk from `first` on ends at the latest.
  int32_t chunk_end(const Sequence& sequence, int32_t first) const;

  // The state of a sequence that starts: the one that it brings; else a copy of the checkpoint, whose pages are held
  // until the plan returns; zeros without one.
  void start(Sequence& sequence, std::vector<PageHandle> checkpoint, SequenceStart& start, StateTraffic& traffic);

  // Asks for the checkpoints that a row may reach. Best effort: they may evict what nobody uses, but leave a page for
  // each running sequence and preempt none.
  void plan_checkpoints(Sequence& sequence, const PlanRow& row, int32_t num_running, PlanDraft& draft);
  // Those of a row's checkpoints that were written stay at their blocks; the pages of the others are free again.
  void keep_checkpoints(Sequence& sequence, std::span<CheckpointInFlight> writes, const RowResult& result);

  // Publishes the full blocks of its first num_tokens tokens, as far as a later sequence may hit them.
  void publish_blocks(Sequence& sequence, int32_t num_tokens);

  // All handles of a sequence that stops, in the order in which they should survive.
  std::vector<PageHandle> take_all_pages(Running& run);

  struct Totals {
    int64_t writes = 0, hits = 0, skips = 0;
  };
  const Totals& totals() const { return totals_; }

 private:
  void plan_chunk_checkpoints(Sequence& sequence, const PlanRow& row, int32_t num_that_fit, PlanDraft& draft);
  void write_checkpoint(Sequence& sequence, PositionRange bounds, bool is_rolling, PlanDraft& draft);
  void keep_checkpoint(Sequence& sequence, CheckpointInFlight& write);

  const SchedulerRules& rules_;
  PrefixCache& cache_;
  Totals totals_;
};

}  // namespace perigee

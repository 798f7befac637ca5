// FakeWorker: hands without a device. It executes plans on the hash-chain model with real pages and block tables.
//
// Rows of plans in flight run one by one in any order that keeps the rows of one slot in order: later than they were
// launched, interleaved with rows of the other plan, at the latest when their plan's result is collected. What a page
// held before is poisoned when a new owner gets it. Pages are untyped words: a page that is read as what it is not
// gives other values. The recurrent state is committed late, as a device would: a decode row's own token waits in a
// ring.
//
// A worker is a rank, or the group of ranks with one rank for each dcp index, which run a row together: each of these
// has a pool of its own, and together they read a sequence's blocks in their order.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "control/plan.h"
#include "sim/chain_model.h"
#include "sim/judge.h"

namespace perigee::sim {

class FakeWorker {
 public:
  // What the sequence gives alone: the drafter's guesses are mostly that.
  using Oracle = std::function<const std::vector<int32_t>&(SequenceId)>;

  // num_pages at each of dcp_size indices.
  FakeWorker(const Judge& judge, Oracle oracle, int32_t dcp_size, int32_t num_pages, int32_t num_slots)
      : judge_(judge),
        oracle_(std::move(oracle)),
        pools_(static_cast<size_t>(dcp_size), Pool(static_cast<size_t>(num_pages))),
        slots_(static_cast<size_t>(num_slots)) {}

  void launch(const StepPlan& plan);
  void set_masks(std::shared_ptr<const StepMasks> masks);  // its masked rows run after that
  void run_one(Rng& rng);                                  // one row that may run now, if there is one
  StepResult collect(StepId step);                         // runs what is left of the step
  SequenceId writer(const Placement& place) const;         // who wrote the page last, as far as rows have run
  // After how many tokens the page is the state, as its number `index`; -1 where it is no such thing.
  int32_t state_position(const Placement& place, size_t index) const;

  // The pool of a dcp index: page after page, kBlockTokens words each. Who fills a page from elsewhere says so.
  uint64_t* memory(int32_t dcp_index) { return pools_[static_cast<size_t>(dcp_index)].words.data()->data(); }
  void filled(const Placement& place, SequenceId writer);
  void filled_state(const Placement& place, SequenceId writer, int32_t position, size_t index);

 private:
  struct Page {
    SequenceId writer;
    int32_t state_position = -1;
    size_t state_index = 0;
  };
  using Words = std::array<uint64_t, kBlockTokens>;
  struct Pool {
    explicit Pool(size_t num_pages) : pages(num_pages), words(num_pages) {}
    std::vector<Page> pages;
    std::vector<Words> words;
  };
  struct Slot {
    SequenceStart start;
    std::vector<Placement> table;  // by block
    int32_t length = 0;
    int32_t num_outputs = 0;
    int32_t last_id = -1;       // sampled and not yet computed
    DraftIds drafts;            // guesses of what follows it
    int32_t committed = 0;      // the state pages hold the state after so many tokens
    std::vector<int32_t> ring;  // the tokens after those
  };
  struct Work {  // what a plan says about one slot
    StepId step;
    std::vector<SequenceStart> starts;
    std::vector<BlockAppend> appends;
    PlanRow row;
    std::vector<int32_t> tokens;
    std::vector<CheckpointWrite> checkpoints;
    std::shared_ptr<const StepMasks> masks;  // null: not there yet, or not needed
    RowResult result;
    bool done = false;
  };

  const Page& page(const Placement& place) const;
  Page& page(const Placement& place) { return const_cast<Page&>(std::as_const(*this).page(place)); }
  const Words& words(const Placement& place) const;
  Words& words(const Placement& place) { return const_cast<Words&>(std::as_const(*this).words(place)); }
  void run(Work& work);
  void append(Slot& slot, const BlockAppend& append);
  uint64_t& entry(Slot& slot, int32_t position);
  Reading read_cache(Slot& slot);
  void compute(Slot& slot, Work& work);
  void verify(Slot& slot, Work& work);
  void sample(Slot& slot, const Context& context, Work& work);
  DraftIds guess(const Slot& slot) const;

  void start_state(Slot& slot);
  State read_state(const std::vector<Placement>& pages) const;
  void write_state(Slot& slot, const std::vector<Placement>& pages, const State& state);
  State commit_state(Slot& slot, Work& work);
  bool may_run(size_t index) const;

  const Judge& judge_;
  const Oracle oracle_;
  std::vector<Pool> pools_;  // by dcp index
  std::vector<Slot> slots_;
  std::deque<Work> queue_;
};

}  // namespace perigee::sim

// FakeWorker: hands without a device. It executes plans on the hash-chain model with real pages and block tables.
//
// Rows of plans in flight run one by one in any order that keeps the rows of one slot in order: later than they were
// launched, interleaved with rows of the other plan, at the latest when their plan's result is collected. What a page
// held before is poisoned when a new owner gets it.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "base/rng.h"
#include "control/plan.h"
#include "sim/chain_model.h"
#include "sim/judge.h"

namespace perigee::sim {

class FakeWorker {
 public:
  FakeWorker(const Judge& judge, int32_t num_pages, int32_t num_slots)
      : judge_(judge), pages_(static_cast<size_t>(num_pages)), slots_(static_cast<size_t>(num_slots)) {}

  void launch(const StepPlan& plan);
  void run_one(Rng& rng);                // one row that may run now, if there is one
  StepResult collect(StepId step);       // runs what is left of the step
  SequenceId writer(PageId page) const;  // who wrote the page last, as far as rows have run

 private:
  struct Page {
    SequenceId writer;
    std::array<uint64_t, kBlockTokens> entries;
  };
  struct Slot {
    SequenceStart start;
    std::vector<PageId> table;
    int32_t length = 0;
    int32_t num_outputs = 0;
    int32_t last_id = -1;  // sampled and not yet computed
  };
  struct Work {  // what a plan says about one slot
    StepId step;
    std::vector<SequenceStart> starts;
    std::vector<BlockAppend> appends;
    PlanRow row;
    std::vector<int32_t> tokens;
    RowResult result;
    bool done = false;
  };

  void run(Work& work);
  void append(Slot& slot, const BlockAppend& append);
  uint64_t& entry(Slot& slot, int32_t position);
  Reading read_cache(Slot& slot);
  void compute(Slot& slot, Work& work);
  void sample(Slot& slot, const Reading& reading, RowResult& result);
  bool is_first_of_slot(size_t index) const;

  const Judge& judge_;
  std::vector<Page> pages_;
  std::vector<Slot> slots_;
  std::deque<Work> queue_;
};

}  // namespace perigee::sim

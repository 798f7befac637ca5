// Harness: one real scheduler with fake workers, and the checks of what it says: the invariants INV-1 ... INV-11 of
// docs/invariants.md as far as they apply to one engine, after every event. Whoever drives it draws requests and times.
#pragma once

#include <array>
#include <bitset>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "control/scheduler.h"
#include "sim/chain_model.h"
#include "sim/fake_worker.h"
#include "sim/judge.h"

namespace perigee::sim {

struct Counts {
  int64_t steps = 0, preemptions = 0, cancels_in_flight = 0, reordered = 0, hits = 0;
  int64_t requests = 0, ids = 0, resumes_hit = 0, expired = 0, errors = 0;
  int64_t hybrid_steps = 0, checkpoint_writes = 0, checkpoint_hits = 0, checkpoint_evictions = 0, checkpoint_skips = 0;
  int64_t lost_writes = 0;      // checkpoints whose sequence had stopped when they were written
  int64_t shared_copies = 0;    // checkpoints hit while a plan in flight copied them already
  int64_t rows_of_several = 0;  // rows that write more than one checkpoint
  int64_t most_overtaken = 0;   // Request::num_overtaken
  int64_t verify_rows = 0, all_accepted = 0, none_accepted = 0, late_ranks = 0, lost_ranks = 0;
  int64_t tail_starts = 0, tails_given_up = 0;  // of imported tails
  int64_t unwritten = 0;                        // checkpoints asked for of rows that did not reach them
  int64_t dealt = 0, spilled = 0;  // blocks at dcp > 1; of them those with fewer of their sequence where pools are full
  int64_t dealt_in_turn = 0;       // and those of deterministic seeds
  int64_t masked_rows = 0, masked_verify_rows = 0;
  int64_t masks_missing = 0;  // masked rows whose sequence had stopped when their masks were made
  uint64_t log_hash = 0;

  void add(const Counts& other);
};

class Harness {
 public:
  struct Request {
    Submit submit;
    int32_t max_outputs = 0;
    Expected expected;
    std::vector<int32_t> ids;
    int32_t num_prompt_logprobs = 0;
    bool cancelled = false, ended = false;
    bool may_fail = false;  // its import has failed, and the policy lets that be its end
    int32_t num_lives = 0;
    int32_t num_overtaken = 0;  // plans in a row that have no row of it and one of a sequence that is served later
  };

  Harness(const Judge& judge, const Rng& rng, const SchedulerConfig& config, int32_t num_ranks);
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;
  virtual ~Harness() = default;

 protected:
  static constexpr int32_t kMaxPages = 128;
  using PageSet = std::bitset<kMaxPages>;  // by bit_of()
  struct Flight {
    StepPlan plan;
    PageSet pages;   // every page that the plan can reach
    PageSet copied;  // of those: of checkpoints that it copies from
    bool awaits_masks = false;
  };
  struct SlotView {  // a slot's block table and state pages as the plans describe them
    SequenceId sequence;
    PageSet pages;
    std::array<int32_t, kMaxDcpSize> num_blocks = {};  // at each dcp index
  };

  // harness.cc: events
  void submit(Submit submit);  // of the next sequence
  void cancel(SequenceId sequence, FinishReason reason);
  void plan_step();
  void run_ranks();
  void give_masks();
  void deliver();
  StepResult join(StepId step);
  void count_verify(const StepPlan& plan, const StepResult& result);
  virtual void see_update(const SequenceUpdate&) {}  // each, once it was checked

  // harness_handover.cc: pages that leases hold and imports fill
  void take_imports();
  void begin_import(const Import& import);
  void end_import(SequenceId sequence, ImportEnd end);  // before the scheduler hears of it
  void check_lease(const Lease& lease);
  void begin_lease(const std::shared_ptr<const Lease>& lease);
  void take_growth();
  void grow_lease(const LeaseGrowth& growth);
  void end_lease(SequenceId lease);  // before the scheduler hears of it
  bool is_leased(size_t bit) const { return leased_[bit] > 0; }
  PageSet filling() const;          // by imports
  PageSet held_for_others() const;  // these, and leased ones

  // checks.cc
  void check_plan(const StepPlan& plan);
  void check_row(const StepPlan& plan, const PlanRow& row) const;
  void check_start(const SequenceStart& start);
  void check_state(const SequenceStart& start);
  const Import* tail_of(const SequenceStart& start) const;
  void check_logit_rows(const StepPlan& plan) const;
  bool waits_for_logits(int64_t sequence, const StepPlan& plan) const;
  void check_checkpoints(const StepPlan& plan);
  void check_checkpoint(const StepPlan& plan, const CheckpointWrite& write) const;
  void check_pages(const StepPlan& plan);
  void check_fresh(const Placement& place, PageSet& fresh) const;
  void check_salt(const Placement& place, SequenceId reader) const;
  void check_everywhere(const std::vector<Placement>& places, const char* what) const;
  PageSet maybe_held() const;
  void check_balance(const StepPlan& plan, const PageSet& held);
  PageSet reach(const StepPlan& plan) const;
  size_t bit_of(const Placement& place) const;
  bool is_before(int64_t a, int64_t b) const;
  bool is_served(int64_t sequence, const StepPlan& plan) const;
  void check_queue(const StepPlan& plan) const;
  void check_progress(const StepPlan& plan);
  void take_updates();
  void take_update(const SequenceUpdate& update);
  void check_finish(const Request& request, const SequenceUpdate& update) const;
  void check_books();
  void check_deadlines() const;
  void check_end();
  void note(uint64_t value) { counts_.log_hash = mix64(counts_.log_hash * 31 + value); }
  bool has_row_in_flight(SequenceId sequence) const;
  int32_t num_state_pages() const { return config_.state_pages * config_.dcp_size; }  // of a sequence, at all indices

  Judge judge_;
  Rng rng_;
  const SchedulerConfig config_;
  Scheduler scheduler_;
  std::vector<FakeWorker> ranks_;
  std::vector<StepResult> unchecked_;  // of a join that forgot the last rank
  size_t late_rank_ = 0;               // runs nothing before it must; 0: none
  double now_s_ = 1.0;
  std::vector<Request> requests_;  // by sequence id
  std::vector<int64_t> live_;
  std::deque<Flight> flights_;
  std::vector<SlotView> slots_;
  PageSet saved_;  // pages whose last owner was a checkpoint: a sequence that stops holds its newest one for a while
  std::vector<Import> new_imports_;       // for whoever fills them
  std::map<SequenceId, Import> imports_;  // that have not ended
  std::map<SequenceId, Import> tails_;    // that have arrived: a start from the tail has these pages
  std::map<SequenceId, LeaseGrowth> leases_;
  std::vector<LeaseGrowth> new_growth_;         // for whoever lends them
  std::array<int32_t, kMaxPages> leased_ = {};  // how many leases hold the page
  PageSet fill_or_lease_;                       // held_for_others() when the newest plan came
  Counts counts_;
};

}  // namespace perigee::sim

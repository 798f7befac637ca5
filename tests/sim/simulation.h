// Simulation: the real scheduler, fake workers, a virtual clock and a seed.
//
// One seed decides everything: whether the model is recurrent, pool sizes, limits, prompts (which share prefixes),
// salts, n > 1, priorities, deadlines, cancellations, and when each row runs and each result arrives. After every event
// the invariants INV-1 ... INV-11 of docs/invariants.md are checked as far as they apply to one engine; all that
// happens is folded into one hash, so that a replay can be compared.
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

// Ranks that execute every plan, each at its own pace, and the most drafts of a verify row. Ranks may be late by as
// long as plans may wait, and one may be lost.
struct Shape {
  int32_t num_ranks = 1, num_drafts = 0;
  int32_t max_dcp = 1;  // a seed draws its dcp size: a power of two, this at most. A rank is then a group of so many
};

struct Counts {
  int64_t steps = 0, preemptions = 0, cancels_in_flight = 0, reordered = 0, hits = 0;
  int64_t requests = 0, ids = 0, resumes_hit = 0, expired = 0, errors = 0;
  int64_t hybrid_steps = 0, checkpoint_writes = 0, checkpoint_hits = 0, checkpoint_evictions = 0, checkpoint_skips = 0;
  int64_t lost_writes = 0;      // checkpoints whose sequence had stopped when they were written
  int64_t shared_copies = 0;    // checkpoints hit while a plan in flight copied them already
  int64_t rows_of_several = 0;  // rows that write more than one checkpoint
  int64_t most_overtaken = 0;   // Request::num_overtaken
  int64_t verify_rows = 0, all_accepted = 0, none_accepted = 0, late_ranks = 0, lost_ranks = 0;
  int64_t unwritten = 0;           // checkpoints asked for of rows that did not reach them
  int64_t dealt = 0, spilled = 0;  // blocks at dcp > 1; of them those with fewer of their sequence where pools are full
  int64_t dealt_in_turn = 0;       // and those of deterministic seeds
  int64_t masked_rows = 0, masked_verify_rows = 0;
  int64_t masks_missing = 0;  // masked rows whose sequence had stopped when their masks were made
  uint64_t log_hash = 0;

  void add(const Counts& other);
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed, const Shape& shape = {});
  Counts run();  // ends the process when an invariant does not hold

 private:
  struct Request {
    Submit submit;
    int32_t max_outputs = 0;
    Expected expected;
    std::vector<int32_t> ids;
    int32_t num_prompt_logprobs = 0;
    bool cancelled = false, ended = false;
    int32_t num_lives = 0;
    int32_t num_overtaken = 0;  // plans in a row that have no row of it and one of a sequence that is served later
  };
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

  // simulation.cc: events
  SchedulerConfig draw_config(const Shape& shape);
  void draw_recurrent(SchedulerConfig& config, int32_t& num_blocks);
  void draw_dcp(int32_t max_dcp, int32_t num_blocks, SchedulerConfig& config) const;
  void tick();
  void submit_some();
  void submit_one(const std::shared_ptr<const std::vector<int32_t>>& prompt, const std::string& salt,
                  SequenceId leader);
  std::shared_ptr<const std::vector<int32_t>> draw_prompt();
  void draw_next_turn(std::shared_ptr<const std::vector<int32_t>>& prompt, std::string& salt);
  std::shared_ptr<const SamplingParams> draw_sampling(int32_t num_prompt);
  int32_t draw_length();
  void cancel_some();
  void plan_step();
  void run_ranks();
  void give_masks();
  void deliver();
  StepResult join(StepId step);
  void lose_rank();
  void count_verify(const StepPlan& plan, const StepResult& result);

  // checks.cc
  void check_plan(const StepPlan& plan);
  void check_row(const StepPlan& plan, const PlanRow& row) const;
  void check_start(const SequenceStart& start);
  void check_state(const SequenceStart& start);
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
  bool queue_is_full() const { return scheduler_.gauges().waiting >= queue_length_; }

  Judge judge_;
  Rng rng_;
  SchedulerConfig config_;
  Scheduler scheduler_;
  std::vector<FakeWorker> ranks_;
  std::vector<StepResult> unchecked_;  // of a join that forgot the last rank
  size_t late_rank_ = 0;               // runs nothing before it must; 0: none
  bool lost_ = false;
  double now_s_ = 1.0;
  std::vector<Request> requests_;  // by sequence id
  std::vector<int64_t> live_;
  std::deque<Flight> flights_;
  std::vector<SlotView> slots_;
  PageSet saved_;  // pages whose last owner was a checkpoint: a sequence that stops holds its newest one for a while
  int32_t num_to_submit_ = 0, longest_prompt_ = 0;
  int32_t queue_length_ = 0;  // the engine in front lets no more in
  double arrival_chance_ = 0, cancel_chance_ = 0, deliver_chance_ = 0, long_outputs_chance_ = 0, turn_chance_ = 0;
  Counts counts_;
};

}  // namespace perigee::sim

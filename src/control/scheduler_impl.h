// The scheduler's state and its steps, split over scheduler{,_plan,_apply}.cc. Not for other folders.
//
// A sequence is in exactly one of `waiting_` and `running_` until it ends. `slots_` names the sequence whose rows the
// slot may have; it is cleared when the sequence stops running, so that late rows find nobody, and the slot itself is
// free again only when no plan in flight touches it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/block_pool.h"
#include "control/prefix_index.h"
#include "control/quarantine.h"
#include "control/scheduler.h"
#include "control/sequence.h"

namespace perigee {

struct Scheduler::Impl {
  explicit Impl(const SchedulerConfig& config);

  // scheduler.cc: life and death of sequences
  bool submit(Submit submit);
  void cancel(const Cancel& cancel);
  void end(Sequence& sequence, FinishReason reason, SequenceUpdate& update);
  void stop_running(Sequence& sequence);
  void enqueue(Sequence& sequence);
  void release_followers(Sequence& leader);
  void expire(double now_s);
  SequenceUpdate& add_update(const Sequence& sequence);
  int32_t max_outputs(int64_t num_prompt, int64_t max_tokens) const;
  SchedulerGauges gauges() const;
  void check_integrity() const;
  void check_sequence(const Sequence& sequence) const;

  // scheduler_plan.cc: the next step
  struct Draft {
    StepPlan plan;
    int32_t budget_tokens = 0;
  };
  std::optional<StepPlan> next_plan(double now_s);
  void plan_decodes(Draft& draft);
  void plan_prefills(Draft& draft);
  void plan_admissions(Draft& draft);
  bool ensure_page(Sequence& sequence, Draft& draft);
  void preempt(Sequence& sequence);
  bool admit(Sequence& sequence, Draft& draft);
  int32_t match_prefix(Sequence& sequence);
  void start(Sequence& sequence, Draft& draft);
  int32_t chunk_tokens(const Sequence& sequence, int32_t budget_tokens) const;
  void add_prefill_row(Sequence& sequence, int32_t num_tokens, Draft& draft);
  void add_decode_row(Sequence& sequence, Draft& draft);
  void add_row(Sequence& sequence, const PlanRow& row, Draft& draft);
  void append_page(Sequence& sequence, PageHandle page, Draft& draft);
  StepPlan launch(Draft draft);

  // scheduler_apply.cc: a step's result
  struct InFlight {
    StepId step;  // not valid: nothing in flight here
    std::vector<PlanRow> rows;
    std::optional<StepResult> early;  // came before the result of the step before it
  };
  void apply(const StepResult& result);
  void digest(InFlight& flight, const StepResult& result);
  void accept_row(Sequence& sequence, const PlanRow& row, const RowResult& result);
  void accept_prompt_logprobs(Sequence& sequence, const PlanRow& row, const RowResult& result);
  void advance(Sequence& sequence, const PlanRow& row, const RowResult& result);
  void confirm_prompt(Sequence& sequence);
  std::optional<FinishReason> append_ids(Sequence& sequence, const RowResult& result, SequenceUpdate& update);
  void publish_blocks(Sequence& sequence, int32_t num_tokens);

  InFlight& flight(StepId step) { return flights_[static_cast<size_t>(step.value % kMaxPlansInFlight)]; }
  static uint32_t plan_bit(StepId step) { return 1u << (step.value % kMaxPlansInFlight); }
  int32_t plans_in_flight() const { return static_cast<int32_t>(next_step_.value - oldest_step_.value); }
  Sequence*& at_slot(SlotId slot) { return slots_[static_cast<size_t>(slot.value)]; }

  const SchedulerConfig config_;
  const int32_t hit_blocks_;  // prefix hits are multiples of this many blocks
  PrefixIndex index_;
  BlockPool pool_;
  Quarantine quarantine_;

  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;  // for events only, never on the step path
  std::vector<Sequence*> waiting_;                                       // both in order of service
  std::vector<Sequence*> running_;
  std::vector<Sequence*> slots_;
  std::vector<SlotId> free_slots_;

  std::array<InFlight, kMaxPlansInFlight> flights_;
  StepId oldest_step_{0};  // [oldest, next) are in flight
  StepId next_step_{0};

  // The head of the queue did not fit with fewer available pages than these: not worth another look before.
  SequenceId blocked_;
  int32_t blocked_pages_ = 0;

  double next_deadline_s_;  // no deadline of a live sequence is earlier
  std::vector<SequenceUpdate> updates_;
  SchedulerGauges totals_;  // its counters only
  int64_t num_accepted_ = 0, num_ended_ = 0;
};

}  // namespace perigee

// The scheduler's state and its steps, split over scheduler{,_plan,_apply,_state}.cc. Not for other folders.
//
// A sequence is in exactly one of `waiting_` and `running_` until it ends. `slots_` names the sequence whose rows the
// slot may have; it is cleared when the sequence stops running, so that late rows find nobody, and the slot itself is
// free again only when no plan in flight touches it.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/block_pool.h"
#include "control/checkpoint_policy.h"
#include "control/checkpoints.h"
#include "control/prefix_index.h"
#include "control/prefix_match.h"
#include "control/quarantine.h"
#include "control/scheduler.h"
#include "control/sequence.h"

namespace perigee {

struct Scheduler::Impl {
  explicit Impl(const SchedulerConfig& config);

  // scheduler.cc: life and death of sequences
  void submit(Submit submit);
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
  void check_some(int32_t num_pages);
  void check_lists() const;
  void check_sequence(const Sequence& sequence) const;
  void check_pages(int32_t first, int32_t end) const;
  void forget_block(PageId page);
  void forget_blocks(const Sequence& sequence);
  void page_evicted(PageId page);

  // What a plan in flight does with checkpoints: writes these, at a boundary of the sequence ...
  struct WriteInFlight {
    SlotId slot;
    SequenceId sequence;
    int32_t boundary = 0;
    bool is_turn = false;
    std::vector<PageHandle> pages;
  };
  struct StateTraffic {
    std::vector<WriteInFlight> writes;  // in the order of the plan's checkpoints
    std::vector<PageHandle> copied;     // ... and copies from these
  };

  // scheduler_plan.cc: the next step
  struct Draft {
    StepPlan plan;
    StateTraffic traffic;
    int32_t budget_tokens = 0;
    int32_t prompt_logprob_tokens = kPromptLogprobTokens;  // that are left
  };
  struct Hit {  // the cached prefix that a sequence would start from; holds nothing yet
    int32_t num_blocks = 0;
    int32_t num_matched = 0;     // blocks that are cached, whether or not a checkpoint lets a hit end there
    int32_t num_idle_pages = 0;  // of its pages, its checkpoint's too, those that are available to others
    CheckpointRef checkpoint;
  };
  std::optional<StepPlan> next_plan(double now_s);
  void plan_decodes(Draft& draft);
  void plan_prefills(Draft& draft);
  void plan_admissions(Draft& draft);
  bool ensure_page(Sequence& sequence, Draft& draft);
  void preempt(Sequence& sequence);
  bool admit(Sequence& sequence, Draft& draft);
  void match_prefix(const Sequence& sequence);
  Hit find_hit() const;
  std::vector<PageHandle> take_hit(Sequence& sequence, const Hit& hit);
  void start(Sequence& sequence, const Hit& hit, Draft& draft);
  bool waits_for_logits(const Sequence& sequence, const Draft& draft) const;
  int32_t chunk_tokens(const Sequence& sequence, const Draft& draft) const;
  void add_prefill_row(Sequence& sequence, int32_t num_tokens, Draft& draft);
  void add_row(Sequence& sequence, const RowWork& work, Draft& draft);
  void append_page(Sequence& sequence, PageHandle page, Draft& draft);
  StepPlan launch(Draft draft);

  // scheduler_state.cc: the recurrent state and its checkpoints
  bool is_recurrent() const { return config_.state_pages > 0; }
  bool keeps_checkpoints() const { return is_recurrent() && config_.prefix_caching; }
  int32_t num_chunked(const Sequence& sequence) const;
  int32_t chunk_stop(const Sequence& sequence) const;
  bool pages_come_back(const Draft& draft) const;
  void start_state(Sequence& sequence, std::vector<PageHandle> checkpoint, SequenceStart& start, Draft& draft);
  void plan_checkpoints(Sequence& sequence, const PlanRow& row, Draft& draft);
  void plan_chunk_checkpoints(Sequence& sequence, const PlanRow& row, Draft& draft);
  int32_t num_checkpoints_that_fit() const;
  void write_checkpoint(Sequence& sequence, PositionRange bounds, bool is_turn, Draft& draft);
  void keep_checkpoints(Sequence& sequence, std::span<WriteInFlight> writes, const RowResult& result);
  void keep_checkpoint(Sequence& sequence, WriteInFlight& write);
  std::vector<PageHandle> take_pages(PageOwner owner, int32_t count);
  std::vector<PageHandle> take_all_pages(Sequence& sequence);

  // scheduler_apply.cc: a step's result
  struct InFlight {
    StepId step;  // not valid: nothing in flight here
    std::vector<PlanRow> rows;
    StateTraffic traffic;
    std::optional<StepResult> early;  // came before the result of the step before it
  };
  void apply(const StepResult& result);
  void digest(InFlight& flight, const StepResult& result);
  void accept_row(Sequence& sequence, const PlanRow& row, const RowResult& result, std::span<WriteInFlight> writes);
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
  const int32_t hit_blocks_;     // prefix hits are multiples of this many blocks
  const bool strict_alignment_;  // no chunk ends elsewhere but where its input does
  const CheckpointPolicy policy_;
  PrefixIndex index_;
  BlockPool pool_;
  Checkpoints checkpoints_;
  PrefixMatch match_;  // of the sequence that was last considered for admission
  Quarantine quarantine_;

  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;  // for events only, never on the step path
  std::vector<Sequence*> waiting_;                                       // both in order of service
  std::vector<Sequence*> running_;
  std::vector<Sequence*> slots_;
  std::vector<SlotId> free_slots_;

  std::array<InFlight, kMaxPlansInFlight> flights_;
  StepId oldest_step_{0};  // [oldest, next) are in flight
  StepId next_step_{0};

  double next_deadline_s_;  // no deadline of a live sequence is earlier
  std::vector<SequenceUpdate> updates_;
  SchedulerGauges totals_;  // its counters only
  int64_t num_accepted_ = 0, num_ended_ = 0;
  int32_t next_to_check_ = 0;  // page
};

}  // namespace perigee

// The scheduler's parts, and what is left when they have theirs: the lists of sequences, slots, deadlines, updates.
// Split over scheduler{,_apply,_handover,_masks,_checks}.cc. Not for other folders.
//
//   Admission      may a waiting sequence start, and from which cached prefix
//   StateBook      recurrent states and their checkpoints
//   PrefixCache    pages, published blocks, eviction
//   HandoverBook   what other nodes read here, and what comes from them
//   PlansInFlight  what ranks execute, what it holds, the order of results
//
// A sequence is in exactly one of `waiting_`, `awaiting_` and `running_` until it ends. `slots_` names the sequence
// whose rows the slot may have; it is cleared when the sequence stops running, so that late rows find nobody, and the
// slot itself is free again only when no plan in flight touches it.
#pragma once

#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "control/admission.h"
#include "control/handover_book.h"
#include "control/plan_draft.h"
#include "control/plans_in_flight.h"
#include "control/prefix_cache.h"
#include "control/scheduler.h"
#include "control/scheduler_rules.h"
#include "control/sequence.h"
#include "control/state_book.h"

namespace perigee {

struct Scheduler::Impl {
  explicit Impl(const SchedulerConfig& config);

  // scheduler.cc: life and death of sequences
  void submit(Submit submit);
  void cancel(const Cancel& cancel);
  void end(Sequence& sequence, FinishReason reason, SequenceUpdate& update);
  void stop_running(Sequence& sequence);
  void release_followers(Sequence& leader);
  void expire(double now_s);
  SequenceUpdate& add_update(const Sequence& sequence);
  SchedulerGauges gauges() const;

  // scheduler_handover.cc
  bool begin_import(Sequence& sequence);
  void end_import(SequenceId id, ImportEnd end, const std::string& why);
  void give_way(double now_s);

  // The next step
  std::optional<StepPlan> next_plan(double now_s);
  PlanDraft new_draft();
  void plan_decodes(PlanDraft& draft);
  void plan_prefills(PlanDraft& draft);
  void plan_admissions(PlanDraft& draft);
  int32_t num_drafts(const Sequence& sequence, const PlanDraft& draft) const;
  bool ensure_pages(Sequence& sequence, int32_t num_tokens, PlanDraft& draft);
  Sequence& victim_for(const Sequence& sequence);
  void preempt(Sequence& sequence);
  bool admit(Sequence& sequence, PlanDraft& draft);
  void start(Sequence& sequence, const Hit& hit, PositionRange chunks, PlanDraft& draft);
  bool waits_for_logits(const Sequence& sequence, const PlanDraft& draft) const;
  int32_t chunks_end(const Sequence& sequence, int32_t first) const;
  int32_t chunk_tokens(const Sequence& sequence, int32_t first, int32_t end, const PlanDraft& draft) const;
  void add_prefill_row(Sequence& sequence, int32_t num_tokens, PlanDraft& draft);
  void add_row(Sequence& sequence, const RowWork& work, PlanDraft& draft);

  // scheduler_apply.cc: a step's result
  void apply(const StepResult& result);
  void prefetch_sequences(std::span<const PlanRow> rows);
  void digest(PlansInFlight::Flight& flight, const StepResult& result);
  void accept_row(Sequence& sequence, const PlanRow& row, const RowResult& result,
                  std::span<CheckpointInFlight> writes);
  void fail(Sequence& sequence, const RowResult& result);
  void accept_prompt_logprobs(Sequence& sequence, const PlanRow& row, const RowResult& result);
  void advance(Sequence& sequence, const PlanRow& row, const RowResult& result);
  void count_drafts(const RowResult& result);
  void confirm_prompt(Sequence& sequence);
  std::optional<FinishReason> append_ids(Sequence& sequence, const RowResult& result, SequenceUpdate& update);

  // scheduler_masks.cc: rows under a constraint
  static void leave_min_tokens_to_masks(Sequence& sequence);
  void take_mask_jobs(PlansInFlight::Flight& flight, std::vector<MaskJob>& jobs);
  MaskJob mask_job(const PlanRow& row, Sequence& sequence) const;

  // scheduler_checks.cc
  void check_integrity() const;
  void check_some(int32_t num_pages);
  void check_lists() const;
  void check_running(const Sequence& sequence) const;
  void check_pages(int32_t first, int32_t end) const;

  Sequence*& at_slot(SlotId slot) { return slots_[static_cast<size_t>(slot.value)]; }

  const SchedulerRules rules_;
  PrefixCache cache_;
  StateBook states_;
  Admission admission_;
  HandoverBook handovers_;
  PlansInFlight plans_;

  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;  // for events only, never on the step path
  std::vector<Sequence*> waiting_;                                       // both in order of service
  std::vector<Sequence*> running_;
  std::vector<Sequence*> awaiting_;  // in any order
  std::vector<Sequence*> slots_;
  std::vector<SlotId> free_slots_;

  double next_deadline_s_;   // no deadline of a live sequence is earlier
  double standing_since_s_;  // when give_way() first saw that only another node can go on; else never
  std::vector<SequenceUpdate> updates_;
  std::vector<Import> imports_;        // to be begun
  std::vector<StepPlan> spare_plans_;  // whose memory the next ones use
  SchedulerGauges totals_;             // its counters only
  int64_t num_accepted_ = 0, num_ended_ = 0;
  int32_t next_to_check_ = 0;  // page
};

bool in_order_of_service(const Sequence* a, const Sequence* b);
void insert_in_order(std::vector<Sequence*>& list, Sequence& sequence);

}  // namespace perigee

// Scheduler: the brain. Events in, plans out; no thread, no clock, no device.
//
// Continuous batching with one token budget for prefill and decode, chunked prefill, prefix caching, preemption by
// recomputation, priorities, cancellation and deadlines. Up to two plans are in flight; the pages of a plan in flight
// are never reused before its result arrives (INV-2, docs/invariants.md). A recurrent model's state takes pages of
// the same pool, and its prefix hits end where a checkpoint of the state lies (INV-11).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "control/cache_size.h"
#include "control/constraint.h"
#include "control/handover.h"
#include "control/mask_jobs.h"
#include "control/plan.h"
#include "control/plan_limits.h"
#include "control/prefix_index.h"

namespace perigee {

struct Sequence;

// Pages that an admission leaves available, so that those that run can grow for a while before one must give way.
using AdmissionReserve = int32_t (*)(std::span<Sequence* const> running, int32_t num_pages);
int32_t reserve_page_each(std::span<Sequence* const> running, int32_t num_pages);  // ADR 0006

// What whoever runs the engine may choose, beside the limits of a plan.
struct SchedulingPolicy {
  int32_t max_model_len = 0;            // prompt + outputs of one sequence
  int32_t speculation_max_context = 0;  // tokens up to which a sequence verifies drafts; 0: all
  bool prefix_caching = true;
  int32_t checkpoint_interval_blocks = 64;  // of prompt and output between checkpoints that stay; 0: none (for which
  int32_t checkpoint_rolling_blocks = 4;    // and why see CheckpointPolicy); the same of output, one a sequence
  AdmissionReserve admission_reserve = reserve_page_each;  // null: none
};

// Both of these, and what follows from model and ranks.
struct SchedulerConfig : PlanLimits, SchedulingPolicy {
  int32_t num_pages = 0;            // pool size of a rank, at each dcp index
  int32_t long_prefill_tokens = 0;  // cap of one sequence's chunk; 0: the budget
  int32_t attention_alignment = 1;  // prefill chunks end at multiples of this where they do not end the prompt
  int32_t state_pages = 0;          // of one sequence's recurrent state, at every dcp index; 0: attention alone
  uint64_t hash_seed = 0;           // per process
  int32_t hash_bits = 128;          // fewer only in tests: every output must stay right

  CacheSize cache_size() const {
    return {.pages = num_pages, .state_pages = state_pages, .dcp_size = dcp_size, .dealing = dealing()};
  }
  int32_t max_blocks() const { return static_cast<int32_t>(cache_size().max_blocks()); }
};

// What the constructor requires: the pool, slots and budget exist, and in deterministic mode one aligned chunk fits the
// budget. The error names the field.
Status validate(const SchedulerConfig& config);

struct Submit {
  SequenceId sequence;  // fresh, chosen by the engine
  std::shared_ptr<const std::vector<int32_t>> prompt;
  std::shared_ptr<const SamplingParams> sampling;
  int32_t priority = 0;  // lower runs first
  double arrival_s = 0;
  double deadline_s = 0;                  // 0: none; absolute, same clock as next_plan's now_s
  std::string cache_salt;                 // sequences share prefixes only under the same salt
  std::vector<ExtraKey> extra_keys = {};  // of the first blocks; those after them have none
  int32_t speculation_max_context = -1;   // in place of the policy's; < 0: the policy's
  LeaseWish lease = LeaseWish::kNone;
  int32_t remote_blocks = 0;  // first blocks of the prompt that another node holds for this one
  SequenceId leader;          // valid: same prompt as that sequence (n > 1): waits until its prompt is computed
  std::shared_ptr<const Constraint> constraint = nullptr;  // that its outputs obey; null: none
};

struct Cancel {
  SequenceId sequence;
  FinishReason reason = FinishReason::kCancelled;  // kStop when the server found a stop string
  std::string error = {};                          // with kError
};

// What one sequence gained; the engine pushes it to the sequence's stream.
struct SequenceUpdate {
  SequenceId sequence;
  RowIds ids;
  std::vector<TokenLogprobs> logprobs;
  std::vector<TokenLogprobs> prompt_logprobs;
  std::optional<FinishReason> finish;
  int32_t stop_id = -1;                          // the stop id that ended it, when one did
  int32_t num_cached_tokens = 0;                 // prompt tokens taken from the prefix cache at first admission
  int32_t num_preemptions = 0;                   // so far
  int32_t num_drafts = 0;                        // that were verified for these ids,
  int32_t num_accepted = 0;                      // and how many of the ids they are
  std::string error;                             // with kError
  std::shared_ptr<const Lease> lease = nullptr;  // with `finish`, of LeaseWish::kAtEnd: null without a full block
};

// Of all rows that verified drafts.
struct SpeculationTotals {
  int64_t rows = 0, drafts = 0;                      // drafts: tokens that were verified
  std::array<int64_t, kMaxDrafts> accepted_at = {};  // rows that accepted their draft at this place

  int64_t accepted() const { return std::accumulate(accepted_at.begin(), accepted_at.end(), int64_t{0}); }
};

struct SchedulerGauges {
  int32_t running = 0, waiting = 0, plans_in_flight = 0;
  int32_t free_pages = 0, cached_pages = 0, used_pages = 0, total_pages = 0;  // of all pools; the sum is the total
  int64_t preemptions = 0, prefix_queries = 0, prefix_hits = 0;               // queries and hits in tokens
  int64_t blocks_hashed = 0;                                                  // for the prefix index
  int64_t prompt_tokens = 0, generated_tokens = 0,
          steps = 0;                 // of each sequence: with n choices a prompt counts n times
  int64_t cached_prompt_tokens = 0;  // of prompt_tokens, those taken from the prefix cache

  int32_t latent_pages = 0, state_pages = 0, checkpoint_pages = 0;  // by owner: with free_pages they are the total
  int32_t checkpoints = 0;
  int64_t checkpoint_writes = 0, checkpoint_hits = 0, checkpoint_evictions = 0;
  int64_t checkpoint_skips = 0;             // not written for lack of pages
  int32_t awaiting = 0, leases = 0;         // sequences, on the side that takes and on the one that gives
  int64_t imports = 0, failed_imports = 0;  // that have ended, and of those the ones that did not arrive
  int64_t leases_given_back = 0;            // of waiting sequences, so that another node finds room
  int64_t imported_blocks = 0;              // of those that did
  int64_t not_finite = 0;                   // sequences ended because a logit was NaN or infinite
  SpeculationTotals speculation;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);
  ~Scheduler();

  // The queue has no limit here. A sequence that can never fit the pool or max_model_len is refused by fits().
  void submit(Submit submit);
  bool fits(int64_t num_prompt_tokens, int64_t max_tokens) const;
  void cancel(const Cancel& cancel);
  void apply(const StepResult& result);  // any order; unknown steps are a bug (CHECK), late rows of ended ones are not

  // The next step's plan, or nothing when there is nothing to run or two plans are in flight already.
  std::optional<StepPlan> next_plan(double now_s);

  // Of the oldest plan in flight, once, if it has masked rows: one job for each of them whose sequence still runs. The
  // jobs mean something until the next event. Every step before it has its result, so there are jobs for a plan as soon
  // as it is the oldest: ask after apply() and after next_plan().
  std::optional<StepId> take_mask_jobs(std::vector<MaskJob>& jobs);

  // The memory of a plan whose result is in, for the next one: who gives it back saves next_plan() its allocations.
  void give_back(StepPlan plan);

  // Handovers. An import that is not empty has exactly one end; until then its pages may be written. The growth of
  // leases is to be taken before the updates: it begins before its sequence ends.
  std::vector<Import> take_imports();  // since the last call, one for each sequence with remote_blocks that gets so far
  void end_import(SequenceId sequence, ImportEnd end, const std::string& why = "");
  std::vector<LeaseGrowth> take_lease_growth();  // since the last call, in order
  void release(SequenceId lease);                // ignored where it is gone

  // Updates since the last call, each finished sequence exactly once with `finish` set. The second way reuses the
  // memory of what it replaces.
  std::vector<SequenceUpdate> take_updates();
  void take_updates(std::vector<SequenceUpdate>& updates);

  SchedulerGauges gauges() const;
  bool idle() const;             // nothing waiting, running or in flight
  void check_integrity() const;  // CHECKs INV-1 and friends; linear in the pool
  // The same for the next num_pages pages of the pool, without what must be counted over all of them; linear in those
  // and in the pages that sequences hold.
  void check_some(int32_t num_pages);
  void drop_prefix_cache();

 private:
  friend struct SchedulerBreaker;  // its test
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee

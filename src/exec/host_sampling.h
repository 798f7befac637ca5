// HostSampling: from a step's logits to its result, on the host.
//
// Each rank of a tensor-parallel group has its share of the logits' columns. Slots are dealt to the ranks
// (rank_of_slot): whole rows of logits come to the slot's rank, which alone counts its penalties, samples, and reports
// log-probabilities. A row of which only the largest logit matters stays where it is, and each rank offers its largest.
// One exchange at the end gives every rank all ids, for the next step. A group of one has whole rows and exchanges
// nothing.
//
// A verify row is sampled after each of its tokens as if those before had been rows of their own, up to the first id
// that is not its draft. So it gives what decode rows would give one by one, and a draft d counts with the probability
// p(d) that the model has for it: what rejection sampling comes to where drafts are certain (Leviathan et al. 2023).
#pragma once

#include <span>
#include <vector>

#include "comm/comm.h"
#include "control/plan.h"
#include "exec/batch_builder.h"
#include "exec/sampler.h"
#include "exec/slots.h"

namespace perigee {

class HostSampling {
 public:
  // synthetic_rates: see RankConfig.
  HostSampling(int64_t vocab, Comm& comm, std::vector<float> synthetic_rates = {})
      : comm_(comm), sampler_(vocab), synthetic_rates_(std::move(synthetic_rates)) {}

  // Allowed ids of each plan row; empty: all.
  // Of a verify row those of each place, one after the other: each draft is taken as accepted for those after it.
  using Masks = std::vector<std::span<const uint32_t>>;
  // Fills in a result that has begun, but for its checkpoints. `arena` is the step's. kDeviceLost: as the Comm has it.
  Status sample(const StepPlan& plan, const Tensor& logits, const BatchBuilder& builder, const Masks& masks,
                Arena& arena, Slots& slots, StepResult& result);

 private:
  // What a rank says of a place of a plan row that is sampled.
  struct Pick {
    float logit = 0;  // of a row that its largest logit decides
    int32_t id = 0;
    bool finite = true;
  };
  // How a plan row is sampled.
  struct Row {
    int32_t rank = 0;         // its slot's
    bool by_largest = false;  // every rank picks the largest of its share
    int32_t first = 0;        // of its rows among those that are whole on its slot's rank
    size_t first_pick = 0;
    int32_t num_picks = 0;    // 1 + its drafts; 0: it samples nothing
    int32_t num_outputs = 0;  // of its slot, before it
  };
  // What becomes of a sampled id.
  struct Verdict {
    int32_t id = 0;
    bool accepts_draft = false;  // which the id is
  };

  void deal(const StepPlan& plan, const Tensor& logits, const BatchBuilder& builder, const Slots& slots);
  Tensor whole_rows(const Tensor& logits, Arena& arena);
  void pick(const PlanRow& row, const Row& how, const Tensor& logits, std::span<const uint32_t> mask, Slots& slots,
            RowResult& out);
  void prompt_logprobs(const PlanRow& row, const Slot& slot, const Tensor& logits, RowResult& out);
  Verdict judge(const Slot& slot, const Row& how, int32_t place, int32_t id) const;
  Pick largest(std::span<const float> logits) const;
  void settle(const PlanRow& row, const Row& how, Slots& slots, RowResult& out) const;
  Pick agree(const Row& how, size_t pick) const;

  Comm& comm_;
  Sampler sampler_;
  const std::vector<float> synthetic_rates_;
  // Of the step under way:
  std::vector<Row> rows_;                // of each plan row
  std::vector<int32_t> to_;              // of each row of logits: the rank that gets it whole; -1: none
  std::vector<Pick> picks_, all_picks_;  // of each place that is sampled: this rank's; all ranks', rank after rank
};

}  // namespace perigee

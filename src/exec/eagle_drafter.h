// EagleDrafter: drafts by a model that reads the target's hidden states (model/eagle3.h), greedily.
//
// Its first pass runs what the step has made certain: each chunk's tokens, each row's accepted ids; so its own cache
// keeps up with the target's. Then each sequence that has sampled runs its guesses one by one, as far as its blocks go.
// Rejected tokens leave nothing: the next first pass writes over what guesses left in the cache. Ranks with shards each
// have some columns of the logits and agree about the largest of each row.
#pragma once

#include <vector>

#include "comm/comm.h"
#include "exec/drafter.h"
#include "model/eagle3.h"

namespace perigee {

class EagleDrafter final : public Drafter {
 public:
  EagleDrafter(const Eagle3& model, int32_t num_drafts, Comm& comm)
      : model_(model), num_drafts_(num_drafts), comm_(comm) {}

  void draft(const SampledStep& step) override;

 private:
  // A sequence that drafts.
  struct Line {
    SlotId slot;
    SequenceRows rows;       // of its next pass
    int32_t num_passes = 0;  // that are left to it
  };
  struct Guess {
    float logit = 0;
    int32_t id = 0;
  };

  void clear();
  void add_row(const PlanRow& row, const SequenceRows& computed, const RowResult& result, const SampledStep& step);
  void add_guesses(const SampledStep& step);
  Eagle3::Output run(const Tensor& hidden, const SampledStep& step) const;
  void guess(const Tensor& logits, Slots& slots);

  const Eagle3& model_;
  const int32_t num_drafts_;
  Comm& comm_;
  // Of the pass under way:
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<int32_t> from_;  // of each row: where its hidden state is
  std::vector<SequenceRows> sequences_;
  std::vector<Line> lines_;                   // in the order of the rows of logits
  std::vector<Guess> guesses_, all_guesses_;  // of each line: this rank's; all ranks', rank after rank
};

}  // namespace perigee

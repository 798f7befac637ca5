// NgramDrafter: drafts from what a sequence has said before ("prompt lookup", Saxena 2023). No model, no weights.
//
// The last few tokens of a sequence are looked up among those before them; what followed there is the draft. It pays
// where outputs repeat their prompt: code that is edited, quotes, answers in a given form.
#pragma once

#include <span>
#include <vector>

#include "exec/drafter.h"
#include "exec/ngram_match.h"

namespace perigee {

// What may follow `tokens`, num_drafts ids at most, none without a match. Of several places the one with the longest
// match counts, of those the newest. A match that reaches the end goes on in the draft, so that a short period repeats.
DraftIds draft_from(std::span<const int32_t> tokens, NgramMatch match, int32_t num_drafts);

class NgramDrafter final : public Drafter {
 public:
  NgramDrafter(NgramMatch match, int32_t num_drafts, int32_t num_slots)
      : match_(match), num_drafts_(num_drafts), tokens_(static_cast<size_t>(num_slots)) {}

  void start(const SequenceStart& start) override;
  void draft(const SampledStep& step) override;
  // What may follow, after a step that gave the slot's sequence these ids.
  DraftIds next(SlotId slot, const RowIds& ids);

 private:
  NgramMatch match_;
  int32_t num_drafts_;
  std::vector<std::vector<int32_t>> tokens_;  // of each slot: prompt and outputs
};

}  // namespace perigee

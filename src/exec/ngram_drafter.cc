#include "exec/ngram_drafter.h"

#include <algorithm>

namespace perigee {
namespace {

// How many tokens before `end` are the last ones of all, `most` at most.
int32_t match_before(std::span<const int32_t> tokens, size_t end, int32_t most) {
  int32_t length = 0;
  for (size_t at = end, last = tokens.size(); length < most && at > 0 && tokens[at - 1] == tokens[last - 1];
       --at, --last)
    ++length;
  return length;
}

}  // namespace

DraftIds draft_from(std::span<const int32_t> tokens, NgramMatch match, int32_t num_drafts) {
  size_t best_end = 0;
  int32_t longest = match.least - 1;
  for (size_t end = tokens.empty() ? 0 : tokens.size() - 1; end > 0 && longest < match.most; --end) {
    const int32_t length = match_before(tokens, end, match.most);
    if (length <= longest) continue;
    longest = length;
    best_end = end;
  }
  DraftIds drafts;
  if (best_end == 0) return drafts;
  const size_t num_tokens = tokens.size();
  for (size_t from = best_end; static_cast<int32_t>(drafts.size()) < num_drafts; ++from)
    drafts.push_back(from < num_tokens ? tokens[from] : drafts[from - num_tokens]);
  return drafts;
}

void NgramDrafter::start(const SequenceStart& start) {
  tokens_[static_cast<size_t>(start.slot.value)] = *start.tokens;
}

void NgramDrafter::draft(const SampledStep& step) {
  for (size_t i = 0; i < step.plan.rows.size(); ++i)
    if (const PlanRow& row = step.plan.rows[i]; row.samples())
      step.slots[row.slot].drafts = next(row.slot, step.result.rows[i].ids);
}

DraftIds NgramDrafter::next(SlotId slot, const RowIds& ids) {
  std::vector<int32_t>& tokens = tokens_[static_cast<size_t>(slot.value)];
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  return draft_from(tokens, match_, num_drafts_);
}

}  // namespace perigee

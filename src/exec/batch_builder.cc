#include "exec/batch_builder.h"

#include "base/check.h"

namespace perigee {

const Batch& BatchBuilder::build(const StepPlan& plan, const Slots& slots) {
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  first_logit_.clear();
  sequences_.clear();
  for (const PlanRow& row : plan.rows) add_row(row, plan, slots[row.slot]);
  batch_ = {.tokens = tokens_, .positions = positions_, .sequences = sequences_, .logit_rows = logit_rows_};
  return batch_;
}

void BatchBuilder::add_row(const PlanRow& row, const StepPlan& plan, const Slot& slot) {
  CHECK(slot.sequence == row.sequence, "plan row of sequence ", row.sequence, " meets slot of ", slot.sequence);
  const int32_t position = slot.length;
  CHECK(position == row.position, "sequence ", row.sequence, ": plan expects position ", row.position, ", slot has ",
        position);
  const int64_t blocks = (position + row.num_tokens + kBlockTokens - 1) / kBlockTokens;
  CHECK(blocks <= static_cast<int64_t>(slot.pages.size()), "sequence ", row.sequence, " needs ", blocks,
        " blocks, has ", slot.pages.size());
  const auto first_row = static_cast<int32_t>(tokens_.size());
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    tokens_.push_back(row.is_decode() ? slot.newest_id : plan.tokens[static_cast<size_t>(row.tokens_offset + i)]);
    positions_.push_back(position + i);
  }
  // The form depends on what the sequence had to compute when it was admitted, never on how that was cut into chunks:
  // so chunk sizes do not change a single bit.
  const int64_t extent =
      row.is_decode() ? row.num_tokens : static_cast<int64_t>(slot.tokens->size()) - slot.num_cached_tokens;
  const int64_t context = row.is_decode() ? position : slot.num_cached_tokens;
  sequences_.push_back({.first_row = first_row,
                        .num_tokens = row.num_tokens,
                        .position = position,
                        .pages = slot.pages.data(),
                        .form = model_.choose_form(extent, context, deterministic_)});
  first_logit_.push_back(static_cast<int32_t>(logit_rows_.size()));
  if (row.prompt_logprobs)
    for (int32_t i = 0; i < row.num_tokens; ++i) logit_rows_.push_back(first_row + i);
  else if (row.sample)
    logit_rows_.push_back(first_row + row.num_tokens - 1);
}

}  // namespace perigee

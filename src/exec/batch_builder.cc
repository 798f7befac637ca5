#include "exec/batch_builder.h"

#include <algorithm>

#include "base/check.h"
#include "base/prefetch.h"

namespace perigee {

MlaForm form_of(const PlanRow& row, const Admission& admission, const Model& model, bool deterministic) {
  if (deterministic || row.prefill() == nullptr) return MlaForm::kAbsorbed;
  const TokenKind kind = row.position.least < admission.num_prompt_tokens ? TokenKind::kPrompt : TokenKind::kOutput;
  return model.choose_form(kind, admission.num_tokens - admission.num_cached_tokens, admission.num_cached_tokens);
}

const Batch& BatchBuilder::build(const StepPlan& plan, const Slots& slots) {
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  first_logit_.clear();
  sequences_.clear();
  for (const PlanRow& row : plan.rows) prefetch(&slots[row.slot], sizeof(Slot));
  for (const PlanRow& row : plan.rows) add_row(row, plan, slots[row.slot]);
  first_logit_.push_back(static_cast<int32_t>(logit_rows_.size()));
  if (!plan.checkpoints.empty()) add_checkpoints(plan, slots);
  batch_ = {.tokens = tokens_, .positions = positions_, .sequences = sequences_, .logit_rows = logit_rows_};
  return batch_;
}

void BatchBuilder::add_row(const PlanRow& row, const StepPlan& plan, const Slot& slot) {
  CHECK(slot.sequence == row.sequence, "plan row of sequence ", row.sequence, " meets slot of ", slot.sequence);
  const int32_t position = slot.length;
  CHECK(row.position.contains(position), "sequence ", row.sequence, ": the plan expects a position in [",
        row.position.least, ", ", row.position.most, "], the slot has ", position);
  const int32_t num_drafts = std::min(row.num_drafts(), static_cast<int32_t>(slot.drafts.size()));
  const int32_t num_tokens = row.prefill() != nullptr ? row.num_tokens() : 1 + num_drafts;
  const int64_t blocks = (position + num_tokens + kBlockTokens - 1) / kBlockTokens;
  CHECK(blocks <= slot.num_blocks, "sequence ", row.sequence, " needs ", blocks, " blocks, has ", slot.num_blocks);
  const auto first_row = static_cast<int32_t>(tokens_.size());
  const Admission admission{.num_prompt_tokens = slot.num_prompt_tokens,
                            .num_cached_tokens = slot.num_cached_tokens,
                            .num_tokens = slot.num_tokens};
  if (const Prefill* prefill = row.prefill()) {
    const auto ids = plan.tokens.begin() + prefill->tokens_offset;
    tokens_.insert(tokens_.end(), ids, ids + num_tokens);
  } else {
    tokens_.push_back(slot.newest_id);
    tokens_.insert(tokens_.end(), slot.drafts.begin(), slot.drafts.begin() + num_drafts);
  }
  for (int32_t i = 0; i < num_tokens; ++i) positions_.push_back(position + i);
  sequences_.push_back({.first_row = first_row,
                        .num_tokens = num_tokens,
                        .position = position,
                        .pages = slot.pages.data(),
                        .form = form_of(row, admission, model_, deterministic_)});
  if (!slot.block_owners.empty())
    sequences_.back().shared = {.here = slot.blocks_here, .owners = slot.block_owners.data()};
  if (!slot.state_pages.empty()) add_state(row, slot, sequences_.back());
  first_logit_.push_back(static_cast<int32_t>(logit_rows_.size()));
  if (row.scores_prompt() || num_drafts > 0)
    for (int32_t i = 0; i < num_tokens; ++i) logit_rows_.push_back(first_row + i);
  else if (row.samples())
    logit_rows_.push_back(first_row + num_tokens - 1);
}

// A chunk commits all its tokens, a decode row none. What a preempted sequence had given comes as chunks of one token
// in deterministic mode, and is committed as it was when decode rows gave it: late, from the ring.
void BatchBuilder::add_state(const PlanRow& row, const Slot& slot, SequenceRows& rows) const {
  rows.state_pages = slot.state_pages.data();
  rows.slot = row.slot.value;
  rows.committed = slot.committed;
  rows.commit_all = row.prefill() != nullptr && !(deterministic_ && row.position.least >= slot.num_prompt_tokens);
}

// The writes come in the order of the rows that make them.
void BatchBuilder::add_checkpoints(const StepPlan& plan, const Slots& slots) {
  const std::vector<CheckpointWrite>& writes = plan.checkpoints;
  size_t num_pages = 0;
  for (const CheckpointWrite& write : writes) num_pages += write.pages.size();
  checkpoint_pages_.clear();
  checkpoint_pages_.reserve(num_pages);
  checkpoints_.clear();
  checkpoints_.reserve(writes.size());
  auto write = writes.begin();
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    SequenceRows& rows = sequences_[i];
    const size_t first = checkpoints_.size();
    for (; write != writes.end() && write->slot == plan.rows[i].slot; ++write) {
      place_checkpoint(*write, plan.rows[i], slots, rows);
      rows.checkpoints = {checkpoints_.begin() + static_cast<std::ptrdiff_t>(first), checkpoints_.end()};
    }
  }
  CHECK(write == writes.end(), "no row writes the checkpoint of slot ", write->slot, " at ", write->boundary());
}

// A row whose position the plan does not know exactly may prove to begin before the boundary, or after it: then another
// row writes the checkpoint. Of a GPU only the kernels know.
void BatchBuilder::place_checkpoint(const CheckpointWrite& write, const PlanRow& row, const Slots& slots,
                                    const SequenceRows& rows) {
  const int32_t from = rows.checkpoints.empty() ? rows.committed : rows.checkpoints.back().position;
  const int32_t commit = rows.position + (rows.commit_all ? rows.num_tokens : 0);
  const int32_t boundary = write.boundary();
  const bool reaches = boundary > from && boundary <= commit;
  const bool in_doubt = row.prefill() == nullptr && (slots.on_device() || row.position.least < row.position.most);
  if (!reaches && in_doubt && !slots.on_device()) return;
  CHECK(write.is_valid() && (reaches || in_doubt), "slot ", write.slot, " commits ", commit, ", its checkpoint after ",
        from, " is in (", write.lower, ", ", write.upper, "]");
  checkpoints_.push_back({.position = boundary, .pages = checkpoint_pages_.data() + checkpoint_pages_.size()});
  for (const Placement& place : write.pages)
    if (place.dcp_index == dcp_index_) checkpoint_pages_.push_back(place.page.value);
}

}  // namespace perigee

#include "exec/batch_builder.h"

#include "base/check.h"

namespace perigee {

MlaForm form_of(const PlanRow& row, const Admission& admission, const Model& model, bool deterministic) {
  if (deterministic || row.is_decode()) return MlaForm::kAbsorbed;
  const TokenKind kind = row.position < admission.num_prompt_tokens ? TokenKind::kPrompt : TokenKind::kOutput;
  return model.choose_form(kind, admission.num_tokens - admission.num_cached_tokens, admission.num_cached_tokens);
}

const Batch& BatchBuilder::build(const StepPlan& plan, const Slots& slots) {
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  first_logit_.clear();
  sequences_.clear();
  for (const PlanRow& row : plan.rows) add_row(row, plan, slots[row.slot]);
  if (!plan.checkpoints.empty()) add_checkpoints(plan);
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
  const Admission admission{.num_prompt_tokens = slot.num_prompt_tokens,
                            .num_cached_tokens = slot.num_cached_tokens,
                            .num_tokens = static_cast<int32_t>(slot.tokens->size())};
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    tokens_.push_back(row.is_decode() ? slot.newest_id : plan.tokens[static_cast<size_t>(row.tokens_offset + i)]);
    positions_.push_back(position + i);
  }
  sequences_.push_back({.first_row = first_row,
                        .num_tokens = row.num_tokens,
                        .position = position,
                        .pages = slot.pages.data(),
                        .form = form_of(row, admission, model_, deterministic_)});
  if (!slot.state_pages.empty()) add_state(row, slot, sequences_.back());
  first_logit_.push_back(static_cast<int32_t>(logit_rows_.size()));
  if (row.prompt_logprobs)
    for (int32_t i = 0; i < row.num_tokens; ++i) logit_rows_.push_back(first_row + i);
  else if (row.sample)
    logit_rows_.push_back(first_row + row.num_tokens - 1);
}

// A chunk commits all its tokens, a decode row none. What a preempted sequence had given comes as chunks of one token
// in deterministic mode, and is committed as it was when decode rows gave it: late, from the ring.
void BatchBuilder::add_state(const PlanRow& row, const Slot& slot, SequenceRows& rows) const {
  rows.state_pages = slot.state_pages.data();
  rows.slot = row.slot.value;
  rows.committed = slot.committed;
  rows.commit_all = !row.is_decode() && !(deterministic_ && row.position >= slot.num_prompt_tokens);
}

// The writes come in the order of the rows that make them.
void BatchBuilder::add_checkpoints(const StepPlan& plan) {
  const std::vector<CheckpointWrite>& writes = plan.checkpoints;
  size_t num_pages = 0;
  for (const CheckpointWrite& write : writes) num_pages += write.pages.size();
  checkpoint_pages_.clear();
  checkpoint_pages_.reserve(num_pages);
  checkpoints_.clear();
  checkpoints_.reserve(writes.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    SequenceRows& rows = sequences_[i];
    const size_t first = checkpoints_.size();
    while (checkpoints_.size() < writes.size() && writes[checkpoints_.size()].slot == plan.rows[i].slot) {
      place_checkpoint(writes[checkpoints_.size()], rows);
      rows.checkpoints = {checkpoints_.begin() + static_cast<std::ptrdiff_t>(first), checkpoints_.end()};
    }
  }
  CHECK(checkpoints_.size() == writes.size(), "no row writes the checkpoint of slot ", writes[checkpoints_.size()].slot,
        " at ", writes[checkpoints_.size()].position);
}

void BatchBuilder::place_checkpoint(const CheckpointWrite& write, const SequenceRows& rows) {
  const int32_t from = rows.checkpoints.empty() ? rows.committed : rows.checkpoints.back().position;
  const int32_t commit = rows.position + (rows.commit_all ? rows.num_tokens : 0);
  CHECK(write.position > from && write.position <= commit && write.position % kBlockTokens == 0, "slot ", write.slot,
        " commits ", commit, ", its checkpoint after ", from, " is at ", write.position);
  checkpoints_.push_back({.position = write.position, .pages = checkpoint_pages_.data() + checkpoint_pages_.size()});
  for (const PageId page : write.pages) checkpoint_pages_.push_back(page.value);
}

}  // namespace perigee

#include "exec/eagle_drafter.h"

#include <algorithm>
#include <limits>

#include "exec/sampler.h"

namespace perigee {

void EagleDrafter::draft(const SampledStep& step) {
  const ArenaScope temporaries(step.ops.arena());
  clear();
  lines_.clear();
  for (size_t i = 0; i < step.plan.rows.size(); ++i)
    add_row(step.plan.rows[i], step.batch.sequences[i], step.result.rows[i], step);
  if (tokens_.empty()) return;
  Eagle3::Output out = run(model_.fuse(step.ops.gather_rows(step.output.taps, from_), step.ops), step);
  while (!lines_.empty()) {
    guess(out.logits, step.slots);
    add_guesses(step);
    if (!lines_.empty()) out = run(step.ops.gather_rows(out.hidden, from_), step);
  }
}

void EagleDrafter::clear() {
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  from_.clear();
  sequences_.clear();
}

// What the target has computed and keeps. The draft's input at a position is the token after it.
void EagleDrafter::add_row(const PlanRow& row, const SequenceRows& computed, const RowResult& result,
                           const SampledStep& step) {
  Slot& slot = step.slots[row.slot];
  if (row.samples()) slot.drafts.clear();
  if (!result.finite) return;
  SequenceRows rows = computed;
  rows.first_row = static_cast<int32_t>(tokens_.size());
  rows.checkpoints = {};
  if (step.pool.layout.draft().layers > 0) {
    rows.pages = slot.draft_blocks.data();
    rows.shared = {};
  }
  if (row.prefill() != nullptr) {
    const auto first = step.batch.tokens.begin() + computed.first_row;
    tokens_.insert(tokens_.end(), first + 1, first + computed.num_tokens);
    const auto next = static_cast<size_t>(computed.position + computed.num_tokens);
    tokens_.push_back(row.samples() ? result.ids[0] : (*slot.tokens)[next]);
  } else {
    rows.num_tokens = static_cast<int32_t>(result.ids.size());
    tokens_.insert(tokens_.end(), result.ids.begin(), result.ids.end());
  }
  for (int32_t i = 0; i < rows.num_tokens; ++i) {
    positions_.push_back(rows.position + i);
    from_.push_back(computed.first_row + i);
  }
  sequences_.push_back(rows);
  if (!row.samples()) return;
  logit_rows_.push_back(rows.first_row + rows.num_tokens - 1);
  rows.position += rows.num_tokens;
  rows.num_tokens = 1;
  rows.form = MlaForm::kAbsorbed;
  const int32_t room = slot.num_blocks * kBlockTokens - rows.position;
  lines_.push_back({.slot = row.slot, .rows = rows, .num_passes = std::min(num_drafts_, 1 + room)});
}

// The newest guess of each line that goes on becomes its next row.
void EagleDrafter::add_guesses(const SampledStep& step) {
  clear();
  size_t kept = 0;
  for (size_t i = 0; i < lines_.size(); ++i) {
    Line line = lines_[i];
    if (--line.num_passes == 0) continue;
    line.rows.first_row = static_cast<int32_t>(kept);
    tokens_.push_back(step.slots[line.slot].drafts.back());
    positions_.push_back(line.rows.position);
    logit_rows_.push_back(line.rows.first_row);
    from_.push_back(static_cast<int32_t>(i));
    sequences_.push_back(line.rows);
    ++line.rows.position;
    lines_[kept++] = line;
  }
  lines_.resize(kept);
}

Eagle3::Output EagleDrafter::run(const Tensor& hidden, const SampledStep& step) const {
  const Batch batch{.tokens = tokens_, .positions = positions_, .sequences = sequences_, .logit_rows = logit_rows_};
  return model_.forward(batch, hidden, step.ops, step.pool);
}

// The largest logit of each line; of equal ones the lowest id.
void EagleDrafter::guess(const Tensor& logits, Slots& slots) {
  guesses_.resize(lines_.size());
  for (size_t i = 0; i < lines_.size(); ++i) {
    const std::span<const float> row(logits.row<const float>(static_cast<int64_t>(i)),
                                     static_cast<size_t>(logits.cols));
    const LargestLogit found = Sampler::largest(row);
    const auto first = static_cast<int32_t>(logits.cols) * comm_.rank();
    guesses_[i] = {.logit = found.good ? found.logit : -std::numeric_limits<float>::infinity(),
                   .id = found.good ? first + found.id : 0};
  }
  all_guesses_.resize(guesses_.size() * static_cast<size_t>(comm_.size()));
  comm_.all_gather(guesses_.data(), guesses_.size() * sizeof(Guess), all_guesses_.data());
  for (size_t i = 0; i < lines_.size(); ++i) {
    Guess best = all_guesses_[i];
    for (size_t at = i + lines_.size(); at < all_guesses_.size(); at += lines_.size())
      if (all_guesses_[at].logit > best.logit) best = all_guesses_[at];
    slots[lines_[i].slot].drafts.push_back(model_.target_id(best.id));
  }
}

}  // namespace perigee

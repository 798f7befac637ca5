#include "exec/host_sampling.h"

#include <algorithm>
#include <limits>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr uint64_t kSyntheticDraws = fnv1a("synthetic acceptance");

std::span<const float> values(const Tensor& logits, int64_t row) {
  return {logits.row<const float>(row), static_cast<size_t>(logits.cols)};
}

}  // namespace

Status HostSampling::sample(const StepPlan& plan, const Tensor& logits, const BatchBuilder& builder, const Masks& masks,
                            Arena& arena, Slots& slots, StepResult& result) {
  deal(plan, logits, builder, slots);
  const Tensor whole = whole_rows(logits, arena);
  RETURN_IF_ERROR(comm_.status());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    const Row& how = rows_[i];
    if (how.by_largest) {
      for (int32_t place = 0; place < how.num_picks; ++place)
        picks_[how.first_pick + static_cast<size_t>(place)] = largest(values(logits, builder.logit_row(i) + place));
    } else if (how.rank == comm_.rank()) {
      pick(row, how, whole.row_range(how.first, builder.num_logits(i)), masks[i], slots, result.rows[i]);
    }
  }
  comm_.all_gather(picks_.data(), picks_.size() * sizeof(Pick), all_picks_.data());
  RETURN_IF_ERROR(comm_.status());
  for (size_t i = 0; i < plan.rows.size(); ++i)
    if (plan.rows[i].samples()) settle(plan.rows[i], rows_[i], slots, result.rows[i]);
  return {};
}

void HostSampling::deal(const StepPlan& plan, const Tensor& logits, const BatchBuilder& builder, const Slots& slots) {
  const bool alone = comm_.size() == 1;
  rows_.assign(plan.rows.size(), {});
  to_.assign(static_cast<size_t>(logits.rows), -1);
  int32_t num_mine = 0;
  size_t num_picks = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    const Slot& slot = slots[row.slot];
    const int32_t num_logits = builder.num_logits(i);
    Row& how = rows_[i];
    how.rank = rank_of_slot(row.slot, comm_.size());
    how.first = alone ? builder.logit_row(i) : num_mine;
    how.first_pick = num_picks;
    how.num_outputs = slot.num_outputs;
    how.num_picks = row.prefill() == nullptr ? num_logits : row.samples() ? 1 : 0;
    num_picks += static_cast<size_t>(how.num_picks);
    how.by_largest = !alone && row.samples() && !row.scores_prompt() && !row.masked &&
                     Sampler::takes_largest(*slot.sampling, slot.num_outputs);
    if (how.by_largest) continue;
    std::fill_n(to_.begin() + builder.logit_row(i), num_logits, how.rank);
    if (how.rank == comm_.rank()) num_mine += num_logits;
  }
  picks_.assign(num_picks, {});
  all_picks_.resize(num_picks * static_cast<size_t>(comm_.size()));
}

// The rows of logits that come to this rank.
Tensor HostSampling::whole_rows(const Tensor& logits, Arena& arena) {
  if (comm_.size() == 1) return logits;
  if (std::all_of(to_.begin(), to_.end(), [](int32_t rank) { return rank < 0; })) return {};
  const Tensor whole =
      arena.tensor(DType::kF32, std::count(to_.begin(), to_.end(), comm_.rank()), logits.cols * comm_.size());
  comm_.all_to_all(logits, to_, whole);
  return whole;
}

// `logits` are all that the row has. The slot goes with each place, since penalties and the draws of the next one
// follow from it.
void HostSampling::pick(const PlanRow& row, const Row& how, const Tensor& logits, std::span<const uint32_t> mask,
                        Slots& slots, RowResult& out) {
  const Slot& slot = slots[row.slot];
  if (row.scores_prompt()) prompt_logprobs(row, slot, logits, out);
  const size_t words = mask.empty() ? 0 : static_cast<size_t>(logits.cols + 31) / 32;
  CHECK(mask.size() == words * static_cast<size_t>(how.num_picks), "slot ", row.slot, " has a mask of ", mask.size(),
        " words for ", how.num_picks, " places of ", words);
  for (int32_t place = 0; place < how.num_picks; ++place) {
    SampledToken token = sampler_.sample({
        .logits = values(logits, logits.rows - how.num_picks + place),
        .params = slot.sampling.get(),
        .num_outputs = slot.num_outputs,
        .output_counts = slot.output_counts,
        .seen = slot.seen,
        .mask = mask.subspan(static_cast<size_t>(place) * words, words),
    });
    const Verdict verdict = judge(slot, how, place, token.id);
    picks_[how.first_pick + static_cast<size_t>(place)] = {.logit = 0, .id = verdict.id, .finite = token.finite};
    slots.accept(row.slot, token.finite ? verdict.id : 0);  // the next plan may be in flight: its row needs an id
    if (token.finite && slot.sampling->logprobs >= 0) out.logprobs.push_back(std::move(token.logprobs));
    if (!token.finite || !verdict.accepts_draft) return;
  }
}

// The row's ids, from what all ranks have picked. Places after the first id that is not its draft never were.
void HostSampling::settle(const PlanRow& row, const Row& how, Slots& slots, RowResult& out) const {
  const Slot& slot = slots[row.slot];
  const bool has_gone_on = !how.by_largest && how.rank == comm_.rank();  // in pick()
  int32_t place = 0;
  for (bool goes_on = true; goes_on && place < how.num_picks; ++place) {
    const Pick agreed = agree(how, how.first_pick + static_cast<size_t>(place));
    const Verdict verdict = judge(slot, how, place, agreed.id);
    out.finite = agreed.finite;
    if (agreed.finite) out.ids.push_back(verdict.id);
    if (!has_gone_on) slots.accept(row.slot, agreed.finite ? verdict.id : 0);
    goes_on = agreed.finite && verdict.accepts_draft;
  }
  out.num_drafts = how.num_picks - 1;
  if (place < how.num_picks) slots.reject(row.slot, how.num_picks - place);
}

// Every rank says the same of an id, and of the id that it gives again.
HostSampling::Verdict HostSampling::judge(const Slot& slot, const Row& how, int32_t place, int32_t id) const {
  const auto at = static_cast<size_t>(place);
  if (at >= slot.drafts.size()) return {.id = id};
  const int32_t draft = slot.drafts[at];
  if (synthetic_rates_.empty()) return {.id = id, .accepts_draft = id == draft};
  const uint64_t stream = mix64(slot.sampling->seed ^ kSyntheticDraws);
  const bool accepts = random_unit(stream, static_cast<uint64_t>(how.num_outputs + place)) < synthetic_rates_[at];
  return {.id = accepts ? draft : id, .accepts_draft = accepts};
}

void HostSampling::prompt_logprobs(const PlanRow& row, const Slot& slot, const Tensor& logits, RowResult& out) {
  for (int32_t i = 0; i < row.num_tokens(); ++i) {
    const int32_t next = row.position.least + i + 1;
    if (next >= slot.num_prompt_tokens) break;
    out.prompt_logprobs.push_back(sampler_.token_logprobs(values(logits, i), (*slot.tokens)[static_cast<size_t>(next)],
                                                          slot.sampling->prompt_logprobs));
  }
}

// Of this rank's share of a row's logits.
HostSampling::Pick HostSampling::largest(std::span<const float> logits) const {
  const LargestLogit found = Sampler::largest(logits);
  const auto first = static_cast<int32_t>(std::ssize(logits)) * comm_.rank();
  return {.logit = found.logit, .id = first + found.id, .finite = found.good};
}

// What all ranks' picks of a place say. Shares of the vocabulary ascend with the ranks, so a tie goes to the lower id.
HostSampling::Pick HostSampling::agree(const Row& how, size_t pick) const {
  const size_t stride = picks_.size();
  if (!how.by_largest) return all_picks_[static_cast<size_t>(how.rank) * stride + pick];
  Pick best = all_picks_[pick];
  for (size_t at = pick + stride; at < all_picks_.size(); at += stride) {
    const Pick& other = all_picks_[at];
    best.finite &= other.finite;
    if (!(other.logit > best.logit)) continue;
    best.logit = other.logit;
    best.id = other.id;
  }
  best.finite &= best.logit >= -std::numeric_limits<float>::max();
  return best;
}

}  // namespace perigee

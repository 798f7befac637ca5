#include "exec/host_sampling.h"

#include <algorithm>
#include <limits>

namespace perigee {
namespace {

int32_t num_logits(const PlanRow& row) {
  return row.scores_prompt() ? row.num_tokens() : row.samples() ? 1 : 0;
}

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
    if (how.by_largest)
      picks_[i] = largest(values(logits, builder.logit_row(i)));
    else if (how.rank == comm_.rank())
      picks_[i] = pick(row, slots[row.slot], whole.row_range(how.first, num_logits(row)), masks[i], result.rows[i]);
  }
  comm_.all_gather(picks_.data(), picks_.size() * sizeof(Pick), all_picks_.data());
  RETURN_IF_ERROR(comm_.status());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    if (!row.samples()) continue;
    const Pick agreed = agree(i);
    result.rows[i].finite = agreed.finite;
    if (agreed.finite) result.rows[i].ids.push_back(agreed.id);
    slots.accept(row.slot, agreed.finite ? agreed.id : 0);  // the next plan may be in flight: its row needs an id
  }
  return {};
}

void HostSampling::deal(const StepPlan& plan, const Tensor& logits, const BatchBuilder& builder, const Slots& slots) {
  const bool alone = comm_.size() == 1;
  picks_.assign(plan.rows.size(), {});
  all_picks_.resize(plan.rows.size() * static_cast<size_t>(comm_.size()));
  rows_.assign(plan.rows.size(), {});
  to_.assign(static_cast<size_t>(logits.rows), -1);
  int32_t num_mine = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    const Slot& slot = slots[row.slot];
    Row& how = rows_[i];
    how.rank = rank_of_slot(row.slot, comm_.size());
    how.first = alone ? builder.logit_row(i) : num_mine;
    how.by_largest = !alone && row.samples() && !row.scores_prompt() && !row.masked &&
                     Sampler::takes_largest(*slot.sampling, slot.num_outputs);
    if (how.by_largest) continue;
    std::fill_n(to_.begin() + builder.logit_row(i), num_logits(row), how.rank);
    if (how.rank == comm_.rank()) num_mine += num_logits(row);
  }
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

// `logits` are all that the row has.
HostSampling::Pick HostSampling::pick(const PlanRow& row, const Slot& slot, const Tensor& logits,
                                      std::span<const uint32_t> mask, RowResult& out) {
  if (row.scores_prompt()) prompt_logprobs(row, slot, logits, out);
  if (!row.samples()) return {};
  SampledToken token = sampler_.sample({
      .logits = values(logits, logits.rows - 1),
      .params = slot.sampling.get(),
      .num_outputs = slot.num_outputs,
      .output_counts = slot.output_counts,
      .seen = slot.seen,
      .mask = mask,
  });
  if (token.finite && slot.sampling->logprobs >= 0) out.logprobs.push_back(std::move(token.logprobs));
  return {.logit = 0, .id = token.id, .finite = token.finite};
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

// What all ranks' picks of a plan row say. Shares of the vocabulary ascend with the ranks, so a tie goes to the lower
// id.
HostSampling::Pick HostSampling::agree(size_t row) const {
  const size_t stride = picks_.size();
  if (!rows_[row].by_largest) return all_picks_[static_cast<size_t>(rows_[row].rank) * stride + row];
  Pick best = all_picks_[row];
  for (size_t at = row + stride; at < all_picks_.size(); at += stride) {
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

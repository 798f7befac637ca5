#include "exec/cuda/step_sampling.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "exec/sampler.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

TokenLogprobs token_logprobs(int32_t id, const TokenScore& score) {
  TokenLogprobs out{.id = id, .logprob = score.logprob, .rank = score.rank, .top = {}};
  for (int32_t i = 0; i < score.num_top; ++i) out.top.emplace_back(score.top_ids[i], score.top_logprobs[i]);
  return out;
}

// A chunk leaves no doubt of its position. Of another row only the GPU knows where it began, and whether the row before
// it has written the checkpoint.
bool is_written(const CheckpointWrite& write, const PlanRow& row, const RowOutcome* outcome) {
  if (row.prefill() != nullptr || outcome == nullptr) return true;
  return write.boundary() > outcome->committed && write.boundary() <= outcome->position;
}

}  // namespace

StepSampling::StepSampling(const SamplingSizes& sizes, const DeviceArrays& arrays, const Stream& stream, Comm& comm)
    : sizes_(sizes), slots_(arrays.slots()), batch_(arrays.batch()), stream_(stream), comm_(comm) {
  CHECK(slots_.rank == comm.rank() && slots_.ranks == comm.size() && slots_.vocab % slots_.ranks == 0, slots_.vocab,
        " ids for ", comm.size(), " ranks");
  const int64_t kept = (sizes.slots + comm.size() - 1) / comm.size() * batch_.places;
  const int64_t places = sizes.slots * batch_.places;
  if (comm.size() > 1)
    whole_ = device_buffer(static_cast<size_t>((kept + sizes.scores) * slots_.vocab) * sizeof(float));
  if (comm.size() > 1 || batch_.places > 1) picks_ = device_buffer(static_cast<size_t>(places) * sizeof(Pick));
  if (comm.size() > 1) all_picks_ = device_buffer(static_cast<size_t>(comm.size() * places) * sizeof(Pick));
  work_ = device_buffer(static_cast<size_t>(kept * slots_.vocab) * sizeof(float));
  scratch_ = device_buffer(static_cast<size_t>(sample_scratch_bytes(places)));
  masks_device_ = device_buffer(static_cast<size_t>(kept * slots_.bit_words()) * 4);
  masks_host_ = pinned_buffer(masks_device_.size());
  lists_device_ = device_buffer(static_cast<size_t>(sizes.max_positions + 1) * 4);
  lists_host_ = pinned_buffer(4 * (kMaxListed * 8 + lists_device_.size()));
  results_device_ = device_buffer(static_cast<size_t>(places) * sizeof(SampleResult) +
                                  static_cast<size_t>(sizes.slots) * sizeof(RowOutcome) +
                                  static_cast<size_t>(sizes.scores) * sizeof(TokenScore));
  for (Buffer& buffer : results_host_) buffer = pinned_buffer(results_device_.size());
  if (batch_.places > 1)
    for (Buffer& buffer : drafts_host_) buffer = pinned_buffer(static_cast<size_t>(sizes.slots * kMaxDrafts) * 4);
}

// Lists of one start after the other. Only when they have filled the buffer does the host wait for the stream, and with
// it for the steps in flight: not for the second start of a plan.
uint8_t* StepSampling::take_lists(size_t bytes) {
  if (lists_sent_.is_done()) lists_used_ = 0;
  if (lists_used_ + bytes > lists_host_.size()) {
    lists_sent_.wait();
    lists_used_ = 0;
  }
  return lists_host_.data() + std::exchange(lists_used_, lists_used_ + bytes);
}

void StepSampling::start(const SequenceStart& start) {
  const bool remembers = slots_.history != nullptr;
  if (!slots_.is_mine(start.slot.value) && !remembers) return;
  const SamplingParams& p = *start.sampling;
  const SlotParams sizes = slot_params(p);
  const size_t num_listed = static_cast<size_t>(sizes.num_bias + sizes.num_stops);
  const bool counts = sizes.penalties != 0 && slots_.is_mine(start.slot.value);
  const size_t num_counted = counts || remembers ? start.tokens->size() : 0;
  if (num_listed + num_counted == 0) return;
  auto* ids = reinterpret_cast<int32_t*>(take_lists((2 * num_listed + num_counted) * 4));
  auto* bias = reinterpret_cast<float*>(ids + num_listed);
  int32_t* tokens = ids + 2 * num_listed;
  for (int32_t i = 0; i < sizes.num_bias; ++i) std::tie(ids[i], bias[i]) = p.logit_bias[static_cast<size_t>(i)];
  std::copy_n(p.stop_ids.begin(), sizes.num_stops, ids + sizes.num_bias);
  const auto send = [this](void* to, const void* from, int32_t count) {
    if (count > 0)
      cuda_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * 4, cudaMemcpyHostToDevice, stream_.get()),
              "sending sampling lists");
  };
  const int64_t at = static_cast<int64_t>(start.slot.value) * kMaxListed;
  send(slots_.listed_ids + at, ids, sizes.num_bias + sizes.num_stops);
  send(slots_.listed_bias + at, bias, sizes.num_bias);
  if (num_counted > 0) {
    const auto count = static_cast<int32_t>(num_counted);
    std::copy(start.tokens->begin(), start.tokens->end(), tokens);
    int32_t* there = reinterpret_cast<int32_t*>(lists_device_.data());
    if (remembers) there = slots_.history + int64_t{start.slot.value} * slots_.max_history;
    CHECK(!remembers || count <= slots_.max_history, count, " tokens of a sequence");
    send(there, tokens, count);
    if (counts)
      cuda_ok(count_tokens(slots_, start.slot.value, there, count, start.num_prompt_tokens, stream_.get()),
              "counting tokens");
  }
  lists_sent_.record(stream_);
}

void StepSampling::ask(const StepPlan& plan, const Slots& slots, const BatchBuilder& builder, bool graph,
                       PlanUpload& upload, AskedLogits& asked) {
  samples_.clear();
  scores_.clear();
  sampled_by_.clear();
  asked.begin();
  const bool alone = slots_.ranks == 1;
  const int32_t places = batch_.places;
  int32_t masks = 0, num_whole = 0;  // rows of logits that come here whole
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    const Slot& slot = slots[row.slot];
    const bool mine = slots_.is_mine(row.slot.value);
    // Of a slot that may still be too short for its stop ids only the kernels know the length.
    const bool by_largest =
        !alone && row.samples() && !row.scores_prompt() && !row.masked && Sampler::takes_largest(*slot.sampling, 0);
    const int32_t own_row = graph ? static_cast<int32_t>(i) * places : builder.logit_row(i);
    const int32_t first = alone || by_largest ? own_row : num_whole;
    const int32_t num_logits = row.scores_prompt() ? row.num_tokens() : row.samples() ? 1 + row.num_drafts() : 0;
    CHECK(row.num_drafts() < places, "slot ", row.slot, " verifies ", row.num_drafts(), " drafts");
    const int32_t rank = by_largest ? kEveryRank : rank_of_slot(row.slot, slots_.ranks);
    if (!alone && !graph) sampled_by_.insert(sampled_by_.end(), static_cast<size_t>(num_logits), rank);
    if (mine && !by_largest) num_whole += num_logits;
    const int32_t num_scores = row.scores_prompt() && mine
                                   ? std::clamp(slot.num_prompt_tokens - 1 - row.position.least, 0, row.num_tokens())
                                   : 0;
    for (int32_t k = 0; k < num_scores; ++k) {
      const int32_t id = (*slot.tokens)[static_cast<size_t>(row.position.least + k + 1)];
      scores_.push_back({.logit_row = first + k, .id = id, .top = slot.sampling->prompt_logprobs});
      asked.score_ids.push_back(id);
    }
    asked.num_scores.push_back(num_scores);
    asked.logprobs.push_back(mine && slot.num_logprobs >= 0);
    if (row.samples()) asked.num_rows = static_cast<int32_t>(i) + 1;
    asked.masked |= row.masked;
    for (int32_t place = 0; place < places; ++place) {
      const bool samples = row.samples() && place <= row.num_drafts();
      samples_.push_back({.slot = samples ? row.slot.value : -1,
                          .logit_row = row.scores_prompt() ? first + row.num_tokens() - 1 : first + place,
                          .mask_row = samples && row.masked && mine ? masks++ : -1,
                          .rank = rank});
    }
  }
  CHECK(std::ssize(scores_) <= sizes_.scores, scores_.size(), " prompt logprobs in a step");
  asked.samples = upload.place(std::span<const SampleRecord>(samples_));
  asked.scores = upload.place(std::span<const ScoreRecord>(scores_));
  if (!alone && !graph) asked.sampled_by = upload.place(std::span<const int32_t>(sampled_by_));
}

// A place without a mask allows all ids: the sequence has ended, or it has no such draft. Nobody reads its id.
void StepSampling::upload_masks(const StepPlan& plan, MaskBox& masks) {
  const auto words = static_cast<size_t>(slots_.bit_words());
  auto* const begin = reinterpret_cast<uint32_t*>(masks_host_.data());
  auto* to = begin;
  const MaskBox::Message message = masks.wait(plan.step);
  MaskCursor cursor(*message);
  for (const PlanRow& row : plan.rows) {
    if (!row.masked) continue;
    const std::span<const uint32_t> mask = cursor.of(row.slot);
    if (!slots_.is_mine(row.slot.value)) continue;
    const size_t room = words * static_cast<size_t>(row.max_ids());
    CHECK(mask.size() <= room && mask.size() % words == 0, "slot ", row.slot, " has a mask of ", mask.size(),
          " words for ", row.max_ids(), " places of ", words);
    to = std::fill_n(std::copy(mask.begin(), mask.end(), to), room - mask.size(), ~0u);
  }
  cursor.check_end();
  cuda_ok(cudaMemcpyAsync(masks_device_.data(), begin, static_cast<size_t>(to - begin) * 4, cudaMemcpyHostToDevice,
                          stream_.get()),
          "sending masks");
}

void StepSampling::deal(const Tensor& logits, std::span<const int32_t> sampled_by) {
  if (comm_.size() == 1 || logits.rows == 0) return;
  CHECK(std::ssize(sampled_by) == logits.rows && logits.cols * comm_.size() == slots_.vocab, sampled_by.size(),
        " rows of ", logits.rows, "x", logits.cols, " logits");
  const int64_t rows = std::ssize(whole_) / (slots_.vocab * static_cast<int64_t>(sizeof(float)));
  comm_.all_to_all(
      logits, sampled_by,
      {.data = whole_.data(), .dtype = DType::kF32, .rows = rows, .cols = slots_.vocab, .row_stride = slots_.vocab});
}

void StepSampling::score(const AskedLogits& asked, const Tensor& logits, int32_t buffer) {
  auto* scores = const_cast<TokenScore*>(scores_of(results_device_));
  cuda_ok(score_rows(asked.scores.data(), static_cast<int32_t>(asked.scores.size()), whole(logits), slots_.vocab,
                     scores, stream_.get()),
          "scoring prompts");
  fetch(scores, asked.scores.size() * sizeof(TokenScore), buffer);
}

void StepSampling::sample(int32_t rows, const Tensor& logits, int32_t buffer) {
  auto* results = const_cast<SampleResult*>(samples_of(results_device_));
  const int32_t count = rows * batch_.places;
  auto* outcomes = const_cast<RowOutcome*>(outcomes_of(results_device_));
  const SampleCall call{.samples = batch_.samples,
                        .count = count,
                        .places = batch_.places,
                        .logits = whole(logits),
                        .shares = static_cast<const float*>(logits.data),
                        .masks = reinterpret_cast<const uint32_t*>(masks_device_.data()),
                        .work = reinterpret_cast<float*>(work_.data()),
                        .scratch = scratch_.data(),
                        .results = results,
                        .picks = reinterpret_cast<Pick*>(picks_.data()),
                        .outcomes = outcomes,
                        .committed = batch_.committed,
                        .commit = batch_.commit,
                        .synthetic = sizes_.synthetic};
  cuda_ok(sample_rows(call, slots_, stream_.get()), "sampling");
  if (call.picks != nullptr && rows > 0) {
    const bool alone = comm_.size() == 1;
    if (!alone) comm_.all_gather(picks_.data(), static_cast<size_t>(count) * sizeof(Pick), all_picks_.data());
    const auto* all = reinterpret_cast<const Pick*>(alone ? picks_.data() : all_picks_.data());
    cuda_ok(accept_picks(call, all, slots_, stream_.get()), "accepting ids");
  }
  fetch(results, static_cast<size_t>(count) * sizeof(SampleResult), buffer);
  if (batch_.places > 1) fetch(outcomes, static_cast<size_t>(rows) * sizeof(RowOutcome), buffer);
}

// To the same place in the host's memory of that buffer.
void StepSampling::fetch(const void* from, size_t bytes, int32_t buffer) {
  uint8_t* to =
      results_host_[static_cast<size_t>(buffer)].data() + (static_cast<const uint8_t*>(from) - results_device_.data());
  if (bytes > 0) cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_.get()), "fetching results");
}

void StepSampling::fetch_drafts(int32_t buffer) {
  Buffer& to = drafts_host_[static_cast<size_t>(buffer)];
  cuda_ok(cudaMemcpyAsync(to.data(), slots_.drafts, to.size(), cudaMemcpyDeviceToHost, stream_.get()),
          "fetching drafts");
}

void StepSampling::fill(const StepPlan& plan, const AskedLogits& asked, int32_t buffer, StepResult& result) const {
  const RowOutcome* outcomes = outcomes_of(results_host_[static_cast<size_t>(buffer)]);
  const TokenScore* score = scores_of(results_host_[static_cast<size_t>(buffer)]);
  auto id = asked.score_ids.begin();
  auto write = plan.checkpoints.begin();
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlanRow& row = plan.rows[i];
    RowResult& out = result.rows[i];
    for (int32_t k = 0; k < asked.num_scores[i]; ++k) out.prompt_logprobs.push_back(token_logprobs(*id++, *score++));
    for (; write != plan.checkpoints.end() && write->slot == row.slot; ++write)
      if (is_written(*write, row, batch_.places > 1 ? &outcomes[i] : nullptr))
        out.checkpoints.push_back(write->boundary());
    if (row.samples()) fill_ids(i, asked.logprobs[i], buffer, out);
    if (row.masked && batch_.places > 1) fill_drafts(row.slot, buffer, out);
  }
}

void StepSampling::fill_ids(size_t row, bool logprobs, int32_t buffer, RowResult& out) const {
  const Buffer& results = results_host_[static_cast<size_t>(buffer)];
  const SampleResult* samples = samples_of(results) + row * static_cast<size_t>(batch_.places);
  const RowOutcome* outcome = batch_.places > 1 ? outcomes_of(results) + row : nullptr;
  const int32_t num_ids = outcome != nullptr ? outcome->num_ids : 1;
  out.num_drafts = outcome != nullptr ? outcome->num_drafts : 0;
  for (int32_t place = 0; place < num_ids; ++place) {
    out.finite = samples[place].finite != 0;
    if (!out.finite) return;
    out.ids.push_back(samples[place].id);
    if (logprobs) out.logprobs.push_back(token_logprobs(samples[place].id, samples[place].score));
  }
}

void StepSampling::fill_drafts(SlotId slot, int32_t buffer, RowResult& out) const {
  const auto* all = reinterpret_cast<const int32_t*>(drafts_host_[static_cast<size_t>(buffer)].data());
  const std::span<const int32_t> drafts(all + int64_t{slot.value} * kMaxDrafts, static_cast<size_t>(batch_.places - 1));
  out.drafts.append(drafts.begin(), std::find(drafts.begin(), drafts.end(), -1));
}

}  // namespace perigee

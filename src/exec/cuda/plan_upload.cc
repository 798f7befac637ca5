#include "exec/cuda/plan_upload.h"

#include <algorithm>

#include "base/rng.h"
#include "tensor/cuda/device.h"

namespace perigee {

int64_t UploadLimits::bytes() const {
  constexpr int64_t kPadding = 64 * 8;
  const int64_t sequence = static_cast<int64_t>(sizeof(StartRecord) + sizeof(RowRecord) + sizeof(SampleRecord)) +
                           max_blocks * static_cast<int64_t>(sizeof(AppendRecord));
  return kPadding + max_sequences * sequence + 4 * static_cast<int64_t>(max_tokens) +
         max_logit_rows * static_cast<int64_t>(4 + sizeof(ScoreRecord));
}

PlanUpload::PlanUpload(const UploadLimits& limits)
    : host_(pinned_buffer(static_cast<size_t>(limits.bytes()))),
      device_(device_buffer(static_cast<size_t>(limits.bytes()))) {}

void PlanUpload::begin() {
  fence_.wait();
  used_ = 0;
}

void* PlanUpload::take_bytes(size_t bytes) {
  CHECK(used_ + bytes <= host_.size(), "a plan of more than ", host_.size(), " bytes");
  void* p = host_.data() + used_;
  used_ += (bytes + 63) / 64 * 64;
  return p;
}

void PlanUpload::send(const Stream& stream) {
  const size_t bytes = std::min(used_, host_.size());
  cuda_ok(cudaMemcpyAsync(device_.data(), host_.data(), bytes, cudaMemcpyHostToDevice, stream.get()), "sending a plan");
}

SlotParams slot_params(const SamplingParams& p) {
  const auto room = static_cast<size_t>(kMaxListed);
  const size_t num_bias = std::min(p.logit_bias.size(), room);
  return {.temperature = p.temperature,
          .top_p = p.top_p,
          .min_p = p.min_p,
          .presence = p.presence_penalty,
          .frequency = p.frequency_penalty,
          .repetition = p.repetition_penalty,
          .random_key = mix64(p.seed),
          .top_k = p.top_k,
          .min_tokens = p.stop_ids.empty() ? 0 : p.min_tokens,
          .num_bias = static_cast<int32_t>(num_bias),
          .num_stops = static_cast<int32_t>(std::min(p.stop_ids.size(), room - num_bias)),
          .logprobs = std::min(p.logprobs, kMaxTopLogprobs),
          .penalties = p.has_penalties() ? 1 : 0};
}

}  // namespace perigee

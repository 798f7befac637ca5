#include "exec/cuda/plan_upload.h"

#include "base/rng.h"
#include "tensor/cuda/device.h"

namespace perigee {

int64_t UploadLimits::bytes() const {
  constexpr int64_t kPadding = 64 * 16;
  const int64_t sequence = static_cast<int64_t>(sizeof(StartRecord) + sizeof(RowRecord)) +
                           places * static_cast<int64_t>(sizeof(SampleRecord)) +
                           max_blocks * static_cast<int64_t>(sizeof(AppendRecord)) + 2 * 4 * state_width;
  return kPadding + max_sequences * sequence + 4 * static_cast<int64_t>(max_tokens) +
         max_checkpoints * (4 + 4 * static_cast<int64_t>(state_width)) +
         max_logit_rows * static_cast<int64_t>(2 * 4 + sizeof(ScoreRecord));
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

namespace {

// Of a state's pages those at the rank's own index, `width` of them; -1 for none at all.
int32_t* put_pages(std::span<const Placement> places, int32_t dcp_index, int32_t width, int32_t* to) {
  int32_t* const end = to + width;
  if (places.empty()) return std::fill_n(to, width, -1);
  for (const Placement& place : places) {
    if (place.dcp_index != dcp_index) continue;
    CHECK(to < end, "more than ", width, " state pages");
    *to++ = place.page.value;
  }
  CHECK(to == end, end - to, " state pages too few");
  return to;
}

// [starts][2][width], see PlanArrays.
const int32_t* pack_start_pages(const StepPlan& plan, int32_t dcp_index, int32_t width, PlanUpload& upload) {
  int32_t* const pages = upload.take<int32_t>(std::ssize(plan.starts) * 2 * width);
  int32_t* to = pages;
  for (const SequenceStart& start : plan.starts) {
    CHECK(start.checkpoint.empty() == (width == 0 || start.num_cached_tokens == 0), "sequence ", start.sequence,
          " starts at ", start.num_cached_tokens, " without the state there");
    CHECK(start.state_pages.empty() == (width == 0), "state pages of sequence ", start.sequence);
    to = put_pages(start.state_pages, dcp_index, width, to);
    to = put_pages(start.checkpoint, dcp_index, width, to);
  }
  return upload.device(pages);
}

// Appends of blocks that lie here, or of all where a draft keeps all.
std::span<const AppendRecord> pack_appends(const StepPlan& plan, const Slots& slots, PlanUpload& upload) {
  AppendRecord* const appends = upload.take<AppendRecord>(std::ssize(plan.appends));
  const DcpShare dcp = slots.dcp();
  size_t count = 0;
  for (const BlockAppend& append : plan.appends) {
    const bool here = append.place.dcp_index == dcp.index;
    if (!here && !dcp.keeps_all) continue;
    appends[count++] = {.slot = append.slot.value,
                        .index = here ? slots.place_here(append.slot, append.block_index) : -1,
                        .page = append.place.page.value,
                        .block = append.block_index,
                        .draft_block = dcp.draft_block(append.place)};
  }
  return {upload.device(appends), count};
}

StartRecord start_record(const SequenceStart& start) {
  return {.slot = start.slot.value,
          .length = start.num_cached_tokens,
          .num_outputs = static_cast<int32_t>(start.tokens->size()) - start.num_prompt_tokens,
          .num_tokens = static_cast<int32_t>(start.tokens->size()),
          .newest = start.tokens->back(),
          .params = slot_params(*start.sampling)};
}

// After a chunk that samples nothing, in the text that the sequence came with.
int32_t next_token(const PlanRow& row, const Slot& slot) {
  if (row.samples()) return -1;
  return (*slot.tokens)[static_cast<size_t>(row.position.least + row.num_tokens())];
}

}  // namespace

PlanArrays pack_plan(const StepPlan& plan, std::span<const SequenceRows> sequences, const Slots& slots,
                     int32_t state_width, int32_t width, PlanUpload& upload) {
  StartRecord* const starts = upload.take<StartRecord>(std::ssize(plan.starts));
  std::transform(plan.starts.begin(), plan.starts.end(), starts, start_record);
  const std::span<const AppendRecord> appends = pack_appends(plan, slots, upload);
  RowRecord* const rows = upload.take<RowRecord>(std::ssize(plan.rows));
  int32_t* const positions = upload.take<int32_t>(std::ssize(plan.checkpoints));
  int32_t* const pages = upload.take<int32_t>(std::ssize(plan.checkpoints) * state_width);
  int32_t num_checkpoints = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const SequenceRows& sequence = sequences[i];
    const Prefill* prefill = plan.rows[i].prefill();
    const Slot& slot = slots[plan.rows[i].slot];
    rows[i] = {.slot = plan.rows[i].slot.value,
               .num_tokens = sequence.num_tokens,
               .tokens_offset = prefill == nullptr ? -1 : prefill->tokens_offset,
               .first_row = width > 0 ? static_cast<int32_t>(i) * width : sequence.first_row,
               .commit_all = sequence.commit_all ? 1 : 0,
               .first_checkpoint = num_checkpoints,
               .num_checkpoints = static_cast<int32_t>(sequence.checkpoints.size()),
               .num_blocks = slot.num_blocks,
               .blocks_here = static_cast<int32_t>(slot.pages.size()),
               .next_token = next_token(plan.rows[i], slot)};
    for (const StateCheckpoint& checkpoint : sequence.checkpoints) {
      std::copy_n(checkpoint.pages, state_width, pages + int64_t{num_checkpoints} * state_width);
      positions[num_checkpoints++] = checkpoint.position;
    }
  }
  return {.starts = upload.device(starts),
          .appends = appends.data(),
          .rows = upload.device(rows),
          .tokens = upload.place(std::span<const int32_t>(plan.tokens)).data(),
          .start_pages = pack_start_pages(plan, slots.dcp().index, state_width, upload),
          .checkpoint_positions = upload.device(positions),
          .checkpoint_pages = upload.device(pages),
          .num_starts = static_cast<int32_t>(plan.starts.size()),
          .num_appends = static_cast<int32_t>(appends.size()),
          .num_rows = static_cast<int32_t>(plan.rows.size()),
          .num_checkpoints = num_checkpoints,
          .width = width};
}

SlotParams slot_params(const SamplingParams& p) {
  const size_t num_bias = p.logit_bias.size();
  const size_t num_stops = p.min_tokens > 0 ? p.stop_ids.size() : 0;  // the kernels only ever forbid them
  CHECK(num_bias + num_stops <= static_cast<size_t>(kMaxListed), num_bias, " biases and ", num_stops, " stop ids");
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
          .num_stops = static_cast<int32_t>(num_stops),
          .logprobs = std::min(p.logprobs, kMaxTopLogprobs),
          .penalties = p.has_penalties() ? 1 : 0};
}

}  // namespace perigee

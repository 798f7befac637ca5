#include <numeric>

#include "exec/cuda/device_drafter.h"
#include "exec/cuda/draft_kernels.h"
#include "tensor/cuda/check.h"

namespace perigee {
namespace {

class EagleDeviceDrafter final : public DeviceDrafter {
 public:
  EagleDeviceDrafter(const Eagle3& model, const DeviceArrays& arrays, int32_t slots, int32_t max_tokens, CudaOps& ops);

  void draft(const DeviceStep& step) override;

 private:
  Batch batch_of(int32_t pass, int32_t rows, DeviceSequences& sequences) const;
  void guess(const Tensor& logits, int32_t pass);
  void send_target_ids();

  const Eagle3& model_;
  const SlotArrays slots_;
  const BatchArrays batch_;
  const DeviceSequences step_sequences_;  // of the first pass
  CudaOps& ops_;
  Buffer memory_, target_ids_;
  DraftPasses passes_;
  std::vector<SequenceRows> rows_;  // of a later pass: one each
};

EagleDeviceDrafter::EagleDeviceDrafter(const Eagle3& model, const DeviceArrays& arrays, int32_t slots,
                                       int32_t max_tokens, CudaOps& ops)
    : model_(model),
      slots_(arrays.slots()),
      batch_(arrays.batch()),
      step_sequences_(arrays.draft_sequences()),
      ops_(ops),
      passes_{.num_drafts = batch_.places - 1, .slots = slots} {
  const int64_t each = int64_t{slots} * passes_.num_drafts, ranks = slots_.ranks;
  size_t used = 0;
  const auto cut = [&]<typename T>(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(memory_.data() + used);
    used += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
  };
  for (int pass = 0; pass < 2; ++pass) {  // the first adds up, the second has the memory
    if (pass == 1) memory_ = device_buffer(used);
    used = 0;
    cut(passes_.first_tokens, max_tokens);
    for (int32_t** array :
         {&passes_.tokens, &passes_.positions, &passes_.lengths, &passes_.row_page, &passes_.local_blocks})
      cut(*array, each);
    cut(passes_.last_rows, slots);
    cut(passes_.numbers, slots + 1);
    cut(passes_.largest, slots);
    cut(passes_.picks, slots);
    cut(passes_.all_picks, slots * ranks);
  }
  if (memory_.data() == nullptr) return;
  send_target_ids();
  const std::vector<uint8_t> padding(memory_.size(), 0xFF);  // tokens are -1 while warming up
  device_copy(memory_.data(), padding.data(), padding.size());
  std::vector<int32_t> numbers(static_cast<size_t>(slots) + 1);
  std::iota(numbers.begin(), numbers.end(), 0);
  device_copy(passes_.numbers, numbers.data(), numbers.size() * 4);
  for (int32_t i = 0; i < slots; ++i) rows_.push_back({.first_row = i, .num_tokens = 1});
}

// Where they are not the draft's own.
void EagleDeviceDrafter::send_target_ids() {
  std::vector<int32_t> own(static_cast<size_t>(model_.config().vocab)), ids;
  std::iota(own.begin(), own.end(), 0);
  for (const int32_t id : own) ids.push_back(model_.target_id(id));
  if (ids == own) return;
  target_ids_ = device_buffer(ids.size() * 4);
  device_copy(target_ids_.data(), ids.data(), ids.size() * 4);
  passes_.target_ids = reinterpret_cast<const int32_t*>(target_ids_.data());
}

void EagleDeviceDrafter::draft(const DeviceStep& step) {
  const ArenaScope temporaries(step.ops.arena());
  const auto rows = static_cast<int32_t>(step.batch.sequences.size());
  if (rows == 0) return;
  cuda_ok(begin_passes(slots_, batch_, rows, passes_, ops_.stream()), "beginning drafts");
  Batch batch = step.batch;
  batch.tokens = {passes_.first_tokens, step.batch.tokens.size()};
  batch.logit_rows = {passes_.last_rows, static_cast<size_t>(rows)};
  batch.device = &step_sequences_;
  ops_.begin_batch();
  Eagle3::Output out = model_.forward(batch, model_.fuse(step.output.taps, step.ops), step.ops, step.pool);
  guess(out.logits, 0);
  for (int32_t pass = 1; pass < passes_.num_drafts; ++pass) {
    DeviceSequences sequences;
    batch = batch_of(pass, rows, sequences);
    ops_.begin_batch();
    out = model_.forward(batch, out.hidden, step.ops, step.pool);
    guess(out.logits, pass);
  }
}

Batch EagleDeviceDrafter::batch_of(int32_t pass, int32_t rows, DeviceSequences& sequences) const {
  const int64_t first = int64_t{pass} * passes_.slots;
  const auto n = static_cast<size_t>(rows);
  sequences = step_sequences_;
  sequences.first_row = sequences.row_sequence = passes_.numbers;
  sequences.lengths = passes_.lengths + first;
  sequences.row_page = passes_.row_page + first;
  if (sequences.local_blocks != nullptr) sequences.local_blocks = passes_.local_blocks + first;
  return {.tokens = {passes_.tokens + first, n},
          .positions = {passes_.positions + first, n},
          .sequences = std::span(rows_).first(n),
          .logit_rows = {passes_.numbers, n},
          .device = &sequences};
}

void EagleDeviceDrafter::guess(const Tensor& logits, int32_t pass) {
  cuda_ok(guess_drafts(logits, slots_, batch_, pass, passes_, ops_.stream()), "drafting");
  if (slots_.ranks == 1) return;
  const auto rows = static_cast<int32_t>(logits.rows);
  ops_.comm().all_gather(passes_.picks, static_cast<size_t>(rows) * sizeof(Pick), passes_.all_picks);
  cuda_ok(agree_on_drafts(slots_, batch_, rows, pass, passes_, ops_.stream()), "agreeing on drafts");
}

}  // namespace

std::unique_ptr<DeviceDrafter> make_device_eagle_drafter(const Eagle3& model, const DeviceArrays& arrays, int32_t slots,
                                                         int32_t max_tokens, CudaOps& ops) {
  return std::make_unique<EagleDeviceDrafter>(model, arrays, slots, max_tokens, ops);
}

}  // namespace perigee

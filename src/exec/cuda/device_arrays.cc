#include "exec/cuda/device_arrays.h"

#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {

DeviceArrays::DeviceArrays(const ArraySizes& sizes) {
  slots_.max_blocks = static_cast<int32_t>(sizes.max_blocks);
  slots_.vocab = static_cast<int32_t>(sizes.vocab);
  slots_.state_width = static_cast<int32_t>(sizes.state_width);
  slots_.max_history = static_cast<int32_t>(sizes.history);
  batch_.places = static_cast<int32_t>(sizes.places);
  slots_.rank = sizes.rank;
  slots_.ranks = sizes.ranks;
  for (int pass = 0; pass < 2; ++pass) {  // the first adds up, the second has the memory
    if (pass == 1) memory_ = device_buffer(used_);
    used_ = 0;
    cut_slots(sizes, memory_.data());
    cut_batch(sizes, memory_.data());
  }
  if (memory_.data() == nullptr) return;
  cuda_ok(cudaMemset(memory_.data(), 0, memory_.size()), "clearing slots");
  cuda_ok(cudaDeviceSynchronize(), "clearing slots");  // the worker's stream does not wait for this one
}

template <typename T>
void DeviceArrays::cut(T*& array, int64_t count, uint8_t* memory) {
  array = reinterpret_cast<T*>(memory + used_);
  used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
}

void DeviceArrays::cut_slots(const ArraySizes& sizes, uint8_t* memory) {
  cut(slots_.newest, sizes.slots, memory);
  if (sizes.places > 1) cut(slots_.drafts, sizes.slots * kMaxDrafts, memory);
  if (sizes.history > 0) {
    cut(slots_.history, sizes.slots * sizes.history, memory);
    cut(slots_.num_known, sizes.slots, memory);
  }
  cut(slots_.length, sizes.slots, memory);
  cut(slots_.num_outputs, sizes.slots, memory);
  cut(slots_.block_tables, sizes.slots * sizes.max_blocks, memory);
  if (sizes.shared) cut(slots_.block_index, sizes.slots * sizes.max_blocks, memory);
  if (sizes.draft_tables) cut(slots_.draft_tables, sizes.slots * sizes.max_blocks, memory);
  cut(slots_.committed, sizes.slots, memory);
  cut(slots_.state_tables, sizes.slots * sizes.state_width, memory);
  cut(slots_.params, sizes.slots, memory);
  cut(slots_.listed_ids, sizes.slots * kMaxListed, memory);
  cut(slots_.listed_bias, sizes.slots * kMaxListed, memory);
  const int64_t kept = (sizes.slots + sizes.ranks - 1) / sizes.ranks;
  cut(slots_.counts, kept * slots_.count_words(), memory);
  cut(slots_.seen, kept * slots_.bit_words(), memory);
}

void DeviceArrays::cut_batch(const ArraySizes& sizes, uint8_t* memory) {
  for (int32_t** rows : {&batch_.tokens, &batch_.positions, &batch_.row_sequence, &batch_.row_page})
    cut(*rows, sizes.tokens, memory);
  // Of sequences; warming up has one for each token.
  for (int32_t** numbers :
       {&batch_.first_row, &batch_.lengths, &batch_.slots, &batch_.committed, &batch_.commit, &batch_.first_checkpoint})
    cut(*numbers, sizes.tokens + 1, memory);
  cut(batch_.samples, sizes.tokens * sizes.places, memory);
  cut(batch_.sampled_by, sizes.tokens * sizes.places, memory);
  if (sizes.places > 1)
    for (int32_t** numbers : {&batch_.next_token, &batch_.chunk_tokens, &batch_.num_blocks, &batch_.blocks_here})
      cut(*numbers, sizes.tokens, memory);
  cut(batch_.block_tables, sizes.slots * sizes.max_blocks, memory);
  if (sizes.shared) {
    cut(batch_.block_index, sizes.slots * sizes.max_blocks, memory);
    cut(batch_.local_blocks, sizes.tokens, memory);
  }
  if (sizes.draft_tables) {
    cut(batch_.draft_tables, sizes.slots * sizes.max_blocks, memory);
    cut(batch_.draft_row_page, sizes.tokens, memory);
  }
  cut(batch_.state_pages, sizes.slots * sizes.state_width, memory);
  cut(batch_.checkpoint_position, sizes.checkpoints, memory);
  cut(batch_.checkpoint_pages, sizes.checkpoints * sizes.state_width, memory);
}

DeviceSequences DeviceArrays::sequences() const {
  return {.first_row = batch_.first_row,
          .lengths = batch_.lengths,
          .block_tables = batch_.block_tables,
          .table_width = slots_.max_blocks,
          .block_index = batch_.block_index,
          .local_blocks = batch_.local_blocks,
          .row_sequence = batch_.row_sequence,
          .row_page = batch_.row_page,
          .state_pages = batch_.state_pages,
          .state_width = slots_.state_width,
          .slots = batch_.slots,
          .committed = batch_.committed,
          .commit = batch_.commit,
          .first_checkpoint = batch_.first_checkpoint,
          .checkpoint_position = batch_.checkpoint_position,
          .checkpoint_pages = batch_.checkpoint_pages};
}

DeviceSequences DeviceArrays::draft_sequences() const {
  DeviceSequences out = sequences();
  if (batch_.draft_tables == nullptr) return out;
  out.block_tables = batch_.draft_tables;
  out.block_index = out.local_blocks = nullptr;
  out.row_page = batch_.draft_row_page;
  return out;
}

}  // namespace perigee

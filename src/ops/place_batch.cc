#include "ops/place_batch.h"

#include <algorithm>

namespace perigee {
namespace {

std::span<const int32_t> place(std::span<const int32_t> host, Ops& ops) {
  if (host.empty()) return {};
  const std::span<int32_t> there = ops.arena().array<int32_t>(std::ssize(host));
  ops.copy(there.data(), host.data(), host.size_bytes());
  return there;
}

}  // namespace

PlacedBatch::PlacedBatch(const Batch& host, Ops& ops) : batch_(host) {
  if (!ops.on_device()) return;
  batch_.tokens = place(host.tokens, ops);
  batch_.positions = place(host.positions, ops);
  batch_.logit_rows = place(host.logit_rows, ops);
  std::vector<int32_t> first_row, num_tokens, position, slot, row_slot;
  int32_t max_blocks = 1;
  for (const SequenceRows& s : host.sequences) {
    first_row.push_back(s.first_row);
    num_tokens.push_back(s.num_tokens);
    position.push_back(s.position);
    slot.push_back(static_cast<int32_t>(slot.size()));
    row_slot.insert(row_slot.end(), static_cast<size_t>(s.num_tokens), slot.back());
    max_blocks = std::max(max_blocks, (s.position + s.num_tokens + 63) / 64);
  }
  std::vector<int32_t> tables(host.sequences.size() * static_cast<size_t>(max_blocks));
  for (size_t i = 0; i < host.sequences.size(); ++i) {
    const SequenceRows& s = host.sequences[i];
    std::copy_n(s.pages, (s.position + s.num_tokens + 63) / 64, tables.begin() + static_cast<int64_t>(i) * max_blocks);
  }
  device_ = {.first_row = place(first_row, ops).data(),
             .num_tokens = place(num_tokens, ops).data(),
             .position = place(position, ops).data(),
             .slot = place(slot, ops).data(),
             .row_slot = place(row_slot, ops).data(),
             .block_tables = place(tables, ops).data(),
             .max_blocks = max_blocks};
  batch_.device = &device_;
}

}  // namespace perigee

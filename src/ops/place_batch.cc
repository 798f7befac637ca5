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
  std::vector<int32_t> first_row, lengths, row_sequence, row_page;
  int32_t width = 1;
  for (const SequenceRows& s : host.sequences) {
    first_row.push_back(s.first_row);
    lengths.push_back(s.position + s.num_tokens);
    width = std::max(width, (lengths.back() + 63) / 64);
    for (int32_t i = 0; i < s.num_tokens; ++i) {
      row_sequence.push_back(static_cast<int32_t>(lengths.size()) - 1);
      row_page.push_back(s.pages[(s.position + i) / 64]);
    }
  }
  first_row.push_back(static_cast<int32_t>(row_page.size()));
  std::vector<int32_t> tables(host.sequences.size() * static_cast<size_t>(width));
  for (size_t i = 0; i < host.sequences.size(); ++i)
    std::copy_n(host.sequences[i].pages, (lengths[i] + 63) / 64, tables.begin() + static_cast<int64_t>(i) * width);
  device_ = {.first_row = place(first_row, ops).data(),
             .lengths = place(lengths, ops).data(),
             .block_tables = place(tables, ops).data(),
             .table_width = width,
             .row_sequence = place(row_sequence, ops).data(),
             .row_page = place(row_page, ops).data()};
  batch_.device = &device_;
}

}  // namespace perigee

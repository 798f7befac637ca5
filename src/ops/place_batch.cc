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

PlacedBatch::PlacedBatch(const Batch& host, Ops& ops, int32_t state_pages) : batch_(host) {
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
      row_page.push_back(s.pages != nullptr ? page_here(s, s.position + i) : -1);
    }
  }
  first_row.push_back(static_cast<int32_t>(row_page.size()));
  device_ = {.first_row = place(first_row, ops).data(),
             .lengths = place(lengths, ops).data(),
             .table_width = width,
             .row_sequence = place(row_sequence, ops).data(),
             .row_page = place(row_page, ops).data()};
  place_blocks(host, ops);
  if (state_pages > 0) place_states(host, ops, state_pages);
  batch_.device = &device_;
}

void PlacedBatch::place_blocks(const Batch& host, Ops& ops) {
  const auto width = static_cast<size_t>(device_.table_width);
  std::vector<int32_t> tables(host.sequences.size() * width), index(tables.size()), counts;
  for (const SequenceRows& s : host.sequences) {
    const auto count = static_cast<size_t>((tokens_here(s, s.position + s.num_tokens) + 63) / 64);
    const auto first = static_cast<std::ptrdiff_t>(counts.size() * width);
    counts.push_back(static_cast<int32_t>(count));
    if (s.pages == nullptr) continue;  // without latent layers
    std::copy_n(s.pages, count, tables.begin() + first);
    if (host.is_shared()) std::copy_n(s.shared.here.begin(), count, index.begin() + first);
  }
  device_.block_tables = place(tables, ops).data();
  if (!host.is_shared()) return;
  device_.block_index = place(index, ops).data();
  device_.local_blocks = place(counts, ops).data();
}

void PlacedBatch::place_states(const Batch& host, Ops& ops, int32_t state_pages) {
  std::vector<int32_t> pages, checkpoint_pages, slots, committed, commit, checkpoint_position, first_checkpoint = {0};
  for (const SequenceRows& s : host.sequences) {
    pages.insert(pages.end(), s.state_pages, s.state_pages + state_pages);
    for (const StateCheckpoint& checkpoint : s.checkpoints) {
      checkpoint_position.push_back(checkpoint.position);
      checkpoint_pages.insert(checkpoint_pages.end(), checkpoint.pages, checkpoint.pages + state_pages);
    }
    first_checkpoint.push_back(static_cast<int32_t>(checkpoint_position.size()));
    slots.push_back(s.slot);
    committed.push_back(s.committed);
    commit.push_back(s.commit_all ? s.position + s.num_tokens : s.position);
  }
  device_.state_pages = place(pages, ops).data();
  device_.state_width = state_pages;
  device_.slots = place(slots, ops).data();
  device_.committed = place(committed, ops).data();
  device_.commit = place(commit, ops).data();
  device_.first_checkpoint = place(first_checkpoint, ops).data();
  device_.checkpoint_position = place(checkpoint_position, ops).data();
  device_.checkpoint_pages = place(checkpoint_pages, ops).data();
}

}  // namespace perigee

// Multi-head latent attention where a group of ranks shares the blocks of each sequence (decode context parallelism,
// DESIGN D6): the body of mla_attend for such batches. On the host.
//
// Absorbed rows: the queries of all heads of the group are gathered, each rank attends with them to the blocks that lie
// with it, one exchange brings each rank its own heads' results of all ranks, and it merges them.
// Expanded rows: the cached rows of the sequence are gathered, and attention runs over them as it does on one rank.
//
// Collectives and their sizes follow from forms, lengths and owners of blocks, which every rank knows alike.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "ops/ops.h"

namespace perigee {
namespace {

constexpr int64_t kExchangedBytes = 32 << 20;  // of a rank's results in one exchange, unless a row has more

int32_t end_row(const SequenceRows& s) {
  return s.first_row + s.num_tokens;
}

// Rows [first, first + count) of the batch, as a batch of their own.
Batch cut(const Batch& batch, int32_t first, int32_t count, Arena& arena) {
  const auto parts = arena.array<SequenceRows>(std::ssize(batch.sequences));
  size_t num_parts = 0;
  for (const SequenceRows& s : batch.sequences) {
    const int32_t begin = std::max(first, s.first_row), end = std::min(first + count, end_row(s));
    if (begin >= end) continue;
    SequenceRows& part = *std::construct_at(&parts[num_parts++], s);
    part.first_row = begin - first;
    part.num_tokens = end - begin;
    part.position += begin - s.first_row;
  }
  Batch out;
  out.sequences = parts.first(num_parts);
  return out;
}

// [n, w] of each rank -> [n, ranks * w].
Tensor gather_columns(const Tensor& mine, Comm& comm, Arena& arena) {
  const Tensor all = arena.tensor(mine.dtype, mine.rows, comm.size() * mine.cols);
  const auto width = static_cast<size_t>(mine.cols * dtype_bytes(mine.dtype));
  const auto ranks = static_cast<size_t>(comm.size()), rows = static_cast<size_t>(mine.rows);
  if (rows == 1) {
    comm.all_gather(mine.data, width, all.data);
    return all;
  }
  const std::span<uint8_t> by_rank = arena.array<uint8_t>(static_cast<int64_t>(ranks * rows * width));
  comm.all_gather(mine.data, rows * width, by_rank.data());
  for (size_t r = 0; r < ranks; ++r)
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<uint8_t*>(all.data) + (row * ranks + r) * width,
                  by_rank.data() + (r * rows + row) * width, width);
  return all;
}

// Results [n * ranks * heads, L + 1] of all heads over one rank's blocks -> of this rank's heads over every rank's
// blocks, side by side: [n * heads, ranks * (L + 1)].
Tensor exchange(const Tensor& results, int64_t heads, Comm& comm, Arena& arena) {
  const std::span<int32_t> to = arena.array<int32_t>(results.rows);
  for (size_t i = 0; i < to.size(); ++i)
    to[i] = static_cast<int32_t>(i / static_cast<size_t>(heads) % static_cast<size_t>(comm.size()));
  const Tensor whole = arena.tensor(DType::kF32, results.rows / comm.size(), comm.size() * results.cols);
  comm.all_to_all(results, to, whole);
  return whole;
}

// sum_r exp(lse_r) out_r / sum_r exp(lse_r), in the order of the ranks. A rank that saw nothing (-inf) is left out by a
// select, whatever its out holds. NaN among cached rows shows, as it does on one rank.
void merge_row(const float* results, int64_t ranks, int64_t latent, float* out) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const auto lse = [&](int64_t r) { return results[r * (latent + 1) + latent]; };
  float most = kNothing, sum = 0;
  for (int64_t r = 0; r < ranks; ++r) most = std::fmax(most, lse(r));
  std::fill_n(out, latent, 0.0f);
  for (int64_t r = 0; r < ranks; ++r) {
    if (lse(r) == kNothing) continue;
    const float weight = std::exp(lse(r) - most);
    if (weight == 0) continue;
    sum += weight;
    for (int64_t i = 0; i < latent; ++i) out[i] += weight * results[r * (latent + 1) + i];
  }
  if (most == kNothing && sum == 0) return;
  const float factor = 1 / sum;
  for (int64_t i = 0; i < latent; ++i) out[i] *= factor;
}

Tensor attend_absorbed(Ops& ops, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                       const LatentLayer& cache) {
  MlaShape all = shape;
  all.heads *= ops.dcp().size();
  const Tensor queries = gather_columns(ops.mla_absorb(q, up, shape, batch), ops.dcp(), ops.arena());
  const Tensor results = exchange(ops.attend_latents(queries, all, batch, cache), shape.heads, ops.dcp(), ops.arena());
  const Tensor merged = ops.arena().tensor(DType::kF32, q.rows, shape.heads * shape.latent);
  for (int64_t i = 0; i < results.rows; ++i)
    merge_row(results.row<const float>(i), ops.dcp().size(), shape.latent,
              static_cast<float*>(merged.data) + i * shape.latent);
  return ops.mla_project(merged, up, shape, batch);
}

// A sequence's cached rows, those of the new tokens among them, as if all blocks lay here. It has as many pages for
// each rank as the rank with most blocks needs.
LatentLayer gather_blocks(const SequenceRows& s, const LatentLayer& cache, Comm& comm, Arena& arena,
                          std::span<int32_t> pages) {
  const int64_t block_bytes = kRowsOfBlock * cache.row_bytes;
  const std::span<int32_t> counts = arena.array<int32_t>(comm.size());
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t b = 0; b < pages.size(); ++b) ++counts[s.shared.owners[b]];
  const int64_t stride = *std::max_element(counts.begin(), counts.end());
  const std::span<uint8_t> mine = arena.array<uint8_t>(stride * block_bytes);
  for (int64_t i = 0; i < counts[static_cast<size_t>(comm.rank())]; ++i)
    std::memcpy(mine.data() + i * block_bytes, cache.base + s.pages[i] * cache.page_bytes,
                static_cast<size_t>(block_bytes));
  const std::span<uint8_t> all = arena.array<uint8_t>(comm.size() * std::ssize(mine));
  comm.all_gather(mine.data(), mine.size(), all.data());
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t b = 0; b < pages.size(); ++b) {
    const uint8_t owner = s.shared.owners[b];
    pages[b] = static_cast<int32_t>(owner * stride + counts[owner]++);
  }
  return {.base = all.data(),
          .page_bytes = block_bytes,
          .row_bytes = cache.row_bytes,
          .format = cache.format,
          .scale = cache.scale};
}

Tensor attend_expanded(Ops& ops, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const SequenceRows& s,
                       const LatentLayer& cache) {
  const int64_t tokens = int64_t{s.position} + s.num_tokens;
  const std::span<int32_t> pages = ops.arena().array<int32_t>((tokens + kRowsOfBlock - 1) / kRowsOfBlock);
  const LatentLayer gathered = gather_blocks(s, cache, ops.dcp(), ops.arena(), pages);
  SequenceRows alone = s;
  alone.first_row = 0;
  alone.pages = pages.data();
  alone.shared = {};
  Batch batch;
  batch.sequences = {&alone, 1};
  return ops.mla_attend(q, up, shape, batch, gathered);
}

// Both contiguous.
void put(const Tensor& rows, const Tensor& out, int64_t first) {
  const Tensor to = out.row_range(first, rows.rows);
  std::memcpy(to.data, rows.data, static_cast<size_t>(rows.rows * rows.cols * dtype_bytes(rows.dtype)));
}

}  // namespace

Tensor Ops::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& shape, const Batch& batch,
                       const LatentLayer& cache) {
  CHECK(batch.is_shared() && !on_device(), "the body of mla_attend is for a cache that ranks share, on the host");
  const Tensor out = arena().tensor(wide_dtype(), q.rows, shape.heads * shape.value);
  const int64_t row_bytes = shape.heads * dcp_.size() * (shape.latent + 1) * static_cast<int64_t>(sizeof(float));
  const auto most_rows = static_cast<int32_t>(std::max<int64_t>(1, kExchangedBytes / row_bytes));
  const std::span<const SequenceRows> sequences = batch.sequences;
  for (size_t i = 0; i < sequences.size();) {
    const int32_t first = sequences[i].first_row;
    if (sequences[i].form == MlaForm::kExpanded) {
      const ArenaScope scratch(arena());
      const Tensor rows = q.row_range(first, sequences[i].num_tokens);
      put(attend_expanded(*this, rows, up, shape, sequences[i], cache), out, first);
      ++i;
      continue;
    }
    while (i < sequences.size() && sequences[i].form == MlaForm::kAbsorbed) ++i;
    const int32_t end = end_row(sequences[i - 1]);
    for (int32_t row = first; row < end; row += most_rows) {
      const ArenaScope scratch(arena());
      const int32_t count = std::min(most_rows, end - row);
      const Batch part = cut(batch, row, count, arena());
      put(attend_absorbed(*this, q.row_range(row, count), up, shape, part, cache), out, row);
    }
  }
  return out;
}

Tensor Ops::mla_absorb(const Tensor&, const MlaUpWeight&, const MlaShape&, const Batch&) {
  CHECK(false, name(), " does not share a cache");
}

Tensor Ops::attend_latents(const Tensor&, const MlaShape&, const Batch&, const LatentLayer&) {
  CHECK(false, name(), " does not share a cache");
}

Tensor Ops::mla_project(const Tensor&, const MlaUpWeight&, const MlaShape&, const Batch&) {
  CHECK(false, name(), " does not share a cache");
}

}  // namespace perigee

#include "ops/dealt_attention.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace perigee {
namespace {

// Below this many keys a row on average, the two exchanges take as long as what two ranks save (ADR 0029).
constexpr int64_t kKeysOfARow = 96;
constexpr int64_t kMostRows = 256;  // bounds the memory of the results, which have all heads

// The sequences of a step among the ranks.
struct Deal {
  std::span<int32_t> owners;               // of each row, the rank that attends for it
  std::span<const SequenceRows> mine;      // this rank's, their rows one after the other
  int64_t num_mine = 0, most_of_rank = 0;  // rows
};

int64_t num_keys(const SequenceRows& s) {
  return int64_t{s.position} + s.num_tokens;
}

bool pays(const Batch& batch, int64_t num_rows, const Comm& comm) {
  if (std::ssize(batch.sequences) < comm.size() || num_rows > kMostRows) return false;
  int64_t keys = 0;
  for (const SequenceRows& s : batch.sequences) {
    if (s.form != MlaForm::kAbsorbed) return false;
    keys += num_keys(s);
  }
  return keys >= kKeysOfARow * num_rows;
}

// Each sequence in turn to the rank with least to do.
std::optional<Deal> deal(const Batch& batch, int64_t num_rows, const Comm& comm, Arena& arena) {
  if (!pays(batch, num_rows, comm)) return {};
  const std::span<int64_t> work = arena.array<int64_t>(comm.size()), rows = arena.array<int64_t>(comm.size());
  std::fill(work.begin(), work.end(), 0);
  std::fill(rows.begin(), rows.end(), 0);
  const auto mine = arena.array<SequenceRows>(std::ssize(batch.sequences));
  Deal out{.owners = arena.array<int32_t>(num_rows), .mine = {}};
  size_t count = 0;
  int64_t all_work = 0;
  for (const SequenceRows& s : batch.sequences) {
    const auto rank = static_cast<size_t>(std::min_element(work.begin(), work.end()) - work.begin());
    if (static_cast<int32_t>(rank) == comm.rank())
      std::construct_at(&mine[count++], s)->first_row = static_cast<int32_t>(rows[rank]);
    std::fill_n(out.owners.begin() + s.first_row, s.num_tokens, static_cast<int32_t>(rank));
    const int64_t of_sequence = s.num_tokens * num_keys(s);
    work[rank] += of_sequence;
    all_work += of_sequence;
    rows[rank] += s.num_tokens;
  }
  // The slowest rank may have a quarter more than its share; beyond that, waiting for it costs what dealing saves.
  if (4 * comm.size() * *std::max_element(work.begin(), work.end()) > 5 * all_work) return {};
  out.mine = mine.first(count);
  out.num_mine = rows[static_cast<size_t>(comm.rank())];
  out.most_of_rank = *std::max_element(rows.begin(), rows.end());
  return out;
}

// The same memory as rows of so many floats, which the exchange copies as they are.
Tensor as_words(const Tensor& t, int64_t rows) {
  CHECK(t.contiguous());
  const int64_t cols = t.rows * t.cols * dtype_bytes(t.dtype) / static_cast<int64_t>(sizeof(float)) / rows;
  return {.data = t.data, .dtype = DType::kF32, .rows = rows, .cols = cols, .row_stride = cols};
}

// Every rank's [n, heads * width] -> [most_of_rank, ranks * heads * width], of which the first num_mine rows are set:
// those dealt to this rank, with the heads of all.
Tensor gather_queries(const Tensor& absorbed, const Deal& deal, Comm& comm, Arena& arena) {
  const Tensor queries = arena.tensor(absorbed.dtype, deal.most_of_rank, comm.size() * absorbed.cols);
  comm.all_to_all(as_words(absorbed, absorbed.rows), deal.owners,
                  as_words(queries.row_range(0, deal.num_mine), deal.num_mine));
  return queries;
}

// Results [most * ranks * heads, L + 1] of the rows dealt here -> [n, heads * L] of this rank's heads.
Tensor return_results(const Tensor& results, int64_t heads, const Deal& deal, Comm& comm, Arena& arena) {
  const int64_t parts = deal.most_of_rank * comm.size(), latent = results.cols - 1;
  const std::span<int32_t> to = arena.array<int32_t>(parts);
  for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int32_t>(i % static_cast<size_t>(comm.size()));
  const Tensor part = as_words(results, parts);
  const Tensor back = arena.tensor(DType::kF32, deal.most_of_rank, comm.size() * part.cols);
  comm.all_to_all(part, to, back);
  const auto num_rows = std::ssize(deal.owners);
  const Tensor means = arena.tensor(DType::kF32, num_rows, heads * latent);
  const std::span<int64_t> next = arena.array<int64_t>(comm.size());
  std::fill(next.begin(), next.end(), 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t owner = deal.owners[static_cast<size_t>(row)];
    const float* from = back.row<const float>(next[static_cast<size_t>(owner)]++) + owner * part.cols;
    for (int64_t head = 0; head < heads; ++head)
      std::copy_n(from + head * results.cols, latent, means.row<float>(row) + head * latent);
  }
  return means;
}

}  // namespace

std::optional<Tensor> attend_dealt(Ops& ops, const Tensor& q, const MlaUpWeight& up, const MlaShape& shape,
                                   const Batch& batch, const LatentLayer& cache) {
  Comm& comm = ops.comm();
  if (shape.heads * (shape.latent + shape.rope) % 2 != 0) return {};
  const std::optional<Deal> dealt = deal(batch, q.rows, comm, ops.arena());
  if (!dealt) return {};
  const Tensor queries = gather_queries(ops.mla_absorb(q, up, shape, batch), *dealt, comm, ops.arena());
  MlaShape all = shape;
  all.heads *= comm.size();
  Batch mine;
  mine.sequences = dealt->mine;
  const Tensor results = ops.attend_latents(queries, all, mine, cache);
  return ops.mla_project(return_results(results, shape.heads, *dealt, comm, ops.arena()), up, shape, batch);
}

}  // namespace perigee

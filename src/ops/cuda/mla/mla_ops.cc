// CudaOps: latent attention.
#include <algorithm>
#include <array>
#include <utility>

#include "comm/cuda/peer_comm.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/mla/latent_attention.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mla/mla_write.h"
#include "ops/cuda/mla/result_row.h"
#include "ops/cuda/mla/shared_exchange.h"
#include "ops/cuda/mla/shared_latents.h"

namespace perigee {
namespace {

constexpr int64_t kExpandedKeys = kPieceBlocks * kMlaBlock;  // of one piece in expanded attention: bounds its memory
constexpr int64_t kAttentionRows = 1024;                     // of one launch: bounds its scratch memory
constexpr int64_t kFixedPieces = 64 * 65;  // likewise, of fixed lists: a token of 64 sequences of 1,048,576 tokens

bool has_mla_shape(const MlaShape& s) {
  return s.latent == kMlaLatent && s.latent + s.rope == kMlaWidth;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

// The end of a launch of fixed lists that begins with row `begin`: as many rows as its partial results hold. For any
// positions: a captured graph is replayed at others.
int64_t launch_end(const MlaDecodeConfig& config, const Batch& batch, int64_t begin, bool for_any_position) {
  int64_t end = begin, left = config.max_partials;
  for (const SequenceRows& rows : batch.sequences) {
    const int64_t last = rows.first_row + rows.num_tokens;
    if (last <= begin) continue;
    // Of a decode row, too, the host may not know the position.
    const int32_t blocks = for_any_position || rows.num_tokens == 1
                               ? batch.device->table_width
                               : (rows.position + rows.num_tokens + kMlaBlock - 1) / kMlaBlock;
    const int64_t pieces = mla_pieces(blocks);
    const int64_t count = std::min(last - end, left / pieces * config.rows / config.heads);
    end += count;
    left -= (count * config.heads + config.rows - 1) / config.rows * pieces;
    if (end < last) break;
  }
  CHECK(end > begin, config.max_partials, " pieces for a row");
  return end;
}

// The most rows of so many heads here and in all that an exchange may have.
int64_t exchanged_rows(const MlaShape& here, const MlaShape& all) {
  const int64_t columns = std::max(here.heads * (here.latent + here.rope), all.heads * result_columns(all.latent));
  return std::max<int64_t>(1, kShownBytes / static_cast<int64_t>(sizeof(uint16_t)) / columns);
}

// The most blocks of the piece that lie with one rank. Without owners, as in a step of padding: dealt in turn.
int32_t most_of_a_rank(const BlockPiece& piece, const uint8_t* owners, int32_t ranks) {
  std::array<int32_t, UINT8_MAX + 1> counts{};
  for (int32_t b = piece.begin; b < piece.end; ++b) ++counts[owners != nullptr ? owners[b] : b % ranks];
  return *std::max_element(counts.begin(), counts.end());
}

}  // namespace

bool CudaOps::has_mla_kernels(const MlaShape& s, const LatentLayer& cache) const {
  const bool has_format = cache.format == LatentFormat::kBF16 || cache.format == LatentFormat::kF8E4M3 ||
                          (cache.format == LatentFormat::kF8Tiles && traits_.compute_capability == 90);
  return has_format && has_mla_shape(s) && cache.row_bytes == latent_row_bytes(cache.format, s.latent, s.rope);
}

Tensor CudaOps::mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache) {
  const MlaShape& s = w.shape;
  if (!has_mla_kernels(s, cache)) return Ops::mla_in(x, w, batch, cache);
  const Tensor q_in = w.q_a.packed ? rms_norm(linear(x, w.q_a, DType::kF32), w.q_a_norm, w.latent_eps) : x;
  const Tensor q = linear(q_in, w.q, DType::kBF16);
  const Tensor kv = linear(x, w.kv_a, DType::kF32);
  const MlaWriteArgs args{.tokens = static_cast<int>(x.rows),
                          .heads = static_cast<int>(s.heads),
                          .nope = static_cast<int>(s.nope),
                          .kv = kv.row<const float>(0),
                          .kv_stride = kv.row_stride,
                          .norm = w.kv_a_norm.data(),
                          .eps = w.latent_eps,
                          .q = q.data,
                          .positions = batch.positions.data(),
                          .inv_freq = w.rope.enabled ? w.rope.inv_freq.data() : nullptr,
                          .cos_sin_factor = w.rope.cos_sin_factor,
                          .pages = batch.device->row_page,
                          .cache = cache.base,
                          .page_bytes = cache.page_bytes,
                          .format = cache.format,
                          .kv_scale = cache.scale};
  check(mla_write(args, stream()), "mla_in");
  return q;
}

void CudaOps::attend_lists(const QueryRows& query, const MlaShape& s, const Batch& batch, const LatentLayer& cache,
                           const Tensor& out) {
  const bool fixed = options_.deterministic;
  int max_query = 1;
  for (const SequenceRows& rows : batch.sequences) max_query = std::max(max_query, rows.num_tokens);
  const int64_t first = query.first, last = first + query.rows.rows;
  const MlaDecodeShape shape{.heads = static_cast<int>(s.heads),
                             .max_sequences = static_cast<int>(batch.sequences.size()),
                             .max_tokens = static_cast<int>(query.rows.rows),
                             .max_query = max_query,
                             .max_pieces = kFixedPieces,
                             .format = cache.format,
                             .results = out.dtype == DType::kF16,
                             .lists = fixed ? MlaLists::kFixed : MlaLists::kBalanced,
                             .multiprocessors = multiprocessors_,
                             .compute_capability = traits_.compute_capability};
  const MlaDecodeConfig config = mla_decode_config(shape);
  if (mla_workspaces_.empty() || mla_workspaces_.back().size() < config.workspace_bytes())
    mla_workspaces_.push_back(device_buffer(mla_most_workspace_bytes(shape)));
  uint8_t* workspace = mla_workspaces_.back().data();
  const DeviceSequences& sequences = *batch.device;
  MlaBatch lists{.first_row = sequences.first_row,
                 .lengths = sequences.lengths,
                 .block_table = sequences.block_tables,
                 .block_index = sequences.block_index,
                 .local_blocks = sequences.local_blocks,
                 .sequences = static_cast<int>(batch.sequences.size()),
                 .table_width = sequences.table_width,
                 .query_row = static_cast<int>(first)};
  const MlaDecodeArgs args{.q = query.rows.data,
                           .kv = cache.base,
                           .page_bytes = cache.page_bytes,
                           .softmax_scale = s.softmax_scale,
                           .kv_scale = cache.scale,
                           .out = shape.results ? nullptr : out.data,
                           .results = shape.results ? out.row<uint16_t>(0) : nullptr};
  const bool captured = is_captured(stream());
  for (int64_t begin = first, end = 0; begin < last; begin = end) {
    end = fixed ? std::min(last, launch_end(config, batch, begin, captured)) : last;
    lists.row_begin = static_cast<int>(begin), lists.row_end = static_cast<int>(end);
    const std::pair rows(begin, end);
    if (mla_planned_ != rows) check(mla_plan(config, lists, workspace, stream()), "mla_plan");
    mla_planned_ = rows;
    check(mla_decode(config, lists, args, workspace, stream()), "mla_attend");
  }
}

Tensor CudaOps::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& s, const Batch& batch,
                           const LatentLayer& cache) {
  CHECK(q.cols == s.heads * s.q_head() && batch.device != nullptr && cache.format != LatentFormat::kF32 &&
        s.latent <= kCudaLimits.max_latent && s.rope <= kCudaLimits.max_rope);
  const auto& weights = static_cast<const CudaMlaUp&>(*up.packed);
  const Tensor y = arena_.tensor(DType::kBF16, q.rows, s.heads * s.value);
  // Absorbed rows are one run from the first on. Decode rows come first; a chunk that asks for the absorbed form after
  // one that asks for the expanded takes the expanded too: up-projecting its context once costs less than computing a
  // long prompt the other way.
  const bool expandable = !options_.deterministic && has_mla_shape(s) &&
                          choose_mla_prefill(s.nope, s.value, traits_.compute_capability) != PrefillKernel::kNone;
  size_t first = expandable ? 0 : batch.sequences.size();
  while (first < batch.sequences.size() && batch.sequences[first].form != MlaForm::kExpanded) ++first;
  const int64_t absorbed_rows = first < batch.sequences.size() ? batch.sequences[first].first_row : q.rows;
  Batch absorbed = batch;
  absorbed.sequences = batch.sequences.first(first);
  if (batch.is_shared())
    attend_shared(q.row_range(0, absorbed_rows), weights, s, absorbed, cache, y);
  else if (absorbed_rows > 0)
    attend_absorbed(q.row_range(0, absorbed_rows), weights, s, absorbed, cache, y.row_range(0, absorbed_rows));
  for (size_t i = first; i < batch.sequences.size(); ++i) {
    const SequenceRows& rows = batch.sequences[i];
    attend_expanded({rows, *batch.device, i}, q.row_range(rows.first_row, rows.num_tokens), weights, s, cache,
                    y.row_range(rows.first_row, rows.num_tokens));
  }
  return y;
}

Tensor CudaOps::mla_absorb(const Tensor& q, const MlaUpWeight& up, const MlaShape& s, const Batch&) {
  const Tensor query = arena_.tensor(DType::kBF16, q.rows, s.heads * (s.latent + s.rope));
  absorb(q, static_cast<const CudaMlaUp&>(*up.packed), s, query);
  return query;
}

Tensor CudaOps::attend_latents(const Tensor& queries, const MlaShape& s, const Batch& batch, const LatentLayer& cache) {
  const Tensor results = arena_.tensor(DType::kF16, queries.rows * s.heads, result_columns(s.latent));
  attend({queries, 0}, s, batch, cache, results);
  return results;
}

Tensor CudaOps::mla_project(const Tensor& u, const MlaUpWeight& up, const MlaShape& s, const Batch&) {
  const Tensor y = arena_.tensor(DType::kBF16, u.rows, s.heads * s.value);
  project(u, static_cast<const CudaMlaUp&>(*up.packed), s, y);
  return y;
}

void CudaOps::absorb(const Tensor& q, const CudaMlaUp& weights, const MlaShape& s, const Tensor& query) {
  const int64_t width = s.latent + s.rope;
  gemm({.weight = weights.keys.data.data(),
        .weight_stride = s.latent * weights.keys.row_bytes(),
        .x = q.row<const uint16_t>(0),
        .x_stride = q.row_stride,
        .x_head = s.q_head(),
        .y = query.data,
        .y_stride = query.row_stride,
        .y_head = width,
        .rows = static_cast<int32_t>(q.rows),
        .heads = static_cast<int32_t>(s.heads),
        .out = static_cast<int32_t>(s.latent),
        .in = static_cast<int32_t>(s.nope),
        .chunks = static_cast<int32_t>(weights.keys.padded_in / 128),
        .output = GemmOutput::kBF16},
       "mla query");
  const dim3 rows_heads_count(static_cast<unsigned>(q.rows), static_cast<unsigned>(s.heads),
                              static_cast<unsigned>(s.rope));
  check(copy_head_columns(q.row<const uint16_t>(0), {q.row_stride, s.q_head(), s.nope}, query.row<uint16_t>(0),
                          {query.row_stride, width, s.latent}, rows_heads_count, stream()),
        "mla query");
}

void CudaOps::project(const Tensor& mixed, const CudaMlaUp& weights, const MlaShape& s, const Tensor& y) {
  CHECK(mixed.dtype == DType::kBF16, "a mean of ", dtype_name(mixed.dtype));
  gemm({.weight = weights.kv_b.data.data() + s.nope * weights.kv_b.row_bytes(),
        .weight_stride = (s.nope + s.value) * weights.kv_b.row_bytes(),
        .x = mixed.row<const uint16_t>(0),
        .x_stride = mixed.row_stride,
        .x_head = s.latent,
        .y = y.data,
        .y_stride = y.row_stride,
        .y_head = s.value,
        .rows = static_cast<int32_t>(mixed.rows),
        .heads = static_cast<int32_t>(s.heads),
        .out = static_cast<int32_t>(s.value),
        .in = static_cast<int32_t>(s.latent),
        .chunks = static_cast<int32_t>(weights.kv_b.padded_in / 128),
        .output = GemmOutput::kBF16},
       "mla value");
}

void CudaOps::attend_absorbed(const Tensor& q, const CudaMlaUp& weights, const MlaShape& s, const Batch& batch,
                              const LatentLayer& cache, const Tensor& y) {
  const Tensor query = arena_.tensor(DType::kBF16, q.rows, s.heads * (s.latent + s.rope));
  absorb(q, weights, s, query);
  const Tensor mixed = arena_.tensor(DType::kBF16, q.rows, s.heads * s.latent);
  attend({query, 0}, s, batch, cache, mixed);
  project(mixed, weights, s, y);
}

void CudaOps::attend(const QueryRows& query, const MlaShape& s, const Batch& batch, const LatentLayer& cache,
                     const Tensor& out) {
  CHECK(std::ssize(batch.sequences) <= kMlaMaxSequences, batch.sequences.size(), " sequences");
  if (has_mla_kernels(s, cache))
    attend_lists(query, s, batch, cache, out);
  else
    attend_rows(query, s, batch, cache, out);
}

// As the body of Ops::mla_attend, in parts that bound an exchange.
void CudaOps::attend_shared(const Tensor& q, const CudaMlaUp& weights, const MlaShape& s, const Batch& batch,
                            const LatentLayer& cache, const Tensor& y) {
  MlaShape all = s;
  all.heads *= dcp().size();
  const int64_t width = s.latent + s.rope;
  const int64_t most_rows = exchanged_rows(s, all);
  for (int64_t first = 0; first < q.rows; first += most_rows) {
    const ArenaScope scratch(arena_);
    const int64_t rows = std::min(most_rows, q.rows - first);
    const Tensor mine = shown(shown_queries_, DType::kBF16, rows, s.heads * width);
    const Tensor queries = arena_.tensor(DType::kBF16, rows, all.heads * width);
    const Tensor results = shown(shown_results_, DType::kF16, rows * all.heads, result_columns(s.latent));
    const Tensor mixed = arena_.tensor(DType::kBF16, rows, s.heads * s.latent);
    absorb(q.row_range(first, rows), weights, s, mine);
    gather_queries(mine, queries);
    attend({queries, first}, all, batch, cache, results);
    merge_ranks(results, s, mixed);
    project(mixed, weights, s, y.row_range(first, rows));
  }
}

// What other ranks read until the group's next exchange. Where they exchange copies of it: in the arena.
Tensor CudaOps::shown(const Buffer& memory, DType dtype, int64_t rows, int64_t cols) {
  if (dcp_peers_ == nullptr) return arena_.tensor(dtype, rows, cols);
  CHECK(static_cast<size_t>(rows * cols * dtype_bytes(dtype)) <= memory.size(), rows, "x", cols);
  return {.data = memory.data(), .dtype = dtype, .rows = rows, .cols = cols, .row_stride = cols};
}

// [n, w] of each rank -> [n, ranks * w].
void CudaOps::gather_queries(const Tensor& mine, const Tensor& all) {
  if (dcp_peers_ != nullptr) {
    if (!dcp_peers_->silent()) check(exchange_queries(dcp_peers_->view(), mine, all, stream()), "mla queries");
    return;
  }
  const size_t bytes = static_cast<size_t>(mine.rows * mine.cols) * sizeof(uint16_t);
  if (mine.rows == 1) return dcp().all_gather(mine.data, bytes, all.data);
  const ArenaScope scratch(arena_);
  const Tensor by_rank = arena_.tensor(mine.dtype, dcp().size() * mine.rows, mine.cols);
  dcp().all_gather(mine.data, bytes, by_rank.data);
  check(join_queries(by_rank.row<const uint16_t>(0), dcp().size(), all, stream()), "mla queries");
}

// This rank's heads of all ranks' results.
void CudaOps::merge_ranks(const Tensor& results, const MlaShape& s, const Tensor& mixed) {
  Tensor by_head = mixed;
  by_head.rows = mixed.rows * s.heads;
  by_head.cols = by_head.row_stride = s.latent;
  if (dcp_peers_ != nullptr) {
    if (!dcp_peers_->silent())
      check(exchange_results(dcp_peers_->view(), results, static_cast<int>(s.heads), by_head, stream()), "mla merge");
    return;
  }
  const ArenaScope scratch(arena_);
  const Tensor whole = arena_.tensor(DType::kF16, by_head.rows, dcp().size() * results.cols);
  dcp().all_to_all(as_words(results), row_owners(results.rows, s.heads), as_words(whole));
  check(merge_results(whole, dcp().size(), by_head, stream()), "mla merge");
}

// Of each row of results the rank whose head it is of, in device memory: made once for each number of heads, a model's
// and its draft's, as long as ever needed.
std::span<const int32_t> CudaOps::row_owners(int64_t rows, int64_t heads) {
  const auto bytes = static_cast<size_t>(rows) * sizeof(int32_t);
  Buffer& owners = row_owners_[heads];
  auto* const list = reinterpret_cast<int32_t*>(owners.data());
  if (owners.size() >= bytes) return {list, static_cast<size_t>(rows)};
  owners = device_buffer(bytes);
  auto* const longer = reinterpret_cast<int32_t*>(owners.data());
  check(list_owners(longer, rows, static_cast<int>(heads), dcp().size(), stream()), "mla owners");
  return {longer, static_cast<size_t>(rows)};
}

// The cached rows from position `begin` on.
void CudaOps::gather_latents(const CachedSequence& sequence, int64_t begin, const LatentLayer& cache, int64_t latent,
                             const Tensor& latents) {
  const DeviceSequences& all = sequence.all;
  const auto index = static_cast<int64_t>(sequence.index);
  if (all.block_index == nullptr) {
    check(gather_latent_rows(all.block_tables + index * all.table_width, begin, cache, latent, latents, stream()),
          "mla_expand");
    return;
  }
  const ArenaScope scratch(arena_);
  BlockPiece piece{.begin = static_cast<int32_t>(begin / kMlaBlock),
                   .end = static_cast<int32_t>((begin + latents.rows + kMlaBlock - 1) / kMlaBlock),
                   .most = kPieceBlocks};
  // As much as with any owners, so that the arena does not grow after warming up.
  uint8_t* mine = arena_.array<uint8_t>(piece.bytes(cache)).data();
  uint8_t* of_all = arena_.array<uint8_t>(dcp().size() * piece.bytes(cache)).data();
  piece.most = most_of_a_rank(piece, sequence.rows.shared.owners, dcp().size());
  check(take_blocks(all, static_cast<int>(index), piece, cache, mine, stream()), "mla blocks");
  dcp().all_gather(mine, static_cast<size_t>(piece.bytes(cache)), of_all);
  check(spread_blocks(of_all, dcp().size(), piece, cache, latent, latents, stream()), "mla blocks");
}

// Keys and values of the cached latents, a piece at a time; the pieces' results join by their log-sum-exp.
void CudaOps::attend_expanded(const CachedSequence& sequence, const Tensor& q, const CudaMlaUp& weights,
                              const MlaShape& s, const LatentLayer& cache, const Tensor& y) {
  CHECK(q.contiguous(), "queries ", q.row_stride, " apart");
  const ArenaScope scratch(arena_);
  const SequenceRows& rows = sequence.rows;
  const int64_t context = rows.position + rows.num_tokens;
  const bool whole = context <= kExpandedKeys;
  float* lse = whole ? nullptr : arena_.array<float>(q.rows * s.heads).data();
  float* joined = whole ? nullptr : arena_.array<float>(q.rows * s.heads * s.value).data();
  for (int64_t begin = 0; begin < context; begin += kExpandedKeys) {
    const int64_t keys = std::min(kExpandedKeys, context - begin);
    const ArenaScope piece(arena_);
    const Tensor latents = arena_.tensor(DType::kBF16, keys, s.latent + s.rope);
    const Tensor up = arena_.tensor(DType::kBF16, keys, weights.kv_b.out);
    int32_t* numbers = arena_.array<int32_t>(5).data();
    gather_latents(sequence, begin, cache, s.latent, latents);
    gemm({.weight = weights.kv_b.data.data(),
          .x = latents.row<const uint16_t>(0),
          .x_stride = latents.row_stride,
          .y = up.data,
          .y_stride = up.row_stride,
          .rows = static_cast<int32_t>(keys),
          .out = static_cast<int32_t>(weights.kv_b.out),
          .in = static_cast<int32_t>(s.latent),
          .chunks = static_cast<int32_t>(weights.kv_b.padded_in / 128),
          .output = GemmOutput::kBF16},
         "mla_expand");
    const auto count = static_cast<int32_t>(keys);
    const FiveNumbers values{{0, rows.num_tokens, 0, count, rows.position - static_cast<int32_t>(begin)}};
    check(store_numbers(values, numbers, stream()), "mla_expand");
    const bool last = begin + keys == context;
    const PrefillKernel kernel = choose_mla_prefill(s.nope, s.value, traits_.compute_capability);
    check(mla_prefill(kernel,
                      {.heads = static_cast<int>(s.heads),
                       .nope = static_cast<int>(s.nope),
                       .value = static_cast<int>(s.value),
                       .sequences = 1,
                       .max_query = rows.num_tokens,
                       .keys = count,
                       .first_query = numbers,
                       .first_key = numbers + 2,
                       .offset = numbers + 4,
                       .q = q.data,
                       .up = up.data,
                       .k_rope = latents.row<const uint16_t>(0) + s.latent,
                       .k_rope_stride = latents.row_stride,
                       .softmax_scale = s.softmax_scale,
                       .join = begin > 0,
                       .out_f32 = joined,
                       .out = last ? y.data : nullptr,
                       .lse = lse},
                      stream()),
          "mla_prefill");
  }
}

void CudaOps::attend_rows(const QueryRows& query, const MlaShape& s, const Batch& batch, const LatentLayer& cache,
                          const Tensor& out) {
  const int64_t all_rows = query.rows.rows, out_rows = out.rows / all_rows;  // rows of out for each
  for (int64_t begin = 0; begin < all_rows; begin += kAttentionRows) {
    const int64_t rows = std::min(kAttentionRows, all_rows - begin), row = query.first + begin;
    const bool results = out.dtype == DType::kF16;
    LatentAttention call{.q = query.rows.row<const uint16_t>(begin),
                         .out = results ? nullptr : out.row<uint16_t>(begin),
                         .results = results ? out.row<uint16_t>(begin * out_rows) : nullptr,
                         .rows = static_cast<int32_t>(rows),
                         .heads = static_cast<int32_t>(s.heads),
                         .latent = static_cast<int32_t>(s.latent),
                         .rope = static_cast<int32_t>(s.rope),
                         .splits = options_.deterministic ? 1 : latent_attention_splits(rows, s.heads),
                         .softmax_scale = s.softmax_scale};
    const ArenaScope scratch(arena_);
    call.parts = arena_.array<float>(latent_attention_most_floats(rows, s.heads, s.latent)).data();
    DeviceSequences sequences = *batch.device;
    sequences.row_sequence += row;
    Batch part = batch;
    part.positions = batch.positions.subspan(static_cast<size_t>(row), static_cast<size_t>(rows));
    part.device = &sequences;
    check(latent_attention(call, part, cache, stream()), "mla_attend");
  }
}

}  // namespace perigee

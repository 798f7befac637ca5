// CudaOps: latent attention.
#include <algorithm>

#include "ops/cuda/backend.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/mla/latent_attention.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mla/mla_write.h"

namespace perigee {
namespace {

constexpr int64_t kExpandedKeys = 8192;    // of one piece in expanded attention: bounds its scratch memory
constexpr int64_t kAttentionRows = 1024;   // of one launch: bounds its scratch memory
constexpr int64_t kFixedPieces = 64 * 65;  // likewise, of fixed lists: a token of 64 sequences of 1,048,576 tokens

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

}  // namespace

bool CudaOps::has_mla_kernels(const MlaShape& s, const LatentLayer& cache) const {
  return s.latent == kMlaLatent && s.latent + s.rope == kMlaWidth &&
         cache.row_bytes == latent_row_bytes(cache.format, s.latent, s.rope) &&
         (cache.format == LatentFormat::kBF16 || cache.format == LatentFormat::kF8E4M3);
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
                          .fp8 = cache.format == LatentFormat::kF8E4M3,
                          .kv_scale = cache.scale};
  check(mla_write(args, stream()), "mla_in");
  return q;
}

void CudaOps::attend_lists(const Tensor& query, const Tensor& mixed, const MlaShape& s, const Batch& batch,
                           const LatentLayer& cache) {
  const bool fixed = options_.deterministic;
  int max_query = 1;
  for (const SequenceRows& rows : batch.sequences) max_query = std::max(max_query, rows.num_tokens);
  const MlaDecodeShape shape{.heads = static_cast<int>(s.heads),
                             .max_sequences = static_cast<int>(batch.sequences.size()),
                             .max_tokens = static_cast<int>(query.rows),
                             .max_query = max_query,
                             .max_pieces = kFixedPieces,
                             .fp8 = cache.format == LatentFormat::kF8E4M3,
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
                 .sequences = static_cast<int>(batch.sequences.size()),
                 .table_width = sequences.table_width};
  const MlaDecodeArgs args{.q = query.data,
                           .kv = cache.base,
                           .page_bytes = cache.page_bytes,
                           .softmax_scale = s.softmax_scale,
                           .kv_scale = cache.scale,
                           .out = mixed.data};
  const bool captured = is_captured(stream());
  for (int64_t begin = 0, end = 0; begin < query.rows; begin = end) {
    end = fixed ? launch_end(config, batch, begin, captured) : query.rows;
    lists.row_begin = static_cast<int>(begin), lists.row_end = static_cast<int>(end);
    const bool whole = begin == 0 && end == query.rows;
    if (!whole || !mla_planned_) check(mla_plan(config, lists, workspace, stream()), "mla_plan");
    mla_planned_ = whole;
    check(mla_decode(config, lists, args, workspace, stream()), "mla_attend");
  }
}

Tensor CudaOps::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& s, const Batch& batch,
                           const LatentLayer& cache) {
  CHECK(q.cols == s.heads * s.q_head() && batch.device != nullptr &&
        (cache.format == LatentFormat::kBF16 || cache.format == LatentFormat::kF8E4M3) &&
        s.latent <= kCudaLimits.max_latent && s.rope <= kCudaLimits.max_rope);
  const auto& weights = static_cast<const CudaMlaUp&>(*up.packed);
  const Tensor y = arena_.tensor(DType::kBF16, q.rows, s.heads * s.value);
  // Absorbed rows are one run from the first on. Decode rows come first; a chunk that asks for the absorbed form after
  // one that asks for the expanded takes the expanded too: up-projecting its context once costs less than computing a
  // long prompt the other way.
  const bool expandable = !options_.deterministic && has_mla_kernels(s, cache) &&
                          choose_mla_prefill(s.nope, s.value, traits_.compute_capability) != PrefillKernel::kNone;
  size_t first = expandable ? 0 : batch.sequences.size();
  while (first < batch.sequences.size() && batch.sequences[first].form != MlaForm::kExpanded) ++first;
  const int64_t absorbed_rows = first < batch.sequences.size() ? batch.sequences[first].first_row : q.rows;
  if (absorbed_rows > 0)
    attend_absorbed(q.row_range(0, absorbed_rows), weights, s, batch, first, cache, y.row_range(0, absorbed_rows));
  for (size_t i = first; i < batch.sequences.size(); ++i) {
    const SequenceRows& rows = batch.sequences[i];
    const int32_t* table = batch.device->block_tables + static_cast<int64_t>(i) * batch.device->table_width;
    attend_expanded({rows, table}, q.row_range(rows.first_row, rows.num_tokens), weights, s, cache,
                    y.row_range(rows.first_row, rows.num_tokens));
  }
  return y;
}

void CudaOps::attend_absorbed(const Tensor& q, const CudaMlaUp& weights, const MlaShape& s, const Batch& batch,
                              size_t num_sequences, const LatentLayer& cache, const Tensor& y) {
  const int64_t n = q.rows, width = s.latent + s.rope;
  Batch part = batch;
  part.positions = batch.positions.first(static_cast<size_t>(n));
  part.sequences = batch.sequences.first(num_sequences);
  const Tensor query = arena_.tensor(DType::kBF16, n, s.heads * width);
  const Tensor mixed = arena_.tensor(DType::kBF16, n, s.heads * s.latent);
  GemmCall call{.weight = weights.keys.data.data(),
                .weight_stride = s.latent * weights.keys.row_bytes(),
                .x = q.row<const uint16_t>(0),
                .x_stride = q.row_stride,
                .x_head = s.q_head(),
                .y = query.data,
                .y_stride = query.row_stride,
                .y_head = width,
                .rows = static_cast<int32_t>(n),
                .heads = static_cast<int32_t>(s.heads),
                .out = static_cast<int32_t>(s.latent),
                .in = static_cast<int32_t>(s.nope),
                .chunks = static_cast<int32_t>(weights.keys.padded_in / 128),
                .output = GemmOutput::kBF16};
  gemm(call, "mla query");
  check(copy_head_columns(q.row<const uint16_t>(0), {q.row_stride, s.q_head(), s.nope}, query.row<uint16_t>(0),
                          {query.row_stride, width, s.latent},
                          dim3(static_cast<unsigned>(n), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.rope)),
                          stream()),
        "mla query");
  CHECK(num_sequences <= kMlaMaxSequences, num_sequences, " sequences");
  if (has_mla_kernels(s, cache))
    attend_lists(query, mixed, s, part, cache);
  else
    attend_rows(query, mixed, s, part, cache);
  call.weight = weights.kv_b.data.data() + s.nope * weights.kv_b.row_bytes();
  call.weight_stride = (s.nope + s.value) * weights.kv_b.row_bytes();
  call.x = mixed.row<const uint16_t>(0);
  call.x_stride = mixed.row_stride;
  call.x_head = s.latent;
  call.y = y.data;
  call.y_stride = y.row_stride;
  call.y_head = s.value;
  call.out = static_cast<int32_t>(s.value);
  call.in = static_cast<int32_t>(s.latent);
  call.chunks = static_cast<int32_t>(weights.kv_b.padded_in / 128);
  gemm(call, "mla value");
}

// Keys and values of the cached latents, a piece at a time; the pieces' results join by their log-sum-exp.
void CudaOps::attend_expanded(const CachedSequence& sequence, const Tensor& q, const CudaMlaUp& weights,
                              const MlaShape& s, const LatentLayer& cache, const Tensor& y) {
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
    check(gather_latent_rows(sequence.block_table, begin, cache, latents, stream()), "mla_expand");
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

void CudaOps::attend_rows(const Tensor& query, const Tensor& mixed, const MlaShape& s, const Batch& batch,
                          const LatentLayer& cache) {
  for (int64_t begin = 0; begin < query.rows; begin += kAttentionRows) {
    const int64_t rows = std::min(kAttentionRows, query.rows - begin);
    LatentAttention call{.q = query.row<const uint16_t>(begin),
                         .out = mixed.row<uint16_t>(begin),
                         .rows = static_cast<int32_t>(rows),
                         .heads = static_cast<int32_t>(s.heads),
                         .latent = static_cast<int32_t>(s.latent),
                         .rope = static_cast<int32_t>(s.rope),
                         .splits = options_.deterministic ? 1 : latent_attention_splits(rows, s.heads),
                         .softmax_scale = s.softmax_scale};
    const ArenaScope scratch(arena_);
    call.parts = arena_.array<float>(latent_attention_most_floats(rows, s.heads, s.latent)).data();
    DeviceSequences sequences = *batch.device;
    sequences.row_sequence += begin;
    Batch part = batch;
    part.positions = batch.positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(rows));
    part.device = &sequences;
    check(latent_attention(call, part, cache, stream()), "mla_attend");
  }
}

}  // namespace perigee

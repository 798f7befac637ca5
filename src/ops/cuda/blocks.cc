// CudaOps: experts and attention.
#include <algorithm>

#include "ops/cuda/backend.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/latent_attention.h"
#include "ops/cuda/mla_decode.h"
#include "ops/cuda/mla_prefill.h"
#include "ops/cuda/mla_write.h"
#include "ops/cuda/route.h"
#include "ops/cuda/tile_gemm.h"

namespace perigee {
namespace {

// So few pairs that sorting them costs more than reading an expert twice.
constexpr int64_t kUnsortedPairs = 16;
constexpr int64_t kExpandedKeys = 4096;   // of one piece in expanded attention: bounds its scratch memory
constexpr int64_t kAttentionRows = 1024;  // of one launch: bounds its scratch memory

// The geometries of mla_prefill.h.
bool can_expand(const MlaShape& s) {
  return (s.nope == 128 && s.value == 128) || (s.nope == 192 && s.value == 256);
}

// Pairs of one item, by how many an expert gets on average; more than 32 go to the tile kernel.
int choose_item_rows(int64_t num_pairs, int64_t num_experts, bool deterministic) {
  const int64_t average = num_pairs / num_experts;
  if (average <= 6) return 8;
  if (average <= 14) return 16;
  return average <= 40 || deterministic ? 32 : kTileRows;
}

}  // namespace

Routing CudaOps::route(const Tensor& x, const RouterWeight& router) {
  CHECK(x.cols == router.hidden && router.num_experts <= kMaxRoutedExperts && router.num_groups <= 64);
  const Routing routing{.num_tokens = x.rows,
                        .top_k = router.top_k,
                        .ids = arena_.array<int32_t>(x.rows * router.top_k).data(),
                        .weights = arena_.array<float>(x.rows * router.top_k).data()};
  float* scores = arena_.array<float>(x.rows * router.num_experts).data();
  check(route_rows(x, router, scores, routing, stream()), "route");
  return routing;
}

void CudaOps::expert_product(const CudaMatrix& weight, GemmCall call, int item_rows, const char* op) {
  call.weight = weight.data.data();
  call.scale = weight.scale.data();
  call.weight_stride = weight.matrix_bytes();
  call.scale_stride = weight.scale_bytes();
  call.out = static_cast<int32_t>(weight.out);
  call.in = static_cast<int32_t>(weight.in);
  call.chunks = static_cast<int32_t>(weight.padded_in / 128);
  if (item_rows == kTileRows)
    check(tile_gemm(weight.format, call, stream()), op);
  else
    check(skinny_gemm(weight.format, call, item_rows, stream()), op);
}

Tensor CudaOps::moe_experts(const Tensor& x, const Routing& routing, const ExpertWeights& weights) {
  const Tensor y = arena_.tensor(DType::kF32, x.rows, weights.hidden);
  run_experts(x, routing, weights, {.y = y});
  return y;
}

Tensor CudaOps::dense_mlp(const Tensor& x, const MlpWeights& w) {
  const auto& gate_up = static_cast<const CudaMatrix&>(*w.gate_up.packed);
  const Tensor hidden = arena_.tensor(DType::kBF16, x.rows, w.gate_up.out / 2);
  if (x.rows > kMaxSkinnyRows && cublas_ != nullptr) {
    check(silu_mul_rows(product(x, w.gate_up, DType::kF32, "dense_mlp"), true, hidden, stream()), "silu_mul");
    return linear(hidden, w.down, DType::kF32);
  }
  multiply({.weight = gate_up.data.data(),
            .x = x.row<const uint16_t>(0),
            .x_stride = x.row_stride,
            .y = hidden.data,
            .y_stride = hidden.row_stride,
            .rows = static_cast<int32_t>(x.rows),
            .out = static_cast<int32_t>(w.gate_up.out),
            .in = static_cast<int32_t>(w.gate_up.in),
            .chunks = static_cast<int32_t>(gate_up.padded_in / 128),
            .output = GemmOutput::kSiluMul},
           "dense_mlp");
  return linear(hidden, w.down, DType::kF32);
}

Tensor CudaOps::moe(const Tensor& x, const MoeWeights& w) {
  const Tensor y = arena_.tensor(DType::kF32, x.rows, w.experts.hidden);
  run_moe(x, w, {.y = y});
  return y;
}

void CudaOps::add_moe(const Tensor& residual, const Tensor& x, const MoeWeights& w) {
  run_moe(x, w, {.y = residual, .accumulate = true});
}

void CudaOps::run_moe(const Tensor& x, const MoeWeights& w, ExpertSum to) {
  const Routing routing = route(x, w.router);
  Tensor shared;
  if (w.shared.down.packed) {
    shared = dense_mlp(x, w.shared);
    to.addend = &shared;
  }
  run_experts(x, routing, w.experts, to);
}

void CudaOps::run_experts(const Tensor& x, const Routing& routing, const ExpertWeights& weights, const ExpertSum& to) {
  CHECK(x.cols == weights.hidden && weights.num_experts <= kMaxRoutedExperts);
  const auto& experts = static_cast<const CudaExperts&>(*weights.packed);
  const int64_t num_pairs = x.rows * routing.top_k;
  const Tensor hidden = arena_.tensor(DType::kBF16, num_pairs, weights.inter);
  const Tensor parts = arena_.tensor(DType::kF32, num_pairs, weights.hidden);
  GemmCall lists;
  int item_rows = 8;
  if (num_pairs <= kUnsortedPairs) {
    lists.expert_ids = routing.ids;
    lists.max_items = static_cast<int32_t>(num_pairs);
  } else {
    item_rows = choose_item_rows(num_pairs, weights.num_experts, options_.deterministic);
    lists.max_items = static_cast<int32_t>(moe_max_items(num_pairs, weights.num_experts, item_rows));
    lists.items = arena_.array<MoeItem>(lists.max_items).data();
    lists.pairs = arena_.array<int32_t>(num_pairs).data();
    lists.num_items = arena_.array<int32_t>(1).data();
    check(sort_pairs(routing.ids, num_pairs, weights.num_experts, item_rows, lists, stream()), "moe_sort");
  }
  GemmCall up = lists;
  up.x = x.row<const uint16_t>(0);
  up.x_stride = x.row_stride;
  up.x_divisor = routing.top_k;
  up.y = hidden.data;
  up.y_stride = hidden.row_stride;
  up.output = GemmOutput::kSiluMul;
  expert_product(experts.gate_up, up, item_rows, "moe gate and up");
  GemmCall down = lists;
  down.x = hidden.row<const uint16_t>(0);
  down.x_stride = hidden.row_stride;
  down.y = parts.data;
  down.y_stride = parts.row_stride;
  expert_product(experts.down, down, item_rows, "moe down");
  check(combine_pairs(parts.row<const float>(0), routing, {to.addend, to.accumulate}, to.y, stream()), "moe_combine");
}

bool CudaOps::is_usual(const MlaShape& s, const LatentLayer& cache) const {
  return s.latent == kMlaLatent && s.latent + s.rope == kMlaWidth &&
         cache.row_bytes == dtype_bytes(cache.dtype) * kMlaWidth && cache.dtype != DType::kF32;
}

Tensor CudaOps::mla_in(const Tensor& x, const MlaWeights& w, const Batch& batch, const LatentLayer& cache) {
  const MlaShape& s = w.shape;
  if (!is_usual(s, cache)) return Ops::mla_in(x, w, batch, cache);
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
                          .fp8 = cache.dtype == DType::kF8E4M3,
                          .kv_scale = cache.scale};
  check(mla_write(args, stream()), "mla_in");
  return q;
}

void CudaOps::attend_usual(const Tensor& query, const Tensor& mixed, const MlaShape& s, const Batch& batch,
                           const LatentLayer& cache) {
  int max_query = 1;
  for (const SequenceRows& rows : batch.sequences) max_query = std::max(max_query, rows.num_tokens);
  const MlaDecodeConfig config = mla_decode_config({.heads = static_cast<int>(s.heads),
                                                    .max_sequences = static_cast<int>(batch.sequences.size()),
                                                    .max_tokens = static_cast<int>(query.rows),
                                                    .max_query = max_query,
                                                    .fp8 = cache.dtype == DType::kF8E4M3,
                                                    .multiprocessors = multiprocessors_,
                                                    .compute_capability = compute_capability_});
  if (mla_workspaces_.empty() || mla_workspaces_.back().size() < config.workspace_bytes())
    mla_workspaces_.push_back(device_buffer(config.workspace_bytes()));
  uint8_t* workspace = mla_workspaces_.back().data();
  const DeviceSequences& sequences = *batch.device;
  const MlaBatch lists{.first_row = sequences.first_row,
                       .lengths = sequences.lengths,
                       .block_table = sequences.block_tables,
                       .sequences = static_cast<int>(batch.sequences.size()),
                       .table_width = sequences.table_width};
  if (!mla_planned_) check(mla_plan(config, lists, workspace, stream()), "mla_plan");
  mla_planned_ = true;
  const MlaDecodeArgs args{.q = query.data,
                           .kv = cache.base,
                           .page_bytes = cache.page_bytes,
                           .softmax_scale = s.softmax_scale,
                           .kv_scale = cache.scale,
                           .out = mixed.data};
  check(mla_decode(config, lists, args, workspace, stream()), "mla_attend");
}

Tensor CudaOps::mla_attend(const Tensor& q, const MlaUpWeight& up, const MlaShape& s, const Batch& batch,
                           const LatentLayer& cache) {
  CHECK(q.cols == s.heads * s.q_head() && batch.device != nullptr && cache.dtype != DType::kF32 && s.latent <= 512 &&
        s.rope <= 64);
  const auto& weights = static_cast<const CudaMlaUp&>(*up.packed);
  const Tensor y = arena_.tensor(DType::kBF16, q.rows, s.heads * s.value);
  // Decode rows come first; of the others, those that may take the expanded form do.
  const bool expandable = is_usual(s, cache) && can_expand(s) && !options_.deterministic;
  size_t first = batch.sequences.size();
  while (expandable && first > 0 && batch.sequences[first - 1].form == MlaForm::kExpanded) --first;
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
  multiply(call, "mla query");
  check(copy_head_columns(q.row<const uint16_t>(0), {q.row_stride, s.q_head(), s.nope}, query.row<uint16_t>(0),
                          {query.row_stride, width, s.latent},
                          dim3(static_cast<unsigned>(n), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.rope)),
                          stream()),
        "mla query");
  // The plain kernel cuts nothing by what else is in the batch.
  if (is_usual(s, cache) && !options_.deterministic && num_sequences <= kMlaMaxSequences)
    attend_usual(query, mixed, s, part, cache);
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
  multiply(call, "mla value");
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
    multiply({.weight = weights.kv_b.data.data(),
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
    const PrefillKernel kernel =
        mla_prefill_choice(static_cast<int>(s.nope), static_cast<int>(s.value), compute_capability_);
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
    call.parts = arena_.array<float>(latent_attention_floats(rows, s.heads, s.latent, call.splits)).data();
    DeviceSequences sequences = *batch.device;
    sequences.row_sequence += begin;
    Batch part = batch;
    part.positions = batch.positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(rows));
    part.device = &sequences;
    check(latent_attention(call, part, cache, stream()), "mla_attend");
  }
}

}  // namespace perigee

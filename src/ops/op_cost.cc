#include "ops/op_cost.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>

#include "base/result.h"

namespace perigee {
namespace {

int64_t tensor_bytes(const Tensor& x) {
  return x.rows * x.cols * dtype_bytes(x.dtype);
}

CostPart product(const char* labels, std::string what, const Tensor& x, const LinearWeight& w) {
  return {.labels = labels,
          .what = std::move(what),
          .bytes = w.packed->bytes() + x.rows * w.in * dtype_bytes(x.dtype),
          .flops = 2.0 * static_cast<double>(x.rows * w.out * w.in)};
}

// Query-key pairs under the causal mask.
double attended_pairs(const SequenceRows& rows) {
  return static_cast<double>(rows.num_tokens) * (rows.position + 0.5 * (rows.num_tokens + 1));
}

}  // namespace

bool CostPart::has_label(std::string_view label) const {
  for (std::string_view left = labels; !left.empty();) {
    const size_t end = std::min(left.find('|'), left.size());
    if (left.substr(0, end) == label) return true;
    left.remove_prefix(std::min(end + 1, left.size()));
  }
  return false;
}

int64_t OpCost::bytes() const {
  int64_t sum = 0;
  for (const CostPart& part : parts) sum += part.bytes;
  return sum;
}

double OpCost::flops() const {
  double sum = 0;
  for (const CostPart& part : parts) sum += part.flops;
  return sum;
}

OpCost embed_cost(const EmbedWeight& table, int64_t rows, DType stored) {
  return {.op = "embed", .parts = {{"embed", "rows", rows * table.dim * dtype_bytes(stored)}}};
}

OpCost rms_norm_cost(const Tensor& x) {
  return {.op = "rms_norm", .parts = {{"rms_norm", "norm", tensor_bytes(x)}}};
}

OpCost linear_cost(const Tensor& x, const LinearWeight& w) {
  return {.op = fmt::format("linear {} -> {}", w.in, w.out), .parts = {product("linear", "product", x, w)}};
}

OpCost add_cost(const Tensor& residual) {
  return {.op = "add", .parts = {{"add", "sum", 2 * tensor_bytes(residual)}}};
}

OpCost add_norm_cost(const Tensor& residual) {
  return {.op = "add_norm", .parts = {{"add_norm|reduce_norm|scatter_norm", "sum, norm", 2 * tensor_bytes(residual)}}};
}

OpCost gather_residual_cost() {
  return {.op = "gather_residual", .parts = {{"gather_residual", "rows of other ranks"}}};
}

OpCost gather_rows_cost(const Tensor& x, int64_t rows) {
  return {.op = "gather_rows", .parts = {{"gather_rows", "rows", rows * x.cols * dtype_bytes(x.dtype)}}};
}

OpCost tap_cost(const Tensor& x, const Tensor& out) {
  return {.op = "tap", .parts = {{"tap", "hidden state", x.rows * x.cols * dtype_bytes(out.dtype)}}};
}

OpCost mla_in_cost(const Tensor& x, const MlaWeights& w, const LatentLayer& cache) {
  OpCost cost{.op = "mla_in", .parts = {}};
  Tensor q_in = x;
  if (w.q_a.packed) {
    cost.parts.push_back(product("linear", "q_a", x, w.q_a));
    cost.parts.push_back({"rms_norm", "q_a norm", x.rows * w.q_a.out * 4});
    q_in.cols = w.q.in;
  }
  cost.parts.push_back(product("linear", "q", q_in, w.q));
  cost.parts.push_back(product("linear", "kv_a", x, w.kv_a));
  cost.parts.push_back({"mla_in", "norm, rope, cache write", x.rows * (w.kv_a.out * 4 + cache.row_bytes)});
  return cost;
}

OpCost mla_attend_cost(const MlaShape& s, const Batch& batch, const LatentLayer& cache, DType wide) {
  CostPart query{.labels = "mla query", .what = "query to latent"}, attend{.labels = "mla_attend", .what = "attention"};
  CostPart value{.labels = "mla value", .what = "latent to value"};
  CostPart expand{.labels = "mla_expand", .what = "keys, values of latents"};
  CostPart prefill{.labels = "mla_prefill", .what = "attention, expanded"};
  const auto h = static_cast<double>(s.heads);
  const int64_t element = dtype_bytes(wide), up_rows = s.heads * (s.nope + s.value);
  for (const SequenceRows& rows : batch.sequences) {
    const int64_t keys = rows.position + rows.num_tokens;
    const double n = rows.num_tokens, pairs = attended_pairs(rows);
    if (rows.form == MlaForm::kAbsorbed) {
      query.flops += 2 * n * h * static_cast<double>(s.nope * s.latent);
      value.flops += 2 * n * h * static_cast<double>(s.latent * s.value);
      attend.bytes += keys * cache.row_bytes;
      attend.flops += 2 * pairs * h * static_cast<double>(2 * s.latent + s.rope);
    } else {
      expand.bytes += keys * cache.row_bytes + up_rows * s.latent * element;
      expand.flops += 2 * static_cast<double>(keys * up_rows * s.latent);
      prefill.bytes += keys * (up_rows + s.rope) * element;
      prefill.flops += 2 * pairs * h * static_cast<double>(s.q_head() + s.value);
    }
  }
  if (query.flops > 0) query.bytes = s.heads * s.nope * s.latent * element;
  if (value.flops > 0) value.bytes = s.heads * s.latent * s.value * element;
  OpCost cost{.op = "mla_attend", .parts = {}};
  for (CostPart& part : {std::ref(query), std::ref(attend), std::ref(value), std::ref(expand), std::ref(prefill)})
    if (part.bytes > 0) cost.parts.push_back(std::move(part));
  return cost;
}

OpCost full_in_cost(const Tensor& x, const FullWeights& w, const FullLayer& cache) {
  const int64_t stored = 2 * cache.heads * cache.head_bytes() / kRowsOfBlock;
  return {.op = "full_in",
          .parts = {product("linear", "q, k, v", x, w.qkv),
                    {"full_in", "rope, cache write", x.rows * (w.qkv.out * 4 + stored)}}};
}

OpCost full_attend_cost(const FullShape& s, const Batch& batch, const FullLayer& cache) {
  CostPart attend{.labels = "full_attend", .what = "attention"};
  for (const SequenceRows& rows : batch.sequences) {
    attend.bytes += (rows.position + rows.num_tokens) * 2 * cache.heads * cache.head_bytes() / kRowsOfBlock;
    attend.flops += 4 * attended_pairs(rows) * static_cast<double>(s.heads * s.dim);
  }
  return {.op = "full_attend", .parts = {std::move(attend)}};
}

OpCost kda_cost(const Tensor& x, const KdaWeights& w, const Batch& batch) {
  const KdaShape& s = w.shape;
  Tensor low = x;  // f_a or g_a of the gates
  low.cols = s.dim;
  OpCost cost{.op = "kda",
              .parts = {product("linear", "gates", x, w.gates), product("linear", "q, k, v", x, w.qkv),
                        product("linear|kda gates", "decay, output gate", low, w.f_b)}};
  const CostPart output_gate = product("", "", low, w.g_b);
  cost.parts.back().bytes += output_gate.bytes;
  cost.parts.back().flops += output_gate.flops;
  CostPart state{.labels = "kda_step|kda_carry|kda_attend", .what = "state"};
  CostPart relate{.labels = "kda_relate", .what = "within chunks"},
      finish{.labels = "kda_finish", .what = "norm, gate"};
  const double decay_correct_read = 7.0 * static_cast<double>(s.dim * s.dim);  // S *= g; v - S k; S += k v'; S q
  for (const SequenceRows& rows : batch.sequences) {
    const int64_t activations = rows.num_tokens * s.width() * 4;
    state.bytes += 2 * s.heads * s.unit_bytes();
    state.flops += static_cast<double>(rows.num_tokens * s.heads) * decay_correct_read;
    (rows.commit_all ? relate : state).bytes += 4 * activations;  // q, k, v, log decay
    (rows.commit_all ? finish : state).bytes += activations;      // output gate
  }
  for (CostPart& part : {std::ref(state), std::ref(relate), std::ref(finish)})
    if (part.bytes > 0) cost.parts.push_back(std::move(part));
  return cost;
}

OpCost dense_mlp_cost(const Tensor& x, const MlpWeights& w) {
  Tensor hidden = x;
  hidden.cols = w.down.in;
  return {.op = fmt::format("dense_mlp {}", w.down.in),
          .parts = {product("dense_mlp", "gate, up", x, w.gate_up), product("linear", "down", hidden, w.down)}};
}

OpCost moe_cost(const Tensor& x, const MoeWeights& w, const ChosenExperts& chosen) {
  const ExpertWeights& e = w.experts;
  const int64_t element = dtype_bytes(x.dtype), pairs = chosen.pairs;
  const int64_t chosen_bytes = e.packed->bytes() / e.num_experts * chosen.distinct;
  const double matrix_flops = 2.0 * static_cast<double>(pairs * e.hidden * e.inter);
  OpCost cost{.op = "moe", .parts = {}, .distinct_experts = chosen.distinct, .num_experts = e.num_experts};
  cost.parts.push_back({"route", "router", static_cast<int64_t>(w.router.weight.size()) * 4 + tensor_bytes(x),
                        2.0 * static_cast<double>(x.rows * e.hidden * w.router.num_experts)});
  if (w.shared.down.packed) {
    OpCost shared = dense_mlp_cost(x, w.shared);
    for (CostPart& part : shared.parts) {
      part.what = "shared: " + part.what;
      cost.parts.push_back(std::move(part));
    }
  }
  cost.parts.push_back({"moe_sort", "sort by expert", pairs * 4});
  cost.parts.push_back(
      {"moe gate and up", "experts: gate, up", chosen_bytes * 2 / 3 + tensor_bytes(x), 2 * matrix_flops});
  cost.parts.push_back({"moe down", "experts: down", chosen_bytes / 3 + pairs * e.inter * element, matrix_flops});
  cost.parts.push_back({"moe_combine", "weighted sum", pairs * e.hidden * 4});
  return cost;
}

OpCost moe_norm_cost(const Tensor& residual, const Tensor& x, const MoeWeights& w, const ChosenExperts& chosen) {
  OpCost cost = moe_cost(x, w, chosen);
  cost.op = "moe_norm";
  cost.parts.back() = {"moe_combine|rms_norm|reduce_norm|scatter_norm", "weighted sum, residual, norm",
                       cost.parts.back().bytes + tensor_bytes(residual)};
  return cost;
}

}  // namespace perigee

#include "model/layer_weights.h"

#include <fmt/core.h>

#include <algorithm>

namespace perigee {
namespace {

void append(std::vector<TensorSpec>& out, std::vector<TensorSpec> specs) {
  out.insert(out.end(), std::make_move_iterator(specs.begin()), std::make_move_iterator(specs.end()));
}

MlpWeights read_mlp(const std::vector<TensorSpec>& specs, WeightReader& reader) {
  MlpWeights w;
  w.gate_up = reader.gate_up(specs[0], specs[1]);
  w.down = reader.linear(specs[2]);
  return w;
}

MoeWeights read_moe(const ModelConfig& c, int64_t layer, WeightReader& reader) {
  const TensorNames names(c);
  MoeWeights w;
  RouterWeight& r = w.router;
  r.num_experts = c.num_experts;
  if (c.ranks.whole_experts) {
    const Dealt here = dealt(c.num_experts, c.ranks);
    r.first_here = here.first;
    r.num_elsewhere = c.num_experts - here.count;
  }
  r.hidden = c.hidden;
  r.weight = reader.matrix_f32(names.router(layer));
  if (c.correction_bias) r.bias = reader.vector(names.router_bias(layer));
  r.bias_in_weights = c.bias_in_weights;
  r.uniform = c.uniform_routing;
  r.score = c.score;
  r.top_k = static_cast<int32_t>(c.top_k);
  r.num_groups = static_cast<int32_t>(c.num_groups);
  r.top_groups = static_cast<int32_t>(c.top_groups);
  r.normalize = c.normalize_top_k;
  r.scale = static_cast<float>(c.routed_scale);
  w.experts = reader.experts(names.experts(layer));
  if (c.num_shared_experts > 0) w.shared = read_mlp(names.shared_experts(layer), reader);
  return w;
}

}  // namespace

TensorSpec TensorNames::q(int64_t i) const {
  const int64_t out = c_.heads * (c_.nope + c_.rope);
  return c_.q_lora > 0 ? projection(i, "self_attn.q_b_proj", Shard::heads(c_.heads), out, c_.q_lora)
                       : projection(i, "self_attn.q_proj", Shard::heads(c_.heads), out, c_.attention_width());
}

TensorSpec TensorNames::kv_a(int64_t i) const {
  return projection(i, "self_attn.kv_a_proj_with_mqa", Shard::whole(), c_.kv_lora + c_.rope, c_.attention_width());
}

TensorSpec TensorNames::kv_b(int64_t i) const {
  return projection(i, "self_attn.kv_b_proj", Shard::heads(c_.heads), c_.heads * (c_.nope + c_.value), c_.kv_lora);
}

TensorSpec TensorNames::router(int64_t i) const {
  return {layer(i, fmt::format("{}.gate", c_.moe_names.block)), TensorRole::kMatrix, Shard::whole(), c_.num_experts,
          c_.hidden};
}

TensorSpec TensorNames::router_bias(int64_t i) const {
  return {layer(i, fmt::format("{}.gate.e_score_correction_bias", c_.moe_names.block)), TensorRole::kBias,
          Shard::whole(), 1, c_.num_experts};
}

std::vector<TensorSpec> TensorNames::gated_mlp(int64_t i, const std::string& name, int64_t inter) const {
  const TensorRole role = TensorRole::kProjection;
  return {{layer(i, name + ".gate_proj"), role, Shard::rows(), inter, c_.hidden},
          {layer(i, name + ".up_proj"), role, Shard::rows(), inter, c_.hidden},
          {layer(i, name + ".down_proj"), role, Shard::columns(), c_.hidden, inter}};
}

std::vector<TensorSpec> TensorNames::dense_mlp(int64_t i) const {
  return gated_mlp(i, "mlp", c_.inter);
}

std::vector<TensorSpec> TensorNames::shared_experts(int64_t i) const {
  return gated_mlp(i, fmt::format("{}.shared_experts", c_.moe_names.block), c_.num_shared_experts * c_.moe_inter);
}

std::vector<TensorSpec> TensorNames::experts(int64_t i) const {
  const MoeNames& n = c_.moe_names;
  const TensorRole role = TensorRole::kRoutedExpert;
  std::vector<TensorSpec> out;
  for (int64_t e = 0; e < c_.num_experts; ++e) {
    const std::string expert = fmt::format("{}.experts.{}.", layer(i, n.block), e);
    const bool whole = c_.ranks.whole_experts;
    const Shard rows = whole ? Shard::one_rank(e, c_.num_experts) : Shard::rows();
    const Shard columns = whole ? Shard::one_rank(e, c_.num_experts) : Shard::columns();
    out.push_back({expert + n.gate, role, rows, c_.moe_inter, c_.hidden});
    out.push_back({expert + n.up, role, rows, c_.moe_inter, c_.hidden});
    out.push_back({expert + n.down, role, columns, c_.hidden, c_.moe_inter});
  }
  return out;
}

std::vector<TensorSpec> TensorNames::mla(int64_t i) const {
  std::vector<TensorSpec> out = {kv_a(i), kv_a_norm(i), kv_b(i), q(i), o(i)};
  if (c_.q_lora > 0) append(out, {q_a(i), q_a_norm(i)});
  return out;
}

std::vector<TensorSpec> TensorNames::feed_forward(int64_t i) const {
  std::vector<TensorSpec> out = {mlp_norm(i)};
  if (!c_.is_moe(i)) {
    append(out, dense_mlp(i));
    return out;
  }
  out.push_back(router(i));
  if (c_.correction_bias) out.push_back(router_bias(i));
  append(out, experts(i));
  if (c_.num_shared_experts > 0) append(out, shared_experts(i));
  return out;
}

MlaShape mla_shape(const ModelConfig& c) {
  return {.heads = c.local_heads(),
          .nope = c.nope,
          .rope = c.rope,
          .value = c.value,
          .latent = c.kv_lora,
          .softmax_scale = static_cast<float>(mla_softmax_scale(c))};
}

MlaWeights read_mla(const ModelConfig& c, int64_t layer, WeightReader& reader) {
  const TensorNames names(c);
  MlaWeights w;
  w.shape = mla_shape(c);
  if (c.q_lora > 0) {
    w.q_a = reader.linear(names.q_a(layer));
    w.q_a_norm = reader.vector(names.q_a_norm(layer));
  }
  w.q = reader.linear(names.q(layer));
  w.kv_a = reader.linear(names.kv_a(layer));
  w.kv_a_norm = reader.vector(names.kv_a_norm(layer));
  w.up = reader.mla_up(names.kv_b(layer), w.shape);
  w.o = reader.linear(names.o(layer));
  w.rope.enabled = c.rope_enabled;
  w.rope.inv_freq = reader.pack_vector(rope_inv_freq(c.rope_config, c.rope));
  w.rope.cos_sin_factor = static_cast<float>(rope_cos_sin_factor(c.rope_config));
  w.latent_eps = static_cast<float>(c.latent_norm_eps);
  w.cache_scale = reader.cache_scale(names.layer(layer, "self_attn"));
  return w;
}

FeedForward read_feed_forward(const ModelConfig& c, int64_t layer, WeightReader& reader) {
  const TensorNames names(c);
  FeedForward f;
  f.norm = reader.vector(names.mlp_norm(layer));
  f.is_moe = c.is_moe(layer);
  if (f.is_moe) {
    f.moe = read_moe(c, layer, reader);
  } else {
    f.dense = read_mlp(names.dense_mlp(layer), reader);
  }
  return f;
}

ModelInfo model_info(const ModelConfig& c, const WeightReader& reader) {
  return {.architecture = c.architecture,
          .vocab = c.vocab,
          .hidden = c.hidden,
          .num_layers = c.num_layers,
          .heads = c.heads,
          .max_positions = c.max_positions,
          .eos_ids = c.eos_ids,
          .weight_bytes = reader.packed_bytes(),
          .has_cache_scales = reader.has_cache_scales()};
}

bool keep_rows_of_logits(const Batch& batch, Ops& ops, Tensor& o, Tensor& x, Tensor& h) {
  const auto rows = std::ssize(batch.logit_rows);
  h = h.row_range(0, rows);
  if (rows == x.rows) return true;  // all of them: those of a decode step
  ops.gather_residual(x);
  o = ops.gather_rows(o, batch.logit_rows);
  x = ops.gather_rows(x, batch.logit_rows);
  return rows > 0;
}

Tensor room_for_taps(std::span<const int32_t> taps, const Tensor& x, Ops& ops) {
  return taps.empty() ? Tensor() : ops.arena().tensor(ops.wide_dtype(), x.rows, std::ssize(taps) * x.cols);
}

void keep_tap(std::span<const int32_t> taps, size_t layer, const Tensor& x, Ops& ops, const Tensor& tapped) {
  const auto at = std::find(taps.begin(), taps.end(), static_cast<int32_t>(layer));
  if (at == taps.end()) return;
  ops.gather_residual(x);
  ops.tap(x, tapped.columns((at - taps.begin()) * x.cols, x.cols));
}

CacheLayout cache_layout_of(const ModelConfig& c, LatentFormat format) {
  const CacheGroup latent = CacheGroup::latent(c.num_layers - c.num_kda_layers(), c.kv_lora, c.rope, format);
  if (c.num_kda_layers() == 0) return {latent};
  const KdaShape kda = c.local_kda();
  return {latent, CacheGroup::state(c.num_kda_layers(), kda.heads, (kda.unit_bytes() + 127) / 128 * 128,
                                    kda.ring_token_floats() * static_cast<int64_t>(sizeof(float)))};
}

MlaForm choose_mla_form(const MlaShape& shape, TokenKind kind, int64_t new_tokens, int64_t context) {
  if (kind == TokenKind::kPrompt && context <= kOneFormTokens) return MlaForm::kExpanded;
  if (kind == TokenKind::kOutput && context + new_tokens <= kOneFormTokens) return MlaForm::kAbsorbed;
  const double n = static_cast<double>(new_tokens);
  const double cached = static_cast<double>(context);
  const double pairs = n * cached + n * (n + 1) / 2;
  const double saved = 2.0 * static_cast<double>(2 * shape.latent + shape.rope) -
                       2.0 * static_cast<double>(shape.nope + shape.rope + shape.value);
  const double expansion = 2.0 * static_cast<double>(shape.latent * (shape.nope + shape.value));
  return pairs * saved > cached * expansion ? MlaForm::kExpanded : MlaForm::kAbsorbed;
}

}  // namespace perigee

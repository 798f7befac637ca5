// What the networks of the DeepSeek-V3 lineage have in common: names and shapes of their tensors, and the packing of
// latent attention, MLPs and experts (DeepSeek-V3 2024, section 2.1). Each family's own file holds the forward pass.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/model.h"
#include "model/weights.h"
#include "ops/batch.h"
#include "ops/weights.h"

namespace perigee {

// The tensors of one model by their part in the network, for both the check of the whole and the reading of each.
// Layers count from 0.
class TensorNames {
 public:
  explicit TensorNames(const ModelConfig& config) : c_(config) {}  // borrowed

  TensorSpec embed() const { return vocabulary("model.embed_tokens"); }
  TensorSpec norm() const { return {c_.prefix + "model.norm", TensorRole::kNorm, Shard::whole(), 1, c_.hidden}; }
  TensorSpec head() const { return vocabulary("lm_head"); }

  std::string layer(int64_t i, const std::string& name) const {
    if (!c_.draft_layer.empty()) return fmt::format("{}.{}", c_.draft_layer, name);
    return fmt::format("{}model.layers.{}.{}", c_.prefix, i, name);
  }
  TensorSpec attention_norm(int64_t i) const { return vector(i, "input_layernorm", c_.hidden); }
  TensorSpec mlp_norm(int64_t i) const { return vector(i, "post_attention_layernorm", c_.hidden); }

  // The projections into latent space are every rank's own: what they make is shared by all heads.
  TensorSpec q_a(int64_t i) const {
    return projection(i, "self_attn.q_a_proj", Shard::whole(), c_.q_lora, c_.attention_width());
  }
  TensorSpec q_a_norm(int64_t i) const { return vector(i, "self_attn.q_a_layernorm", c_.q_lora); }
  TensorSpec q(int64_t i) const;
  TensorSpec kv_a(int64_t i) const;
  TensorSpec kv_a_norm(int64_t i) const { return vector(i, "self_attn.kv_a_layernorm", c_.kv_lora); }
  TensorSpec kv_b(int64_t i) const;
  TensorSpec o(int64_t i) const {
    return projection(i, "self_attn.o_proj", Shard::columns(), c_.hidden, c_.heads * c_.value);
  }

  TensorSpec router(int64_t i) const;
  TensorSpec router_bias(int64_t i) const;
  // gate, up, down; of the experts three specs each.
  std::vector<TensorSpec> dense_mlp(int64_t i) const;
  std::vector<TensorSpec> shared_experts(int64_t i) const;
  std::vector<TensorSpec> experts(int64_t i) const;

  // Every tensor of a layer's latent attention, and of what follows the attention.
  std::vector<TensorSpec> mla(int64_t i) const;
  std::vector<TensorSpec> feed_forward(int64_t i) const;

  // A matrix and a norm's vector in layer i.
  TensorSpec projection(int64_t i, const char* name, Shard shard, int64_t out, int64_t in) const {
    return {layer(i, name), TensorRole::kProjection, shard, out, in};
  }
  TensorSpec vector(int64_t i, const char* name, int64_t length) const {
    return {layer(i, name), TensorRole::kNorm, Shard::whole(), 1, length};
  }

 private:
  TensorSpec vocabulary(const char* name) const {
    return {c_.prefix + name, TensorRole::kMatrix, Shard::vocabulary(), c_.vocab, c_.hidden};
  }
  std::vector<TensorSpec> gated_mlp(int64_t i, const std::string& name, int64_t inter) const;
  const ModelConfig& c_;
};

// The second half of a layer.
struct FeedForward {
  VectorWeight norm;
  bool is_moe = false;
  MlpWeights dense;
  MoeWeights moe;
};

MlaShape mla_shape(const ModelConfig& config);  // of this rank's heads
MlaWeights read_mla(const ModelConfig& config, int64_t layer, WeightReader& reader);
FeedForward read_feed_forward(const ModelConfig& config, int64_t layer, WeightReader& reader);
ModelInfo model_info(const ModelConfig& config, const WeightReader& reader);

// In the last layer, what follows attention serves the logits alone: cuts the attention's output o, the residual x and
// the normed h to the rows whose logits are wanted. False if there are none.
bool keep_rows_of_logits(const Batch& batch, Ops& ops, Tensor& o, Tensor& x, Tensor& h);

// [n, taps * H] for the residual streams x [n, H] that enter the layers `taps`; empty for none.
Tensor room_for_taps(std::span<const int32_t> taps, const Tensor& x, Ops& ops);
// Where `layer` is one of `taps`: keeps the residual stream x [n, H] that enters it in its columns of `tapped`.
void keep_tap(std::span<const int32_t> taps, size_t layer, const Tensor& x, Ops& ops, const Tensor& tapped);

// What a sequence keeps on this rank: latents of the layers with latent attention, state of its heads of the others.
CacheLayout cache_layout_of(const ModelConfig& config, LatentFormat format);

// Up to here the form follows from what a token is: prompts are expanded, outputs absorbed. So neither a prefix hit nor
// a preemption changes a bit, at the cost of expanding a short turn's cached context (ADR 0005).
inline constexpr int64_t kOneFormTokens = 2048;

// The form of a sequence that was admitted with `new_tokens` to compute (a prompt's, or outputs that a preemption threw
// away) after `context` cached ones; a decode row is always absorbed. Beyond kOneFormTokens the cheaper form: expanding
// costs 2 L (dn + dv) flops for each cached token and head, once; it then saves 2 (2 L + dr) - 2 (dn + dr + dv) flops
// for each (query, key) pair. New tokens cost the same in both forms: one up-projection each.
MlaForm choose_mla_form(const MlaShape& shape, TokenKind kind, int64_t new_tokens, int64_t context);

}  // namespace perigee

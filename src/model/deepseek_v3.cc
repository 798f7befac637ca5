#include "model/deepseek_v3.h"

#include "model/mla_form.h"

namespace perigee {
namespace {

// The names and shapes of one checkpoint, for both the check of the whole and the reading of each.
struct Names {
  const ModelConfig& c;

  TensorSpec embed() const { return {c.prefix + "model.embed_tokens", TensorRole::kMatrix, c.vocab, c.hidden}; }
  TensorSpec norm() const { return {c.prefix + "model.norm", TensorRole::kNorm, 1, c.hidden}; }
  TensorSpec head() const { return {c.prefix + "lm_head", TensorRole::kMatrix, c.vocab, c.hidden}; }

  std::string layer(int64_t i, const char* name) const { return str_cat(c.prefix, "model.layers.", i, ".", name); }
  TensorSpec attention_norm(int64_t i) const { return {layer(i, "input_layernorm"), TensorRole::kNorm, 1, c.hidden}; }
  TensorSpec mlp_norm(int64_t i) const {
    return {layer(i, "post_attention_layernorm"), TensorRole::kNorm, 1, c.hidden};
  }
  TensorSpec q_a(int64_t i) const { return projection(i, "self_attn.q_a_proj", c.q_lora, c.hidden); }
  TensorSpec q_a_norm(int64_t i) const { return {layer(i, "self_attn.q_a_layernorm"), TensorRole::kNorm, 1, c.q_lora}; }
  TensorSpec q(int64_t i) const {
    const int64_t out = c.heads * (c.nope + c.rope);
    return c.q_lora > 0 ? projection(i, "self_attn.q_b_proj", out, c.q_lora)
                        : projection(i, "self_attn.q_proj", out, c.hidden);
  }
  TensorSpec kv_a(int64_t i) const {
    return projection(i, "self_attn.kv_a_proj_with_mqa", c.kv_lora + c.rope, c.hidden);
  }
  TensorSpec kv_a_norm(int64_t i) const {
    return {layer(i, "self_attn.kv_a_layernorm"), TensorRole::kNorm, 1, c.kv_lora};
  }
  TensorSpec kv_b(int64_t i) const {
    return projection(i, "self_attn.kv_b_proj", c.heads * (c.nope + c.value), c.kv_lora);
  }
  TensorSpec o(int64_t i) const { return projection(i, "self_attn.o_proj", c.hidden, c.heads * c.value); }
  TensorSpec router(int64_t i) const { return {layer(i, "mlp.gate"), TensorRole::kMatrix, c.num_experts, c.hidden}; }
  TensorSpec router_bias(int64_t i) const {
    return {layer(i, "mlp.gate.e_score_correction_bias"), TensorRole::kBias, 1, c.num_experts};
  }
  // gate, up, down of the gated MLP called `name`.
  std::vector<TensorSpec> mlp(int64_t i, const std::string& name, int64_t inter, TensorRole role) const {
    return {{layer(i, (name + ".gate_proj").c_str()), role, inter, c.hidden},
            {layer(i, (name + ".up_proj").c_str()), role, inter, c.hidden},
            {layer(i, (name + ".down_proj").c_str()), role, c.hidden, inter}};
  }
  std::vector<TensorSpec> dense_mlp(int64_t i) const { return mlp(i, "mlp", c.inter, TensorRole::kProjection); }
  std::vector<TensorSpec> shared_experts(int64_t i) const {
    return mlp(i, "mlp.shared_experts", c.num_shared_experts * c.moe_inter, TensorRole::kProjection);
  }
  std::vector<TensorSpec> experts(int64_t i) const {
    std::vector<TensorSpec> out;
    for (int64_t e = 0; e < c.num_experts; ++e)
      for (TensorSpec& spec : mlp(i, str_cat("mlp.experts.", e), c.moe_inter, TensorRole::kRoutedExpert))
        out.push_back(std::move(spec));
    return out;
  }

 private:
  TensorSpec projection(int64_t i, const char* name, int64_t out, int64_t in) const {
    return {layer(i, name), TensorRole::kProjection, out, in};
  }
};

MlaShape mla_shape(const ModelConfig& c) {
  return {.heads = c.heads,
          .nope = c.nope,
          .rope = c.rope,
          .value = c.value,
          .latent = c.kv_lora,
          .softmax_scale = static_cast<float>(mla_softmax_scale(c))};
}

struct Layer {
  VectorWeight attention_norm, mlp_norm;
  MlaWeights mla;
  MlpWeights mlp;  // of dense layers
  MoeWeights moe;  // of the others
  bool is_moe = false;
};

class DeepseekV3 final : public Model {
 public:
  DeepseekV3(const ModelConfig& config, double latent_eps, WeightReader& reader)
      : config_(config), names_{config_}, latent_eps_(static_cast<float>(latent_eps)) {
    embed_ = reader.embed(names_.embed());
    for (int64_t i = 0; i < config_.num_layers; ++i) layers_.push_back(read_layer(i, reader));
    norm_ = reader.vector(names_.norm());
    head_ = reader.linear(names_.head());
    info_ = {.architecture = config_.architecture,
             .vocab = config_.vocab,
             .hidden = config_.hidden,
             .num_layers = config_.num_layers,
             .heads = config_.heads,
             .max_positions = config_.max_positions,
             .eos_ids = config_.eos_ids,
             .weight_bytes = reader.packed_bytes()};
  }

  const ModelInfo& info() const override { return info_; }

  CacheLayout cache_layout(DType cache_dtype) const override {
    CHECK(cache_dtype == DType::kF32 || cache_dtype == DType::kBF16, "cache of ", dtype_name(cache_dtype));
    return {.num_layers = config_.num_layers,
            .row_elements = config_.kv_lora + config_.rope,
            .f32 = cache_dtype == DType::kF32};
  }

  Tensor forward(const Batch& batch, Ops& ops, const PagePool& pool) const override {
    const float eps = static_cast<float>(config_.rms_norm_eps);
    const Tensor x = ops.embed(embed_, batch.tokens);  // [n, H], the residual stream
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      const ArenaScope temporaries(ops.arena());
      const Layer& l = layers_[i];
      const LatentLayer cache = pool.latent_layer(i);
      Tensor h = ops.rms_norm(x, l.attention_norm, eps, ops.wide_dtype());
      const Tensor q = ops.mla_in(h, l.mla, batch, cache);                      // [n, h (dn + dr)]
      const Tensor o = ops.mla_attend(q, l.mla.up, l.mla.shape, batch, cache);  // [n, h dv]
      ops.add(x, ops.linear(o, l.mla.o, DType::kF32));
      h = ops.rms_norm(x, l.mlp_norm, eps);
      ops.add(x, l.is_moe ? ops.moe(h, l.moe) : ops.dense_mlp(h, l.mlp));
    }
    const Tensor last = ops.rms_norm(ops.gather_rows(x, batch.logit_rows), norm_, eps, ops.wide_dtype());
    return ops.logits(last, head_);
  }

  MlaForm choose_form(int64_t new_tokens, int64_t context, bool deterministic) const override {
    return choose_mla_form(mla_shape(config_), new_tokens, context, deterministic);
  }

 private:
  Layer read_layer(int64_t i, WeightReader& reader) const {
    Layer l;
    l.attention_norm = reader.vector(names_.attention_norm(i));
    l.mla = read_attention(i, reader);
    l.mlp_norm = reader.vector(names_.mlp_norm(i));
    l.is_moe = config_.is_moe(i);
    if (l.is_moe) {
      l.moe = read_moe(i, reader);
    } else {
      l.mlp = read_mlp(names_.dense_mlp(i), reader);
    }
    return l;
  }

  MlaWeights read_attention(int64_t i, WeightReader& reader) const {
    MlaWeights w;
    w.shape = mla_shape(config_);
    if (config_.q_lora > 0) {
      w.q_a = reader.linear(names_.q_a(i));
      w.q_a_norm = reader.vector(names_.q_a_norm(i));
    }
    w.q = reader.linear(names_.q(i));
    w.kv_a = reader.linear(names_.kv_a(i));
    w.kv_a_norm = reader.vector(names_.kv_a_norm(i));
    w.up = reader.mla_up(names_.kv_b(i), w.shape);
    w.o = reader.linear(names_.o(i));
    w.rope.inv_freq = reader.pack_vector(rope_inv_freq(config_.rope_config, config_.rope));
    w.rope.cos_sin_factor = static_cast<float>(rope_cos_sin_factor(config_.rope_config));
    w.latent_eps = latent_eps_;
    return w;
  }

  static MlpWeights read_mlp(const std::vector<TensorSpec>& specs, WeightReader& reader) {
    MlpWeights w;
    w.gate_up = reader.linear(std::span(specs).first(2));
    w.down = reader.linear(specs[2]);
    return w;
  }

  MoeWeights read_moe(int64_t i, WeightReader& reader) const {
    MoeWeights w;
    RouterWeight& r = w.router;
    r.num_experts = config_.num_experts;
    r.hidden = config_.hidden;
    r.weight = reader.matrix_f32(names_.router(i));
    if (config_.correction_bias) r.bias = reader.vector(names_.router_bias(i));
    r.score = config_.score;
    r.top_k = static_cast<int32_t>(config_.top_k);
    r.num_groups = static_cast<int32_t>(config_.num_groups);
    r.top_groups = static_cast<int32_t>(config_.top_groups);
    r.normalize = config_.normalize_top_k;
    r.scale = static_cast<float>(config_.routed_scale);
    w.experts = reader.experts(names_.experts(i));
    if (config_.num_shared_experts > 0) w.shared = read_mlp(names_.shared_experts(i), reader);
    return w;
  }

  const ModelConfig config_;
  const Names names_;
  const float latent_eps_;
  EmbedWeight embed_;
  std::vector<Layer> layers_;
  VectorWeight norm_;
  LinearWeight head_;
  ModelInfo info_;
};

}  // namespace

std::vector<TensorSpec> deepseek_v3_tensors(const ModelConfig& config) {
  const Names names{config};
  std::vector<TensorSpec> out = {names.embed()};
  const auto add = [&](std::vector<TensorSpec> specs) { out.insert(out.end(), specs.begin(), specs.end()); };
  for (int64_t i = 0; i < config.num_layers; ++i) {
    if (config.q_lora > 0) add({names.q_a(i), names.q_a_norm(i)});
    add({names.attention_norm(i), names.q(i), names.kv_a(i), names.kv_a_norm(i), names.kv_b(i), names.o(i)});
    add({names.mlp_norm(i)});
    if (!config.is_moe(i)) {
      add(names.dense_mlp(i));
      continue;
    }
    add({names.router(i)});
    if (config.correction_bias) add({names.router_bias(i)});
    add(names.experts(i));
    if (config.num_shared_experts > 0) add(names.shared_experts(i));
  }
  add({names.norm(), names.head()});
  return out;
}

std::unique_ptr<Model> build_deepseek_v3(const ModelConfig& config, double latent_eps, WeightReader& reader) {
  return std::make_unique<DeepseekV3>(config, latent_eps, reader);
}

}  // namespace perigee

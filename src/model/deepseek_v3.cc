#include "model/deepseek_v3.h"

#include "model/layer_weights.h"

namespace perigee {
namespace {

struct Layer {
  VectorWeight attention_norm;
  MlaWeights mla;
  FeedForward mlp;
};

class DeepseekV3 final : public Model {
 public:
  DeepseekV3(const ModelConfig& config, WeightReader& reader) : config_(config), shape_(mla_shape(config)) {
    const TensorNames names(config_);
    embed_ = reader.embed(names.embed());
    for (int64_t i = 0; i < config_.num_layers; ++i)
      layers_.push_back({.attention_norm = reader.vector(names.attention_norm(i)),
                         .mla = read_mla(config_, i, reader),
                         .mlp = read_feed_forward(config_, i, reader)});
    norm_ = reader.vector(names.norm());
    head_ = reader.linear(names.head());
    info_ = model_info(config_, reader);
  }

  const ModelInfo& info() const override { return info_; }
  const EmbedWeight& embedding() const override { return embed_; }
  const LinearWeight& head() const override { return head_; }
  void tap(std::vector<int32_t> layers) override { taps_ = std::move(layers); }

  CacheLayout cache_layout(LatentFormat format) const override { return cache_layout_of(config_, format); }

  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool& pool) const override {
    const float eps = static_cast<float>(config_.rms_norm_eps);
    const DType term = ops.term_dtype();
    Tensor x = ops.embed(embed_, batch.tokens);                                    // [n, H], the residual stream
    Tensor h = ops.rms_norm(x, layers_[0].attention_norm, eps, ops.wide_dtype());  // [n, H], of each layer in turn
    const Tensor tapped = room_for_taps(taps_, x, ops);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const ArenaScope temporaries(ops.arena());
      keep_tap(taps_, i, x, ops, tapped);
      const Layer& l = layers_[i];
      const LatentLayer cache = pool.latent_layer(static_cast<int64_t>(i), l.mla.cache_scale);
      const Tensor q = ops.mla_in(h, l.mla, batch, cache);                // [n, h (dn + dr)]
      Tensor o = ops.mla_attend(q, l.mla.up, l.mla.shape, batch, cache);  // [n, h dv]
      if (i + 1 == layers_.size() && !keep_rows_of_logits(batch, ops, o, x, h)) break;
      const Tensor m = ops.add_norm(x, ops.linear(o, l.mla.o, term), l.mlp.norm, eps);  // [n, H]
      const VectorWeight& next_norm = i + 1 < layers_.size() ? layers_[i + 1].attention_norm : norm_;
      if (l.mlp.is_moe) {
        ops.moe_norm(x, m, l.mlp.moe, next_norm, eps, h);
      } else {
        ops.add_norm(x, ops.dense_mlp(m, l.mlp.dense, term), next_norm, eps, h);
      }
    }
    return {.logits = ops.logits(h, head_), .taps = tapped};
  }

  MlaForm choose_form(TokenKind kind, int64_t new_tokens, int64_t context) const override {
    return choose_mla_form(shape_, kind, new_tokens, context);
  }

 private:
  const ModelConfig config_;
  const MlaShape shape_;
  EmbedWeight embed_;
  std::vector<Layer> layers_;
  VectorWeight norm_;
  LinearWeight head_;
  ModelInfo info_;
  std::vector<int32_t> taps_;
};

}  // namespace

std::vector<TensorSpec> deepseek_v3_tensors(const ModelConfig& config) {
  const TensorNames names(config);
  std::vector<TensorSpec> out = {names.embed(), names.norm(), names.head()};
  const auto add = [&](const std::vector<TensorSpec>& specs) { out.insert(out.end(), specs.begin(), specs.end()); };
  for (int64_t i = 0; i < config.num_layers; ++i) {
    add({names.attention_norm(i)});
    add(names.mla(i));
    add(names.feed_forward(i));
  }
  return out;
}

std::unique_ptr<Model> build_deepseek_v3(const ModelConfig& config, WeightReader& reader) {
  return std::make_unique<DeepseekV3>(config, reader);
}

}  // namespace perigee

#include "model/kimi_linear.h"

#include <fmt/core.h>

#include "model/layer_weights.h"

namespace perigee {
namespace {

// The tensors of one layer's Kimi Delta Attention.
struct KdaTensors {
  TensorSpec q, k, v, q_conv, k_conv, v_conv, log_decay, time_bias, f_a, f_b, b, g_a, g_b, o_norm, o;
};

KdaTensors kda_tensors(const ModelConfig& c, int64_t i) {
  const TensorNames names(c);
  const int64_t width = c.kda.width(), dim = c.kda.dim;
  const Shard heads = Shard::heads(c.kda.heads);
  const auto own = [&](const char* name, TensorRole role, Shard shard, int64_t out, int64_t in) {
    return TensorSpec{names.layer(i, fmt::format("self_attn.{}", name)), role, shard, out, in};
  };
  const auto projection = [&](const char* name, Shard shard, int64_t out, int64_t in) {
    return own(name, TensorRole::kProjection, shard, out, in);
  };
  const auto conv = [&](const char* name) { return own(name, TensorRole::kConv, heads, width, c.kda.conv); };
  KdaTensors t{.q = projection("q_proj", heads, width, c.hidden),
               .k = projection("k_proj", heads, width, c.hidden),
               .v = projection("v_proj", heads, width, c.hidden),
               .q_conv = conv("q_conv1d"),
               .k_conv = conv("k_conv1d"),
               .v_conv = conv("v_conv1d"),
               .log_decay = own("A_log", TensorRole::kLogDecay, heads, 1, c.kda.heads),
               .time_bias = own("dt_bias", TensorRole::kTimeBias, heads, 1, width),
               .f_a = projection("f_a_proj", Shard::whole(), dim, c.hidden),
               .f_b = projection("f_b_proj", heads, width, dim),
               .b = projection("b_proj", heads, c.kda.heads, c.hidden),
               .g_a = projection("g_a_proj", Shard::whole(), dim, c.hidden),
               .g_b = projection("g_b_proj", heads, width, dim),
               .o_norm = own("o_norm", TensorRole::kNorm, Shard::whole(), 1, dim),
               .o = projection("o_proj", Shard::columns(), c.hidden, width)};
  t.log_decay.why = fmt::format(", as kda_layers of config.json has layer {}", i + 1);
  return t;
}

KdaWeights read_kda(const ModelConfig& c, int64_t layer, WeightReader& reader) {
  const KdaTensors t = kda_tensors(c, layer);
  KdaWeights w;
  w.shape = c.local_kda();
  w.qkv = reader.linear(std::vector{t.q, t.k, t.v});
  w.gates = reader.linear(std::vector{t.f_a, t.g_a, t.b});
  w.f_b = reader.linear(t.f_b);
  w.g_b = reader.linear(t.g_b);
  w.conv = reader.kda_conv(t.q_conv, t.k_conv, t.v_conv);
  w.a = reader.exp_vector(t.log_decay);
  w.dt_bias = reader.vector(t.time_bias);
  w.o_norm = reader.vector(t.o_norm);
  w.eps = static_cast<float>(c.rms_norm_eps);
  w.o = reader.linear(t.o);
  return w;
}

// What config.json says of a layer shows in these tensors, which the other kind of layer lacks: they are checked first.
std::vector<TensorSpec> attention_tensors(const ModelConfig& c, int64_t i) {
  if (c.is_kda(i)) {
    const KdaTensors t = kda_tensors(c, i);
    return {t.log_decay, t.time_bias, t.q, t.k,   t.v,   t.q_conv, t.k_conv, t.v_conv,
            t.f_a,       t.f_b,       t.b, t.g_a, t.g_b, t.o_norm, t.o};
  }
  std::vector<TensorSpec> out = TensorNames(c).mla(i);
  out.front().why = fmt::format(", as full_attn_layers of config.json has layer {}", i + 1);
  return out;
}

struct Layer {
  VectorWeight attention_norm;
  bool is_kda = false;
  int64_t index = 0;  // among the layers of its kind
  KdaWeights kda;
  MlaWeights mla;
  FeedForward mlp;
};

class KimiLinear final : public Model {
 public:
  KimiLinear(const ModelConfig& config, WeightReader& reader) : config_(config), shape_(mla_shape(config)) {
    const TensorNames names(config_);
    embed_ = reader.embed(names.embed());
    for (int64_t i = 0; i < config_.num_layers; ++i) layers_.push_back(read_layer(i, reader));
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
      Tensor o;
      if (l.is_kda) {
        o = ops.kda(h, l.kda, batch, pool.state_layer(l.index));  // [n, h d]
      } else {
        const LatentLayer cache = pool.latent_layer(l.index, l.mla.cache_scale);
        const Tensor q = ops.mla_in(h, l.mla, batch, cache);         // [n, h (dn + dr)]
        o = ops.mla_attend(q, l.mla.up, l.mla.shape, batch, cache);  // [n, h dv]
      }
      if (i + 1 == layers_.size() && !keep_rows_of_logits(batch, ops, o, x, h)) break;
      const LinearWeight& out = l.is_kda ? l.kda.o : l.mla.o;
      const Tensor m = ops.add_norm(x, ops.linear(o, out, term), l.mlp.norm, eps);  // [n, H]
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
  Layer read_layer(int64_t i, WeightReader& reader) const {
    Layer l;
    l.attention_norm = reader.vector(TensorNames(config_).attention_norm(i));
    l.is_kda = config_.is_kda(i);
    l.index =
        std::count_if(layers_.begin(), layers_.end(), [&](const Layer& other) { return other.is_kda == l.is_kda; });
    if (l.is_kda) {
      l.kda = read_kda(config_, i, reader);
    } else {
      l.mla = read_mla(config_, i, reader);
    }
    l.mlp = read_feed_forward(config_, i, reader);
    return l;
  }

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

std::vector<TensorSpec> kimi_linear_tensors(const ModelConfig& config) {
  const TensorNames names(config);
  std::vector<TensorSpec> out = {names.embed(), names.norm(), names.head()};
  const auto add = [&](const std::vector<TensorSpec>& specs) { out.insert(out.end(), specs.begin(), specs.end()); };
  for (int64_t i = 0; i < config.num_layers; ++i) {
    add({names.attention_norm(i)});
    add(attention_tensors(config, i));
    add(names.feed_forward(i));
  }
  return out;
}

std::unique_ptr<Model> build_kimi_linear(const ModelConfig& config, WeightReader& reader) {
  return std::make_unique<KimiLinear>(config, reader);
}

}  // namespace perigee

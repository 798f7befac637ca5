#include "model/eagle3.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/cgroup.h"
#include "model/dummy.h"
#include "model/shape_source.h"

namespace perigee {
namespace {

// Its cache is a layer of the target's blocks.
Status check_cache(const ModelConfig& layer, const Model& target) {
  const CacheLayout layout = target.cache_layout(LatentFormat::kBF16);
  const CacheGroup& latent = layout.latent();
  if (latent.layers > 0 && layer.kv_lora == latent.latent_rank && layer.rope == latent.rope) return {};
  return bad_input(fmt::format("config.json: kv_lora_rank and qk_rope_head_dim: expected {} and {}, as its target has, "
                               "found {} and {}",
                               latent.latent_rank, latent.rope, layer.kv_lora, layer.rope),
                   "kv_lora_rank");
}

// The draft's tensors, for both the check of the whole and the reading of each.
class Names {
 public:
  explicit Names(const Eagle3Config& c) : c_(c), layer_(c_.layer) {}

  TensorSpec fuse() const {
    return {"fc", TensorRole::kProjection, Shard::whole(), c_.layer.hidden, std::ssize(c_.taps) * c_.layer.hidden};
  }
  std::vector<TensorSpec> tap_norms() const {
    std::vector<TensorSpec> out;
    if (c_.norms_all_taps) out.push_back(norm("input_norm", std::ssize(c_.taps) * c_.layer.hidden));
    if (c_.norms_each_tap)
      for (size_t i = 0; i < c_.taps.size(); ++i) out.push_back(norm(fmt::format("fc_norm.{}", i), c_.layer.hidden));
    return out;
  }
  TensorSpec embedding() const { return vocabulary("embed_tokens", c_.layer.vocab); }
  TensorSpec head() const { return vocabulary("lm_head", c_.vocab); }
  TensorSpec ids() const { return {"d2t", TensorRole::kOffsets, Shard::whole(), 1, c_.vocab}; }
  std::vector<TensorSpec> own_vocabulary(OwnVocabulary own) const {
    std::vector<TensorSpec> out;
    if (own.input) out.push_back(embedding());
    if (own.output) out.push_back(head());
    return out;
  }
  TensorSpec last_norm() const { return norm("norm", c_.layer.hidden); }
  TensorSpec embedding_norm() const { return layer_.attention_norm(0); }
  TensorSpec hidden_norm() const { return layer_.vector(0, "hidden_norm", c_.layer.hidden); }

  // All but the vocabulary's.
  std::vector<TensorSpec> layer() const {
    std::vector<TensorSpec> out = {fuse(), last_norm(), embedding_norm(), hidden_norm()};
    const auto add = [&](const std::vector<TensorSpec>& specs) { out.insert(out.end(), specs.begin(), specs.end()); };
    add(tap_norms());
    add(c_.has_latents() ? layer_.mla(0) : full());
    add(layer_.feed_forward(0));
    return out;
  }
  std::vector<TensorSpec> all(OwnVocabulary own) const {
    std::vector<TensorSpec> out = layer();
    const std::vector<TensorSpec> more = own_vocabulary(own);
    out.insert(out.end(), more.begin(), more.end());
    if (own.ids) out.push_back(ids());
    return out;
  }
  // q, k, v, o
  std::vector<TensorSpec> full() const {
    const FullShape& s = c_.full;
    const auto heads = [&](const char* name, int64_t count) {
      return layer_.projection(0, name, Shard::heads(count), count * s.dim, c_.layer.attention_width());
    };
    return {heads("self_attn.q_proj", s.heads), heads("self_attn.k_proj", s.kv_heads),
            heads("self_attn.v_proj", s.kv_heads),
            layer_.projection(0, "self_attn.o_proj", Shard::columns(), c_.layer.hidden, s.heads * s.dim)};
  }

 private:
  static TensorSpec norm(std::string name, int64_t length) {
    return {std::move(name), TensorRole::kNorm, Shard::whole(), 1, length};
  }
  TensorSpec vocabulary(const char* name, int64_t size) const {
    return {name, TensorRole::kMatrix, Shard::vocabulary(), size, c_.layer.hidden};
  }
  const Eagle3Config& c_;
  const TensorNames layer_;
};

Result<std::unique_ptr<TensorSource>> open_source(const LoadOptions& options) {
  if (options.format == LoadFormat::kDummy) return make_dummy_source(available_cores());
  return open_file_source(options.path, options.language_model_only);
}

Status check(OwnVocabulary own, const Eagle3Config& config, const Model& target, const WeightPacker& packer,
             int64_t num_ranks, TensorSource& tensors) {
  const ModelConfig& layer = config.layer;
  if (config.has_latents()) RETURN_IF_ERROR(check_cache(layer, target));
  RETURN_IF_ERROR(check_limits(layer, packer.limits(), packer.name()));
  const Names names(config);
  RETURN_IF_ERROR(tensors.verify(names.all(own), layer));
  RETURN_IF_ERROR(check_shards(names.own_vocabulary(own), tensors, num_ranks));
  return check_shards(names.layer(), tensors, layer.ranks.size);
}

// From offsets to the target's ids.
Result<std::vector<int32_t>> target_ids(const std::vector<int64_t>& offsets, int64_t vocab) {
  std::vector<int32_t> ids;
  for (const int64_t offset : offsets) {
    const int64_t drafted = std::ssize(ids);
    if (offset < -drafted || offset >= vocab - drafted)
      return bad_input(fmt::format("tensor d2t: element {}: expected an offset in [{}, {}], which gives an id of the "
                                   "target's vocabulary, found {}",
                                   drafted, -drafted, vocab - drafted - 1, offset),
                       "d2t");
    ids.push_back(static_cast<int32_t>(drafted + offset));
  }
  return ids;
}

FullWeights read_full(const Eagle3Config& c, const std::vector<TensorSpec>& specs, WeightReader& reader) {
  FullWeights w;
  w.shape = c.full;
  w.shape.heads /= c.layer.ranks.size;
  w.shape.kv_heads /= c.layer.ranks.size;
  w.qkv = reader.linear(std::span(specs).first(3));
  w.o = reader.linear(specs[3]);
  w.rope.halves = true;
  w.rope.inv_freq = reader.pack_vector(rope_inv_freq(c.layer.rope_config, c.full.dim));
  w.rope.cos_sin_factor = static_cast<float>(rope_cos_sin_factor(c.layer.rope_config));
  return w;
}

// The file and what is wrong in it.
Error of_draft(const std::string& folder, const Error& error) {
  return Error(error.code, fmt::format("draft {}: {}", folder, error.message), error.field);
}

}  // namespace

std::vector<TensorSpec> eagle3_tensors(const Eagle3Config& config, OwnVocabulary own) {
  return Names(config).all(own);
}

Result<std::unique_ptr<Eagle3>> Eagle3::load(const LoadOptions& options, const Model& target, Ops& ops, Layer layer) {
  return make(options, target, ops, Numbers::kRead, layer);
}

Result<std::unique_ptr<Eagle3>> Eagle3::size(const LoadOptions& options, const Model& target, WeightPacker& sizes,
                                             Layer layer) {
  return make(options, target, sizes, Numbers::kNone, layer);
}

Result<std::unique_ptr<Eagle3>> Eagle3::make(const LoadOptions& options, const Model& target, WeightPacker& packer,
                                             Numbers numbers, Layer layer) {
  const auto named = [&](const Error& error) { return of_draft(options.path, error); };
  const Result<Json> json = read_draft_json(options.path);
  if (!json.ok()) return named(json.error());
  Result<Eagle3Config> config = parse_eagle3_config(*json, target.info());
  if (!config.ok()) return named(config.error());
  if (layer == Layer::kDivided) config->layer.ranks = options.ranks;
  Result<std::unique_ptr<TensorSource>> source = open_source(options);
  if (!source.ok()) return named(source.error());
  TensorSource& tensors = **source;
  config->layer.draft_layer = tensors.has("layers.0.hidden_norm.weight") ? "layers.0" : "midlayer";
  std::unique_ptr<Eagle3> draft(new Eagle3(std::move(*config), target, layer));
  const bool part = draft->config_.vocab < target.info().vocab;
  const OwnVocabulary own{.input = tensors.has("embed_tokens.weight"),
                          .output = part || tensors.has("lm_head.weight"),
                          .ids = part || tensors.has("d2t")};
  const Status status = check(own, draft->config_, target, packer, options.ranks.size, tensors);
  if (!status.ok()) return named(status.error());
  const Names names(draft->config_);
  if (own.ids) {
    auto ids = target_ids(tensors.integers(names.ids()), target.info().vocab);
    if (!ids.ok()) return named(ids.error());
    draft->target_ids_ = std::move(*ids);
  }
  const ShapeSource shapes(tensors);
  const TensorSource& numbered = numbers == Numbers::kRead ? tensors : static_cast<const TensorSource&>(shapes);
  const CacheScales no_scales;
  const auto reader = [&](const std::vector<TensorSpec>& specs, const TensorParallel& ranks) {
    return WeightReader(numbered, packer, ranks, part_bytes(specs, tensors, ranks), no_scales, options.progress);
  };
  WeightReader vocabulary = reader(names.own_vocabulary(own), options.ranks);
  draft->read_vocabulary(vocabulary, own);
  WeightReader rest = reader(names.layer(), draft->config_.layer.ranks);
  draft->read_layer(rest);
  draft->weight_bytes_ = vocabulary.packed_bytes() + rest.packed_bytes();
  return draft;
}

void Eagle3::read_vocabulary(WeightReader& reader, OwnVocabulary own) {
  const Names names(config_);
  if (own.input) own_embedding_ = reader.embed(names.embedding());
  if (own.output) own_head_ = reader.linear(names.head());
  embedding_ = own.input ? &own_embedding_ : &target_.embedding();
  head_ = own.output ? &own_head_ : &target_.head();
}

void Eagle3::read_layer(WeightReader& reader) {
  const Names names(config_);
  for (const TensorSpec& spec : names.tap_norms()) tap_norms_.push_back(reader.vector(spec));
  fuse_ = reader.linear(names.fuse());
  embedding_norm_ = reader.vector(names.embedding_norm());
  hidden_norm_ = reader.vector(names.hidden_norm());
  norm_ = reader.vector(names.last_norm());
  if (config_.has_latents())
    mla_ = read_mla(config_.layer, 0, reader);
  else
    full_ = read_full(config_, names.full(), reader);
  mlp_ = read_feed_forward(config_.layer, 0, reader);
}

Tensor Eagle3::fuse(const Tensor& taps, Ops& ops) const {
  if (tap_norms_.empty()) return ops.linear(taps, fuse_, DType::kF32);
  const auto eps = static_cast<float>(config_.layer.rms_norm_eps);
  const Tensor normed = ops.arena().tensor(ops.wide_dtype(), taps.rows, taps.cols);
  const int64_t width = taps.cols / std::ssize(tap_norms_);  // of one tap, or of all
  for (int64_t i = 0; i < std::ssize(tap_norms_); ++i)
    ops.rms_norm(taps.columns(i * width, width), tap_norms_[static_cast<size_t>(i)], eps,
                 normed.columns(i * width, width));
  return ops.linear(normed, fuse_, DType::kF32);
}

CacheLayout Eagle3::cache_layout(const CacheLayout& target, LatentFormat numbers, int32_t dcp_size) const {
  if (!config_.has_latents()) {
    const DType dtype = numbers == LatentFormat::kF32    ? DType::kF32
                        : numbers == LatentFormat::kBF16 ? DType::kBF16
                                                         : DType::kF8E4M3;
    const auto shards = static_cast<int32_t>(config_.layer.ranks.size);
    return target.with_draft(CacheGroup::full(full_.shape.kv_heads, full_.shape.dim, dtype, shards), dcp_size);
  }
  // Ranks that share blocks exchange queries and results; those that each have the layer whole are to need no exchange.
  if (numbers == target.latent().format && (!whole_ || dcp_size == 1)) return target.with_latent_layers(1);
  return target.with_draft(CacheGroup::latent(1, config_.layer.kv_lora, config_.layer.rope, numbers), dcp_size);
}

// -> what attention gives each token; nothing where no row of logits is wanted, which fills the cache alone.
Tensor Eagle3::attend_latents(const Tensor& in, const Batch& batch, Ops& ops, const PagePool& pool) const {
  const bool own = pool.layout.draft().layers > 0;
  const LatentLayer cache = own ? pool.draft_latents() : pool.latent_layer(pool.layout.latent().layers - 1);
  const Tensor q = ops.mla_in(in, mla_, batch, cache);
  return batch.logit_rows.empty() ? Tensor() : ops.mla_attend(q, mla_.up, mla_.shape, batch, cache);
}

Tensor Eagle3::attend_full(const Tensor& in, const Batch& batch, Ops& ops, const PagePool& pool) const {
  const FullLayer cache = pool.draft_heads();
  const Tensor q = ops.full_in(in, full_, batch, cache);
  return batch.logit_rows.empty() ? Tensor() : ops.full_attend(q, full_.shape, batch, cache);
}

void Eagle3::add_norm(const Tensor& residual, const Tensor& y, std::span<const float> weight, const Tensor& out,
                      Ops& ops) const {
  const auto eps = static_cast<float>(config_.layer.rms_norm_eps);
  if (!whole_) return ops.add_norm(residual, y, weight, eps, out);
  ops.add(residual, y);
  ops.rms_norm(residual, weight, eps, out);
}

Eagle3::Output Eagle3::forward(const Batch& batch, const Tensor& hidden, Ops& ops, const PagePool& pool) const {
  const auto eps = static_cast<float>(config_.layer.rms_norm_eps);
  const int64_t width = config_.layer.hidden, rows = std::ssize(batch.logit_rows);
  const DType term = whole_ ? DType::kF32 : ops.term_dtype();
  const Tensor in = ops.arena().tensor(ops.wide_dtype(), hidden.rows, 2 * width);  // [embedding | hidden state]
  ops.rms_norm(ops.embed(*embedding_, batch.tokens), embedding_norm_, eps, in.columns(0, width));
  ops.rms_norm(hidden, hidden_norm_, eps, in.columns(width, width));
  Tensor x = hidden;  // the residual stream
  if (config_.norms_before_residual) x = ops.rms_norm(hidden, hidden_norm_, eps, DType::kF32);
  Tensor o = config_.has_latents() ? attend_latents(in, batch, ops, pool) : attend_full(in, batch, ops, pool);
  if (rows == 0) return {};
  if (rows < x.rows) {
    o = ops.gather_rows(o, batch.logit_rows);
    x = ops.gather_rows(x, batch.logit_rows);
  }
  const LinearWeight& projection = config_.has_latents() ? mla_.o : full_.o;
  const Tensor m = ops.arena().tensor(ops.activation_dtype(), rows, width);
  add_norm(x, ops.linear(o, projection, term), mlp_.norm, m, ops);
  const Tensor h = ops.arena().tensor(ops.wide_dtype(), rows, width);
  add_norm(x, ops.dense_mlp(m, mlp_.dense, term), norm_, h, ops);
  if (!whole_) ops.gather_residual(x);
  return {.logits = ops.logits(h, *head_),
          .hidden = config_.hands_on_normed ? ops.rms_norm(x, norm_, eps, DType::kF32) : x};
}

}  // namespace perigee

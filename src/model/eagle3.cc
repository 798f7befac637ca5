#include "model/eagle3.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/cgroup.h"
#include "base/model_folder.h"
#include "model/config_reader.h"
#include "model/dummy.h"
#include "model/shape_source.h"

namespace perigee {
namespace {

constexpr size_t kMaxConfigBytes = 4u << 20;
constexpr int64_t kMaxTaps = 16;

// A draft's layer is a dense layer of the DeepSeek-V3 family, and is read as one: keys of experts mean nothing.
Json as_dense_layer(Json config) {
  config.set("architectures", Json(Json::Array{Json("DeepseekV3ForCausalLM")}));
  config.set("first_k_dense_replace", int64_t{1});
  for (const char* key : {"moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"})
    config.set(key, int64_t{1});
  config.set("norm_topk_prob", true);
  config.set("topk_method", "greedy");
  return config;
}

// Published lists count in two ways: "what enters layer k", or "what leaves layer k", of which the first begins with 1.
Status read_taps(ConfigReader& r, const Json* list, const ModelInfo& target, std::vector<int32_t>& taps) {
  constexpr const char* kKey = "eagle_aux_hidden_state_layer_ids";
  const auto num_layers = static_cast<int32_t>(target.num_layers);
  if (list == nullptr) {
    taps = {2, num_layers / 2, num_layers - 3};
  } else if (list->is_array() && !list->as_array().empty() && std::ssize(list->as_array()) <= kMaxTaps) {
    for (const Json& id : list->as_array())
      taps.push_back(id.is_int() && std::abs(id.as_int()) < (1 << 20) ? static_cast<int32_t>(id.as_int()) : -1);
    if (taps[0] == 1)
      for (int32_t& tap : taps) ++tap;
  }
  const bool ascend = std::adjacent_find(taps.begin(), taps.end(), std::greater_equal<>()) == taps.end();
  if (taps.empty() || !ascend || taps.front() < 0 || taps.back() >= num_layers)
    r.fail(
        kKey, fmt::format("ascending layers of the target in [0, {}]", num_layers - 1),
        list == nullptr ? "nothing, and the target is too small for the usual ones" : dump_json(*list).substr(0, 100));
  return r.status();
}

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

// What must be as the target has it.
Status check_sizes(ConfigReader& r, const ModelConfig& layer, const ModelInfo& target) {
  const auto same = [&](const char* key, int64_t found, int64_t expected) {
    if (found != expected) r.fail(key, fmt::format("{}, as its target has", expected), std::to_string(found));
  };
  same("num_hidden_layers", layer.num_layers, 1);
  same("vocab_size", layer.vocab, target.vocab);
  same("hidden_size", layer.hidden, target.hidden);
  same("target_hidden_size", r.integer("target_hidden_size", 1, 1 << 20, target.hidden), target.hidden);
  const int64_t drafted = r.integer("draft_vocab_size", 1, 1 << 24, target.vocab);
  if (drafted != target.vocab)
    r.fail("draft_vocab_size", fmt::format("{}, the whole vocabulary: this version reads no d2t", target.vocab),
           std::to_string(drafted));
  return r.status();
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
  TensorSpec embedding() const { return vocabulary("embed_tokens"); }
  TensorSpec head() const { return vocabulary("lm_head"); }
  TensorSpec last_norm() const { return norm("norm", c_.layer.hidden); }
  TensorSpec embedding_norm() const { return layer_.attention_norm(0); }
  TensorSpec hidden_norm() const { return layer_.vector(0, "hidden_norm", c_.layer.hidden); }

  std::vector<TensorSpec> all(OwnEmbeddings own) const {
    std::vector<TensorSpec> out = {fuse(), last_norm(), embedding_norm(), hidden_norm()};
    const auto add = [&](const std::vector<TensorSpec>& specs) { out.insert(out.end(), specs.begin(), specs.end()); };
    add(tap_norms());
    add(layer_.mla(0));
    add(layer_.feed_forward(0));
    if (own.input) out.push_back(embedding());
    if (own.output) out.push_back(head());
    return out;
  }

 private:
  static TensorSpec norm(std::string name, int64_t length) {
    return {std::move(name), TensorRole::kNorm, Shard::whole(), 1, length};
  }
  TensorSpec vocabulary(const char* name) const {
    return {name, TensorRole::kMatrix, Shard::vocabulary(), c_.layer.vocab, c_.layer.hidden};
  }
  const Eagle3Config& c_;
  const TensorNames layer_;
};

Result<std::unique_ptr<TensorSource>> open_source(const LoadOptions& options) {
  if (options.format == LoadFormat::kDummy) return make_dummy_source(available_cores());
  return open_file_source(options.path, options.language_model_only);
}

Status check(std::span<const TensorSpec> specs, const ModelConfig& layer, const Model& target,
             const WeightPacker& packer, TensorSource& tensors) {
  RETURN_IF_ERROR(check_cache(layer, target));
  RETURN_IF_ERROR(check_limits(layer, packer.limits(), packer.name()));
  RETURN_IF_ERROR(tensors.verify(specs, layer));
  return check_shards(specs, tensors, layer.ranks.size);
}

Result<Json> read_json(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string text, read_in_folder(folder, "config.json", kMaxConfigBytes));
  Result<Json> json = parse_json(text);
  if (json.ok() && json->is_object()) return json;
  return bad_input(fmt::format("{}/config.json: {}", folder, json.ok() ? "expected an object" : json.error().message));
}

// The file and what is wrong in it.
Error of_draft(const std::string& folder, const Error& error) {
  return Error(error.code, fmt::format("draft {}: {}", folder, error.message), error.field);
}

}  // namespace

Result<Eagle3Config> parse_eagle3_config(const Json& config, const ModelInfo& target) {
  ConfigReader r(config, "config.json");
  const Json* names = r.find("architectures");
  const std::string name = names != nullptr ? dump_json(*names).substr(0, 100) : "nothing";
  if (name != "[\"Eagle3DeepseekV2ForCausalLM\"]" && name != "[\"Eagle3DeepseekV3ForCausalLM\"]")
    r.fail("architectures", "Eagle3DeepseekV2ForCausalLM, a draft with latent attention", name);
  RETURN_IF_ERROR(r.status());
  Eagle3Config c;
  ASSIGN_OR_RETURN(c.layer, parse_config(as_dense_layer(config), Json()));
  c.layer.architecture = "Eagle3DeepseekV2ForCausalLM";
  RETURN_IF_ERROR(check_sizes(r, c.layer, target));
  c.layer.draft_attention_width = 2 * c.layer.hidden;
  const Json* nested = r.find("eagle_config");
  const Json* list = nested != nullptr ? nested->find("eagle_aux_hidden_state_layer_ids") : nullptr;
  if (list == nullptr) list = r.find("eagle_aux_hidden_state_layer_ids");
  RETURN_IF_ERROR(read_taps(r, list, target, c.taps));
  c.norms_each_tap = r.boolean("fc_norm", false);
  c.norms_all_taps = r.boolean("norm_before_fc", false);
  c.norms_before_residual = r.boolean("norm_before_residual", false);
  c.hands_on_normed = r.boolean("norm_output", false);
  if (c.norms_each_tap && c.norms_all_taps) r.fail("fc_norm", "false beside norm_before_fc", "true");
  if (r.number("logit_scale", 1e-6, 1e6, 1.0) != 1.0) r.fail("logit_scale", "1", "another number");
  RETURN_IF_ERROR(r.status());
  return c;
}

std::vector<TensorSpec> eagle3_tensors(const Eagle3Config& config, OwnEmbeddings own) {
  return Names(config).all(own);
}

Result<std::unique_ptr<Eagle3>> Eagle3::load(const LoadOptions& options, const Model& target, Ops& ops) {
  return make(options, target, ops, Numbers::kRead);
}

Result<std::unique_ptr<Eagle3>> Eagle3::size(const LoadOptions& options, const Model& target, WeightPacker& sizes) {
  return make(options, target, sizes, Numbers::kNone);
}

Result<std::unique_ptr<Eagle3>> Eagle3::make(const LoadOptions& options, const Model& target, WeightPacker& packer,
                                             Numbers numbers) {
  const auto named = [&](const Error& error) { return of_draft(options.path, error); };
  const Result<Json> json = read_json(options.path);
  if (!json.ok()) return named(json.error());
  Result<Eagle3Config> config = parse_eagle3_config(*json, target.info());
  if (!config.ok()) return named(config.error());
  config->layer.ranks = options.ranks;
  Result<std::unique_ptr<TensorSource>> source = open_source(options);
  if (!source.ok()) return named(source.error());
  TensorSource& tensors = **source;
  if (tensors.has("d2t")) return named(bad_input("tensor d2t: this version drafts over the whole vocabulary", "d2t"));
  config->layer.draft_layer = tensors.has("layers.0.hidden_norm.weight") ? "layers.0" : "midlayer";
  std::unique_ptr<Eagle3> draft(new Eagle3(std::move(*config), target));
  const OwnEmbeddings own{.input = tensors.has("embed_tokens.weight"), .output = tensors.has("lm_head.weight")};
  const ModelConfig& layer = draft->config_.layer;
  const std::vector<TensorSpec> specs = eagle3_tensors(draft->config_, own);
  const Status status = check(specs, layer, target, packer, tensors);
  if (!status.ok()) return named(status.error());
  const ShapeSource shapes(tensors);
  const TensorSource& numbered = numbers == Numbers::kRead ? tensors : static_cast<const TensorSource&>(shapes);
  const CacheScales no_scales;
  WeightReader reader(numbered, packer, options.ranks, part_bytes(specs, tensors, options.ranks), no_scales,
                      options.progress);
  draft->read(reader, own);
  return draft;
}

void Eagle3::read(WeightReader& reader, OwnEmbeddings own) {
  const Names names(config_);
  if (own.input) own_embedding_ = reader.embed(names.embedding());
  if (own.output) own_head_ = reader.linear(names.head());
  embedding_ = own.input ? &own_embedding_ : &target_.embedding();
  head_ = own.output ? &own_head_ : &target_.head();
  for (const TensorSpec& spec : names.tap_norms()) tap_norms_.push_back(reader.vector(spec));
  fuse_ = reader.linear(names.fuse());
  embedding_norm_ = reader.vector(names.embedding_norm());
  hidden_norm_ = reader.vector(names.hidden_norm());
  norm_ = reader.vector(names.last_norm());
  mla_ = read_mla(config_.layer, 0, reader);
  mlp_ = read_feed_forward(config_.layer, 0, reader);
  weight_bytes_ = reader.packed_bytes();
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

Eagle3::Output Eagle3::forward(const Batch& batch, const Tensor& hidden, Ops& ops, const PagePool& pool) const {
  const auto eps = static_cast<float>(config_.layer.rms_norm_eps);
  const int64_t width = config_.layer.hidden, rows = std::ssize(batch.logit_rows);
  const Tensor in = ops.arena().tensor(ops.wide_dtype(), hidden.rows, 2 * width);  // [embedding | hidden state]
  ops.rms_norm(ops.embed(*embedding_, batch.tokens), embedding_norm_, eps, in.columns(0, width));
  ops.rms_norm(hidden, hidden_norm_, eps, in.columns(width, width));
  Tensor x = hidden;  // the residual stream
  if (config_.norms_before_residual) x = ops.rms_norm(hidden, hidden_norm_, eps, DType::kF32);
  const LatentLayer cache = pool.latent_layer(pool.layout.latent().layers - 1);
  const Tensor q = ops.mla_in(in, mla_, batch, cache);
  if (rows == 0) return {};
  Tensor o = ops.mla_attend(q, mla_.up, mla_.shape, batch, cache);
  if (rows < x.rows) {
    o = ops.gather_rows(o, batch.logit_rows);
    x = ops.gather_rows(x, batch.logit_rows);
  }
  const Tensor m = ops.add_norm(x, ops.linear(o, mla_.o, DType::kF32), mlp_.norm, eps);
  const Tensor h = ops.arena().tensor(ops.wide_dtype(), rows, width);
  ops.add_norm(x, ops.dense_mlp(m, mlp_.dense), norm_, eps, h);
  return {.logits = ops.logits(h, *head_),
          .hidden = config_.hands_on_normed ? ops.rms_norm(x, norm_, eps, DType::kF32) : x};
}

}  // namespace perigee

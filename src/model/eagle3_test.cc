// A draft against its definition in plain loops of doubles, its passes in pieces, and what is refused.
#include "model/eagle3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "base/rng.h"
#include "model/dummy.h"
#include "model/eagle3_testing.h"

namespace perigee {
namespace {

using Vec = std::vector<double>;

Vec rms(const Vec& x, const Vec& w, double eps) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  const double scale = 1 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
  Vec out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * w[i];
  return out;
}

// The stored numbers of a tensor, row-major.
Vec numbers(const TensorSource& source, const TensorSpec& spec) {
  if (is_vector(spec.role)) {
    const std::vector<float> v = source.vector(spec);
    return {v.begin(), v.end()};
  }
  const RawWeight w = source.matrix(spec);
  Vec out(static_cast<size_t>(spec.out * spec.in));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<double>(bf16_to_f32(static_cast<const uint16_t*>(w.matrix.data)[i]));
  return out;
}

Vec times(const Vec& w, const Vec& x) {
  Vec out(w.size() / x.size());
  for (size_t o = 0; o < out.size(); ++o)
    for (size_t i = 0; i < x.size(); ++i) out[o] += w[o * x.size() + i] * x[i];
  return out;
}

Vec joined(Vec a, const Vec& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Vec part(const Vec& x, int64_t first, int64_t count) {
  return {x.begin() + first, x.begin() + first + count};
}

// Interleaved pairs.
void rotate(Vec& x, int64_t position, double theta) {
  const auto dim = static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); i += 2) {
    const double angle = static_cast<double>(position) * std::pow(theta, -static_cast<double>(i) / dim);
    const double a = x[i], b = x[i + 1];
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + 1] = a * std::sin(angle) + b * std::cos(angle);
  }
}

// Pairs (i, i + dim / 2).
void rotate_halves(Vec& x, int64_t position, double theta) {
  const size_t half = x.size() / 2;
  Vec pairs;
  for (size_t i = 0; i < half; ++i) pairs.insert(pairs.end(), {x[i], x[i + half]});
  rotate(pairs, position, theta);
  for (size_t i = 0; i < half; ++i) {
    x[i] = pairs[2 * i];
    x[i + half] = pairs[2 * i + 1];
  }
}

// A draft whose rows are run one by one.
class Plain {
 public:
  Plain(const Eagle3Config& config, const ModelConfig& target) : c_(config), l_(config.layer) {
    const auto source = make_dummy_source(1);
    const std::vector<TensorSpec> specs = eagle3_tensors(config, {});
    CHECK(source->verify(specs, l_).ok());
    for (const TensorSpec& spec : specs) w_[spec.name] = numbers(*source, spec);
    w_["embed"] = numbers(*source, TensorNames(target).embed());
    w_["head"] = numbers(*source, TensorNames(target).head());
  }

  Vec fuse(Vec taps) const {
    const int64_t h = l_.hidden;
    if (c_.norms_all_taps) taps = rms(taps, at("input_norm"), l_.rms_norm_eps);
    if (c_.norms_each_tap) {
      Vec normed;
      for (size_t i = 0; i < c_.taps.size(); ++i)
        normed = joined(normed, rms(part(taps, static_cast<int64_t>(i) * h, h), at("fc_norm." + std::to_string(i)),
                                    l_.rms_norm_eps));
      taps = normed;
    }
    return times(at("fc"), taps);
  }

  // The row at `position`; -> its logits and what the next pass reads.
  std::pair<Vec, Vec> run(const Vec& hidden, int32_t token, int64_t position) {
    const double eps = l_.rms_norm_eps;
    const Vec n = rms(hidden, layer("hidden_norm"), eps);
    const Vec in = joined(rms(part(at("embed"), token * l_.hidden, l_.hidden), layer("input_layernorm"), eps), n);
    Vec x = c_.norms_before_residual ? n : hidden;
    add(x, times(layer("self_attn.o_proj"), c_.has_latents() ? attend(in, position) : attend_full(in, position)));
    const Vec m = rms(x, layer("post_attention_layernorm"), eps);
    Vec gate = times(layer("mlp.gate_proj"), m);
    const Vec up = times(layer("mlp.up_proj"), m);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    add(x, times(layer("mlp.down_proj"), gate));
    const Vec y = rms(x, at("norm"), eps);
    return {times(at("head"), y), c_.hands_on_normed ? y : x};
  }

 private:
  const Vec& at(const std::string& name) const { return w_.at(name); }
  const Vec& layer(const std::string& name) const { return w_.at(l_.draft_layer + "." + name); }
  static void add(Vec& x, const Vec& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Vec attend(const Vec& in, int64_t position) {
    const double eps = l_.latent_norm_eps;
    const Vec q = times(layer("self_attn.q_b_proj"),
                        rms(times(layer("self_attn.q_a_proj"), in), layer("self_attn.q_a_layernorm"), eps));
    const Vec kv = times(layer("self_attn.kv_a_proj_with_mqa"), in);
    Vec k_rope = part(kv, l_.kv_lora, l_.rope);
    rotate(k_rope, position, l_.rope_config.theta);
    latents_.resize(static_cast<size_t>(position));  // rows from there on are run again
    latents_.push_back({rms(part(kv, 0, l_.kv_lora), layer("self_attn.kv_a_layernorm"), eps), k_rope});
    Vec out;
    for (int64_t head = 0; head < l_.heads; ++head) out = joined(out, attend_head(q, head, position));
    return out;
  }

  Vec attend_head(const Vec& q, int64_t head, int64_t position) const {
    const int64_t width = l_.nope + l_.value, dim = l_.nope + l_.rope;
    const Vec q_nope = part(q, head * dim, l_.nope);
    Vec q_rope = part(q, head * dim + l_.nope, l_.rope);
    rotate(q_rope, position, l_.rope_config.theta);
    const Vec up = part(layer("self_attn.kv_b_proj"), head * width * l_.kv_lora, width * l_.kv_lora);
    Vec out(static_cast<size_t>(l_.value));
    double total = 0;
    for (const auto& [latent, k_rope] : latents_) {
      const Vec kv = times(up, latent);
      const double score = std::inner_product(q_nope.begin(), q_nope.end(), kv.begin(), 0.0) +
                           std::inner_product(q_rope.begin(), q_rope.end(), k_rope.begin(), 0.0);
      const double share = std::exp(score / std::sqrt(static_cast<double>(dim)));
      total += share;
      for (size_t i = 0; i < out.size(); ++i) out[i] += share * kv[static_cast<size_t>(l_.nope) + i];
    }
    for (double& v : out) v /= total;
    return out;
  }

  Vec attend_full(const Vec& in, int64_t position) {
    const int64_t dim = c_.full.dim, group = c_.full.heads / c_.full.kv_heads;
    Vec q = times(layer("self_attn.q_proj"), in), k = times(layer("self_attn.k_proj"), in), keys;
    for (int64_t head = 0; head < c_.full.kv_heads; ++head) {
      Vec key = part(k, head * dim, dim);
      rotate_halves(key, position, l_.rope_config.theta);
      keys = joined(keys, key);
    }
    latents_.resize(static_cast<size_t>(position));
    latents_.push_back({times(layer("self_attn.v_proj"), in), keys});
    Vec out;
    for (int64_t head = 0; head < c_.full.heads; ++head) {
      Vec query = part(q, head * dim, dim), mean(static_cast<size_t>(dim));
      rotate_halves(query, position, l_.rope_config.theta);
      double total = 0;
      for (const auto& [values, all_keys] : latents_) {
        const Vec key = part(all_keys, head / group * dim, dim), value = part(values, head / group * dim, dim);
        const double share = std::exp(std::inner_product(query.begin(), query.end(), key.begin(), 0.0) /
                                      std::sqrt(static_cast<double>(dim)));
        total += share;
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += share * value[i];
      }
      for (double& v : mean) v /= total;
      out = joined(out, mean);
    }
    return out;
  }

  const Eagle3Config& c_;
  const ModelConfig& l_;
  std::map<std::string, Vec> w_;
  std::vector<std::pair<Vec, Vec>> latents_;  // of each position, or values, and its rotated key or keys
};

double most_apart(const Vec& a, const std::vector<float>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(a[i] - static_cast<double>(b[i])));
  return most;
}

std::vector<int32_t> some_ids(size_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(96));
  return ids;
}

using MakeConfig = Json (*)(const std::string& keys);

class Eagle3Kinds : public testing::TestWithParam<MakeConfig> {};
INSTANTIATE_TEST_SUITE_P(, Eagle3Kinds, testing::Values(draft_config, llama_draft_config),
                         [](const auto& info) { return info.index == 0 ? "Latents" : "Llama"; });

// Every key that changes the arithmetic, on a target with latent attention alone and on a hybrid.
TEST_P(Eagle3Kinds, AreAsDefinedInPiecesAndOverPasses) {
  for (const char* keys : {"", R"("fc_norm": true, "norm_output": true,)", R"("norm_before_fc": true,)",
                           R"("norm_before_residual": true,)"})
    for (const bool hybrid : {false, true}) {
      SCOPED_TRACE(std::string(keys) + (hybrid ? " hybrid" : ""));
      DraftWorld world(hybrid ? tiny_hybrid_config() : tiny_config(), GetParam()(keys));
      Plain plain(world.draft().config(), world.target_config());
      const std::vector<int32_t> ids = some_ids(70, 1);  // beyond a block
      double most = 0;
      for (int32_t begin = 0; begin < 66; begin += 22) {
        const DraftWorld::Pass pass = world.first_pass(ids, begin, begin + 22);
        for (int32_t i = 0; i < 22; ++i) {
          const auto [logits, hidden] = plain.run(plain.fuse(pass.taps[static_cast<size_t>(i)]),
                                                  ids[static_cast<size_t>(begin + i + 1)], begin + i);
          most = std::max(most, most_apart(logits, pass.logits[static_cast<size_t>(i)]));
          most = std::max(most, most_apart(hidden, pass.hidden[static_cast<size_t>(i)]));
        }
      }
      std::vector<float> hidden = world.last_hidden();
      for (int32_t position = 66; position < 69; ++position) {
        const Vec before(hidden.begin(), hidden.end());
        const DraftWorld::Pass pass = world.next_pass(hidden, ids[static_cast<size_t>(position + 1)], position);
        most = std::max(most, most_apart(plain.run(before, ids[static_cast<size_t>(position + 1)], position).first,
                                         pass.logits[0]));
        hidden = pass.hidden[0];
      }
      EXPECT_LE(most, 2e-5);
    }
}

std::string why_refused(const Json& config, ModelInfo target = {.vocab = 96, .hidden = 64, .num_layers = 3}) {
  const auto parsed = parse_eagle3_config(config, target);
  return parsed.ok() ? "accepted" : parsed.error().message;
}

TEST(Eagle3, RefusalsNameTheKey) {
  const auto with = [](const char* keys) { return draft_config(keys); };
  const auto changed = [](const char* key, Json value) {
    Json config = draft_config("");
    config.set(key, std::move(value));
    return config;
  };
  EXPECT_EQ(why_refused(draft_config("")), "accepted");
  for (const auto& [config, part] : std::vector<std::pair<Json, std::string>>{
           {changed("architectures", Json(Json::Array{Json("LlamaForCausalLM")})), "architectures"},
           {changed("vocab_size", int64_t{95}), "vocab_size"},
           {changed("hidden_size", int64_t{32}), "hidden_size"},
           {changed("num_hidden_layers", int64_t{2}), "num_hidden_layers"},
           {with(R"("draft_vocab_size": 97,)"), "draft_vocab_size"},
           {with(R"("target_hidden_size": 128,)"), "target_hidden_size"},
           {with(R"("logit_scale": 0.5,)"), "logit_scale"},
           {with(R"("fc_norm": true, "norm_before_fc": true,)"), "fc_norm"},
           {changed("eagle_config", json(R"({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})")), "layer_ids"},
           {changed("eagle_config", json(R"({"eagle_aux_hidden_state_layer_ids": [2, 0]})")), "layer_ids"},
           {changed("eagle_config", json(R"({"eagle_aux_hidden_state_layer_ids": []})")), "layer_ids"},
           {changed("eagle_config", Json()), "layer_ids"}}) {
    const std::string why = why_refused(config);
    EXPECT_NE(why.find(part), std::string::npos) << part << ": " << why;
  }
}

TEST(Eagle3, RefusalsOfLlamasKindNameTheKey) {
  EXPECT_EQ(why_refused(llama_draft_config("")), "accepted");
  for (const auto& [key, value] : std::map<const char*, Json>{{"num_key_value_heads", Json(int64_t{3})},
                                                              {"head_dim", Json(int64_t{13})},
                                                              {"attention_bias", Json(true)},
                                                              {"rope_scaling", json(R"({"rope_type": "llama3"})")}}) {
    Json config = llama_draft_config("");
    config.set(key, value);
    const std::string why = why_refused(config), part = key == std::string("rope_scaling") ? "rope_type" : key;
    EXPECT_NE(why.find(part), std::string::npos) << part << ": " << why;
  }
}

// Lists that begin with 1 name layers whose outputs are read; without a list the usual three are.
TEST(Eagle3, TappedLayersAreThoseThatAreEntered) {
  const auto taps = [](Json config) {
    return parse_eagle3_config(config, {.vocab = 96, .hidden = 64, .num_layers = 61})->taps;
  };
  Json config = draft_config("");
  EXPECT_EQ(taps(config), (std::vector<int32_t>{0, 1, 2}));
  config.set("eagle_config", json(R"({"eagle_aux_hidden_state_layer_ids": [1, 29, 57]})"));
  EXPECT_EQ(taps(config), (std::vector<int32_t>{2, 30, 58}));
  config.set("eagle_config", Json());
  EXPECT_EQ(taps(config), (std::vector<int32_t>{2, 30, 58}));
  config.set("eagle_aux_hidden_state_layer_ids", json("[2, 30, 58]"));
  EXPECT_EQ(taps(config), (std::vector<int32_t>{2, 30, 58}));
}

TEST(Eagle3, FilesAreRefusedByTheTensor) {
  const DraftWorld world(tiny_config(), draft_config(""));
  const auto source = make_dummy_source(1);
  std::vector<TensorSpec> specs = eagle3_tensors(world.draft().config(), {});
  ASSERT_TRUE(source->verify(specs, world.draft().config().layer).ok());
  const std::vector<StoredTensor> all = stored_tensors(*source, specs);
  const auto load = [&](std::vector<StoredTensor> tensors, Json config) -> std::string {
    const TempFolder folder;
    folder.write("config.json", dump_json(config));
    folder.write("model.safetensors", safetensors_bytes(tensors));
    const auto draft = Eagle3::load({.path = folder.path()}, world.target(), world.ops());
    return draft.ok() ? "loaded" : draft.error().message;
  };
  EXPECT_EQ(load(all, draft_config("")), "loaded");
  std::vector<StoredTensor> renamed = all;
  for (StoredTensor& tensor : renamed)
    if (tensor.name.starts_with("midlayer.")) tensor.name.replace(0, 8, "layers.0");
  EXPECT_EQ(load(renamed, draft_config("")), "loaded");
  std::vector<StoredTensor> fewer = all;
  fewer.erase(fewer.begin());
  EXPECT_NE(load(fewer, draft_config("")).find("fc.weight"), std::string::npos) << load(fewer, draft_config(""));
  std::vector<StoredTensor> mapped = all;
  mapped.push_back({"d2t", "I64", {1}, std::string(8, '\0')});
  EXPECT_NE(load(mapped, draft_config("")).find("tensor d2t"), std::string::npos);
  mapped.back() = {"t2d", "BOOL", {96}, std::string(96, '\1')};
  EXPECT_EQ(load(mapped, draft_config("")), "loaded");
  std::vector<StoredTensor> cut = all;
  cut[0].shape[1] -= 64;
  cut[0].bytes.resize(cut[0].bytes.size() / 3 * 2);
  EXPECT_NE(load(cut, draft_config("")).find("fc.weight"), std::string::npos) << load(cut, draft_config(""));
  Json narrow = draft_config("");
  narrow.set("kv_lora_rank", int64_t{16});
  EXPECT_NE(load(all, narrow).find("kv_lora_rank"), std::string::npos);
}

// A draft over a part of the vocabulary has its own head and a map of ids.
TEST(Eagle3, DraftedIdsAreTheTargets) {
  const std::string keys = R"("draft_vocab_size": 32,)";
  const DraftWorld world(tiny_config(), llama_draft_config(keys));
  EXPECT_EQ(world.draft().target_id(31), 31) << "made-up offsets are zeros";
  const auto source = make_dummy_source(1);
  const std::vector<TensorSpec> specs = eagle3_tensors(world.draft().config(), {.output = true});
  ASSERT_TRUE(source->verify(specs, world.draft().config().layer).ok());
  const std::vector<StoredTensor> without = stored_tensors(*source, specs);
  const auto load = [&](const StoredTensor& ids) {
    const TempFolder folder;
    folder.write("config.json", dump_json(llama_draft_config(keys)));
    std::vector<StoredTensor> all = without;
    all.push_back(ids);
    folder.write("model.safetensors", safetensors_bytes(all));
    return Eagle3::load({.path = folder.path()}, world.target(), world.ops());
  };
  const auto good = load(each_third_id(32));
  ASSERT_TRUE(good.ok()) << good.error().message;
  EXPECT_EQ((*good)->target_id(31), 93);
  StoredTensor beyond = each_third_id(32);
  beyond.bytes[31 * 8] = static_cast<char>(96 - 31);
  for (const auto& [ids, part] :
       std::vector<std::pair<StoredTensor, std::string>>{{each_third_id(31), "tensor d2t: expected I64 [32]"},
                                                         {each_third_id(33), "tensor d2t: expected I64 [32]"},
                                                         {beyond, "tensor d2t: element 31: expected an offset in"},
                                                         {{"t2d", "BOOL", {1}, "x"}, "tensor d2t is missing"}}) {
    const auto bad = load(ids);
    ASSERT_FALSE(bad.ok()) << part;
    EXPECT_NE(bad.error().message.find(part), std::string::npos) << bad.error().message;
  }
}

}  // namespace
}  // namespace perigee

#include "model/eagle3_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/model_folder.h"
#include "model/config_reader.h"

namespace perigee {
namespace {

constexpr size_t kMaxConfigBytes = 4u << 20;
constexpr int64_t kMaxTaps = 16;

// Kinds of drafts by their attention.
struct Kind {
  const char* architecture;
  bool latents;  // like its target's, else Llama's
};
constexpr Kind kKinds[] = {{"Eagle3DeepseekV2ForCausalLM", true},
                           {"Eagle3DeepseekV3ForCausalLM", true},
                           {"LlamaForCausalLMEagle3", false},
                           {"Eagle3LlamaForCausalLM", false}};

// A draft's layer is a dense layer of the DeepSeek-V3 family, and is read as one: keys of experts mean nothing, nor do
// those of latent attention where there is none.
Json as_dense_layer(Json config, const Kind& kind) {
  config.set("architectures", Json(Json::Array{Json("DeepseekV3ForCausalLM")}));
  config.set("first_k_dense_replace", int64_t{1});
  for (const char* key : {"moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"})
    config.set(key, int64_t{1});
  config.set("norm_topk_prob", true);
  config.set("topk_method", "greedy");
  if (kind.latents) return config;
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "v_head_dim"}) config.set(key, int64_t{1});
  config.set("qk_rope_head_dim", int64_t{2});
  for (const char* key : {"q_lora_rank", "num_key_value_heads"}) config.set(key, Json());
  return config;
}

void read_full_attention(ConfigReader& r, ModelConfig& layer, FullShape& full) {
  layer.q_lora = layer.kv_lora = layer.nope = layer.rope = layer.value = 0;
  full.heads = layer.heads;
  full.kv_heads = r.integer("num_key_value_heads", 1, 4096, full.heads);
  full.dim = r.integer("head_dim", 2, 65536, std::max<int64_t>(layer.hidden / full.heads, 2));
  full.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(full.dim)));
  if (full.heads % full.kv_heads != 0)
    r.fail("num_key_value_heads", fmt::format("a divisor of the {} heads", full.heads), std::to_string(full.kv_heads));
  if (full.dim % 2 != 0) r.fail("head_dim", "an even number", std::to_string(full.dim));
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

// What must be as the target has it.
Status check_sizes(ConfigReader& r, const Eagle3Config& c, const ModelInfo& target) {
  const auto same = [&](const char* key, int64_t found, int64_t expected) {
    if (found != expected) r.fail(key, fmt::format("{}, as its target has", expected), std::to_string(found));
  };
  same("num_hidden_layers", c.layer.num_layers, 1);
  same("vocab_size", c.layer.vocab, target.vocab);
  same("hidden_size", c.layer.hidden, target.hidden);
  same("target_hidden_size", r.integer("target_hidden_size", 1, 1 << 20, target.hidden), target.hidden);
  if (c.vocab > target.vocab)
    r.fail("draft_vocab_size", fmt::format("at most the target's vocabulary of {}", target.vocab),
           std::to_string(c.vocab));
  return r.status();
}

}  // namespace

Result<Json> read_draft_json(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string text, read_in_folder(folder, "config.json", kMaxConfigBytes));
  Result<Json> json = parse_json(text);
  if (json.ok() && json->is_object()) return json;
  return bad_input(fmt::format("{}/config.json: {}", folder, json.ok() ? "expected an object" : json.error().message));
}

Result<Eagle3Config> parse_eagle3_config(const Json& config, const ModelInfo& target) {
  ConfigReader r(config, "config.json");
  const Json* names = r.find("architectures");
  const std::string name = names != nullptr ? dump_json(*names).substr(0, 100) : "nothing";
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [&](const Kind& k) { return name == fmt::format("[\"{}\"]", k.architecture); });
  if (kind == std::end(kKinds)) {
    r.fail("architectures", "Eagle3DeepseekV2ForCausalLM or LlamaForCausalLMEagle3", name);
    return r.status().error();
  }
  Eagle3Config c;
  ASSIGN_OR_RETURN(c.layer, parse_config(as_dense_layer(config, *kind), Json()));
  c.layer.architecture = kind->architecture;
  c.vocab = r.integer("draft_vocab_size", 1, 1 << 24, target.vocab);
  RETURN_IF_ERROR(check_sizes(r, c, target));
  if (!kind->latents) read_full_attention(r, c.layer, c.full);
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

}  // namespace perigee

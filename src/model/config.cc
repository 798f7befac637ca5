#include "model/config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/model_folder.h"
#include "model/config_reader.h"

namespace perigee {
namespace {

constexpr int64_t kMaxDim = 1 << 20;      // of any one dimension but the vocabulary: far above every known model
constexpr int64_t kMaxExperts = 1 << 20;  // in all layers
constexpr size_t kMaxConfigBytes = 4u << 20;

struct Architecture {
  const char* name;
  const char* text_name;  // of the language model inside
  const char* prefix;     // of its tensors
};

constexpr Architecture kArchitectures[] = {
    {"DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM", ""},
    {"DeepseekV2ForCausalLM", "DeepseekV2ForCausalLM", ""},
    {"Glm4MoeLiteForCausalLM", "Glm4MoeLiteForCausalLM", ""},
    {"KimiLinearForCausalLM", "KimiLinearForCausalLM", ""},
    {"KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "language_model."},
};

// What differs in spelling between the families.
struct Keys {
  const char *max_positions, *num_experts, *top_k, *num_shared_experts, *num_groups, *normalize_top_k, *score;
};
constexpr Keys kDeepseekKeys = {
    "max_position_embeddings", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group",
    "norm_topk_prob",          "scoring_func"};
constexpr Keys kKimiLinearKeys = {"model_max_length",          "num_experts",      "num_experts_per_token",
                                  "num_shared_experts",        "num_expert_group", "moe_renormalize",
                                  "moe_router_activation_func"};

bool is_kimi_linear(const ModelConfig& c) {
  return c.architecture == "KimiLinearForCausalLM";
}

const Keys& keys_of(const ModelConfig& c) {
  return is_kimi_linear(c) ? kKimiLinearKeys : kDeepseekKeys;
}

Result<Architecture> find_architecture(const Json& config) {
  const Json* list = config.find("architectures");
  std::string found = "nothing";
  if (list != nullptr && list->is_array() && !list->as_array().empty() && list->as_array()[0].is_string()) {
    found = list->as_array()[0].as_string();
    for (const Architecture& a : kArchitectures)
      if (found == a.name) return a;
  }
  return bad_input(fmt::format("config.json: architectures: found {}, supported are {}", found.substr(0, 100),
                               supported_architectures()),
                   "architectures");
}

void read_sizes(ConfigReader& r, ModelConfig& c) {
  c.vocab = r.integer("vocab_size", 1, 1 << 24);
  c.hidden = r.integer("hidden_size", 1, kMaxDim);
  c.num_layers = r.integer("num_hidden_layers", 1, 4096);
  c.heads = r.integer("num_attention_heads", 1, 4096);
  const int64_t kv_heads = r.integer("num_key_value_heads", 1, 4096, c.heads);
  if (kv_heads != c.heads)
    r.fail("num_key_value_heads", fmt::format("{}, the number of heads", c.heads), std::to_string(kv_heads));
  c.q_lora = r.integer("q_lora_rank", 1, kMaxDim, 0);
  c.kv_lora = r.integer("kv_lora_rank", 1, 65536);
  c.nope = r.integer("qk_nope_head_dim", 1, 65536);
  c.rope = r.integer("qk_rope_head_dim", 2, 65536);
  if (c.rope % 2 != 0) r.fail("qk_rope_head_dim", "an even number", std::to_string(c.rope));
  c.value = r.integer("v_head_dim", 1, 65536);
  c.max_positions = r.integer(keys_of(c).max_positions, 1, 1 << 28);
  c.rms_norm_eps = r.number("rms_norm_eps", 0, 1);
  if (r.text("hidden_act", "silu") != "silu") r.fail("hidden_act", "silu", r.text("hidden_act"));
  if (r.boolean("attention_bias", false)) r.fail("attention_bias", "false", "true");
  if (r.boolean("tie_word_embeddings", false)) r.fail("tie_word_embeddings", "false", "true");
}

// How many layers at the front have a dense MLP: first_k_dense_replace, or mlp_layer_types (GLM), one word a layer.
int64_t read_first_dense(ConfigReader& r, int64_t num_layers) {
  const Json* types = r.find("mlp_layer_types");
  if (types == nullptr || r.find("first_k_dense_replace") != nullptr)
    return r.integer("first_k_dense_replace", 0, num_layers);
  int64_t dense = 0;
  const bool whole = types->is_array() && std::ssize(types->as_array()) == num_layers;
  while (whole && dense < num_layers && types->as_array()[dense] == Json("dense")) ++dense;
  bool sparse = whole;
  for (int64_t i = dense; sparse && i < num_layers; ++i) sparse = types->as_array()[i] == Json("sparse");
  if (!sparse)
    r.fail("mlp_layer_types", fmt::format("{} words, \"dense\" and then \"sparse\"", num_layers),
           dump_json(*types).substr(0, 200));
  return dense;
}

// Experts are chosen from the best of several groups.
void read_groups(ConfigReader& r, ModelConfig& c) {
  const char* key = keys_of(c).num_groups;
  c.num_groups = r.integer(key, 1, c.num_experts, 1);
  c.top_groups = r.integer("topk_group", 1, c.num_groups, 1);
  if (c.num_experts % c.num_groups != 0)
    r.fail(key, fmt::format("a divisor of the {} experts", c.num_experts), std::to_string(c.num_groups));
  if (c.num_groups > 1 && c.num_experts / c.num_groups < 2)
    r.fail(key, "groups of at least two experts", fmt::format("{} groups of {}", c.num_groups, c.num_experts));
  if (c.top_k > c.num_experts / c.num_groups * c.top_groups)
    r.fail(keys_of(c).top_k, fmt::format("at most the experts of {} groups", c.top_groups), std::to_string(c.top_k));
}

void read_mlp(ConfigReader& r, ModelConfig& c) {
  const Keys& keys = keys_of(c);
  const bool v2 = c.architecture == "DeepseekV2ForCausalLM";
  c.first_dense = read_first_dense(r, c.num_layers);
  c.moe_layer_freq = r.integer("moe_layer_freq", 1, 4096, 1);
  c.inter = r.integer("intermediate_size", 1, kMaxDim);
  c.moe_inter = r.integer("moe_intermediate_size", 1, kMaxDim);
  // The product bounds what checking the tensor list may cost; K2 has 23,424.
  c.num_experts = r.integer(keys.num_experts, 1, kMaxExperts / c.num_layers);
  c.top_k = r.integer(keys.top_k, 1, std::min<int64_t>(c.num_experts, 1024));
  c.num_shared_experts = r.integer(keys.num_shared_experts, 0, 1024, 0);
  c.normalize_top_k = r.boolean(keys.normalize_top_k);
  c.routed_scale = r.number("routed_scaling_factor", 0, 1e6);
  const std::string score = r.text(keys.score, v2 ? "softmax" : "sigmoid");
  if (score != "sigmoid" && score != "softmax") r.fail(keys.score, "sigmoid or softmax", score);
  c.score = score == "softmax" ? RouterScore::kSoftmax : RouterScore::kSigmoid;
  const std::string method = r.text("topk_method", v2 ? "greedy" : "noaux_tc");
  if (method != "noaux_tc" && method != "greedy") r.fail("topk_method", "noaux_tc or greedy", method);
  c.correction_bias = method == "noaux_tc";
  // The plain top-k knows no groups.
  if (method == "noaux_tc" && r.boolean("use_grouped_topk", true)) read_groups(r, c);
}

// Old style: rope_theta and rope_scaling; transformers 5: rope_parameters holds both.
Status read_rope(ConfigReader& r, const std::string& where, RopeConfig& rope) {
  const Json* parameters = r.find("rope_parameters");
  const Json* scaling = parameters != nullptr ? parameters : r.find("rope_scaling");
  if (scaling != nullptr && !scaling->is_object()) {
    r.fail(parameters != nullptr ? "rope_parameters" : "rope_scaling", "an object", scaling->type_name());
    return r.status();
  }
  if (parameters == nullptr || parameters->find("rope_theta") == nullptr)
    rope.theta = r.number("rope_theta", 1.0001, 1e12);
  if (!r.boolean("rope_interleave", true)) r.fail("rope_interleave", "true", "false");
  RETURN_IF_ERROR(r.status());
  if (scaling == nullptr) return r.status();
  ConfigReader s(*scaling, where + (parameters != nullptr ? ": rope_parameters" : ": rope_scaling"));
  if (parameters != nullptr) rope.theta = s.number("rope_theta", 1.0001, 1e12, rope.theta);
  const std::string type = s.text("rope_type", s.text("type", "default"));
  if (type == "default") return s.status();
  if (type != "yarn") s.fail("rope_type", "yarn or default", type);
  YarnConfig yarn;
  yarn.factor = s.number("factor", 1, 1e6);
  yarn.beta_fast = s.number("beta_fast", 1e-3, 1e6, 32.0);
  yarn.beta_slow = s.number("beta_slow", 1e-3, 1e6, 1.0);
  yarn.mscale = s.number("mscale", 0, 1e3, 1.0);
  yarn.mscale_all_dim = s.number("mscale_all_dim", 0, 1e3, 0.0);
  yarn.original_positions = s.integer("original_max_position_embeddings", 1, 1 << 28);
  rope.yarn = yarn;
  return s.status();
}

// Marks the layers of one list, which counts from 1, in `lists`: the name of the list that each layer is in.
Status read_layer_list(ConfigReader& r, const char* key, std::vector<const char*>& lists) {
  const Json* list = r.find(key);
  if (list == nullptr || !list->is_array()) {
    r.fail(key, "a list of layers, counted from 1", list == nullptr ? "nothing" : list->type_name());
    return r.status();
  }
  for (const Json& layer : list->as_array()) {
    if (!layer.is_int() || layer.as_int() < 1 || layer.as_int() > std::ssize(lists)) {
      r.fail(key, fmt::format("layers in [1, {}]", lists.size()), dump_json(layer).substr(0, 100));
      return r.status();
    }
    const char*& mark = lists[static_cast<size_t>(layer.as_int() - 1)];
    if (mark != nullptr)
      r.fail(key, "each layer once in one list", fmt::format("layer {}, which is in {} already", layer.as_int(), mark));
    mark = key;
  }
  return r.status();
}

struct KdaKeys {
  const char *heads, *dim, *conv;
};

void read_kda_shape(ConfigReader& r, const KdaKeys& keys, ModelConfig& c) {
  c.kda.heads = r.integer(keys.heads, 1, 4096);
  c.kda.dim = r.integer(keys.dim, 128, 128);  // this and four taps are what backends compute
  c.kda.conv = r.integer(keys.conv, 4, 4);
}

// One word a layer, as transformers 5 writes it.
Status read_layer_types(ConfigReader& r, ModelConfig& c) {
  const Json* types = r.find("layer_types");
  std::vector<bool> kda;
  bool known = types->is_array() && std::ssize(types->as_array()) == c.num_layers;
  for (int64_t i = 0; known && i < c.num_layers; ++i) {
    const Json& type = types->as_array()[static_cast<size_t>(i)];
    kda.push_back(type == Json("linear_attention"));
    known = kda.back() || type == Json("full_attention");
  }
  if (!known)
    r.fail("layer_types", fmt::format("{} words, \"linear_attention\" or \"full_attention\"", c.num_layers),
           dump_json(*types).substr(0, 200));
  if (!c.kda_layers.empty() && c.kda_layers != kda)
    r.fail("layer_types", "what linear_attn_config says", dump_json(*types).substr(0, 200));
  c.kda_layers = std::move(kda);
  return r.status();
}

// Kimi-Linear: which layers have which attention. The file says it; no period is assumed. Either linear_attn_config has
// the shape and lists of layers, or, as transformers 5 writes it, keys of the model itself and layer_types.
Status read_linear_attention(ConfigReader& text, const std::string& where, ModelConfig& c) {
  c.moe_names = {"block_sparse_moe", "w1", "w3", "w2"};
  c.rope_enabled = !text.boolean("mla_use_nope", true);  // transformers 5, which leaves the key out, never rotates
  const Json* linear = text.find("linear_attn_config");
  const bool types = text.find("layer_types") != nullptr;
  if (linear == nullptr && types) {
    read_kda_shape(text, {"linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"}, c);
    return read_layer_types(text, c);
  }
  if (linear == nullptr || !linear->is_object())
    text.fail("linear_attn_config", "an object", linear == nullptr ? "nothing" : linear->type_name());
  RETURN_IF_ERROR(text.status());
  ConfigReader r(*linear, where + ": linear_attn_config");
  read_kda_shape(r, {"num_heads", "head_dim", "short_conv_kernel_size"}, c);
  std::vector<const char*> lists(static_cast<size_t>(c.num_layers));
  RETURN_IF_ERROR(read_layer_list(r, "kda_layers", lists));
  RETURN_IF_ERROR(read_layer_list(r, "full_attn_layers", lists));
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i] == nullptr)
      r.fail("kda_layers", "each layer in this list or in full_attn_layers", fmt::format("layer {} in neither", i + 1));
    c.kda_layers.push_back(lists[i] != nullptr && lists[i] == std::string_view("kda_layers"));
  }
  RETURN_IF_ERROR(r.status());
  return types ? read_layer_types(text, c) : Status();
}

Status check_int4_group(const Json& group, const std::string& where) {
  const Json* weights = group.find("weights");
  if (weights == nullptr || !weights->is_object()) return bad_input(where + ": weights: expected an object");
  ConfigReader w(*weights, where + ": weights");
  w.integer("num_bits", 4, 4);
  w.integer("group_size", 32, 32);
  if (!w.boolean("symmetric", true)) w.fail("symmetric", "true", "false");
  if (w.text("strategy", "group") != "group") w.fail("strategy", "group", w.text("strategy"));
  if (w.text("type", "int") != "int") w.fail("type", "int", w.text("type"));
  if (w.find("actorder") != nullptr) w.fail("actorder", "null", "a value");
  return w.status();
}

Result<Quantization> read_int4(const Json& quant, ConfigReader& r, const std::string& where) {
  if (r.text("format", "") != "pack-quantized") r.fail("format", "pack-quantized", r.text("format", "nothing"));
  RETURN_IF_ERROR(r.status());
  const Json* groups = quant.find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->as_object().empty())
    return bad_input(where + ": config_groups: expected an object with a group");
  for (const Json::Member& group : groups->as_object())
    RETURN_IF_ERROR(check_int4_group(group.second, where + ": config_groups: " + group.first.substr(0, 100)));
  return Quantization::kInt4Group32;
}

Result<Quantization> read_fp8(const Json& quant, ConfigReader& r, const std::string& where) {
  if (r.text("fmt", "e4m3") != "e4m3") r.fail("fmt", "e4m3", r.text("fmt"));
  RETURN_IF_ERROR(r.status());
  const Json* block = quant.find("weight_block_size");
  if (block == nullptr || dump_json(*block) != "[128,128]")
    return bad_input(fmt::format("{}: weight_block_size: expected [128,128], found {}", where,
                                 block == nullptr ? "nothing" : dump_json(*block).substr(0, 100)));
  return Quantization::kFp8Block128;
}

Result<Quantization> read_quantization(const Json& config, const Json& text) {
  const Json* quant = text.find("quantization_config");
  if (quant == nullptr || quant->is_null()) quant = config.find("quantization_config");
  if (quant == nullptr || quant->is_null()) return Quantization::kNone;
  const std::string where = "config.json: quantization_config";
  if (!quant->is_object()) return bad_input(fmt::format("{}: expected an object, found {}", where, quant->type_name()));
  ConfigReader r(*quant, where);
  const std::string method = r.text("quant_method");
  RETURN_IF_ERROR(r.status());
  if (method == "compressed-tensors") return read_int4(*quant, r, where);
  if (method == "fp8") return read_fp8(*quant, r, where);
  r.fail("quant_method", "compressed-tensors or fp8", method.substr(0, 100));
  return r.status().error();
}

// Adds eos_token_id, an integer or a list of integers, of `object`; null and absent add nothing.
Status add_eos(const Json& object, const char* file, int64_t vocab, std::vector<int32_t>& ids) {
  const Json* value = object.find("eos_token_id");
  if (value == nullptr || value->is_null()) return {};
  const Json::Array one = {*value};
  for (const Json& id : value->is_array() ? value->as_array() : one) {
    if (!id.is_int() || id.as_int() < 0 || id.as_int() >= vocab)
      return bad_input(
          fmt::format("{}: eos_token_id: expected ids in [0, {}), found {}", file, vocab, dump_json(*value)),
          "eos_token_id");
    ids.push_back(static_cast<int32_t>(id.as_int()));
  }
  return {};
}

Status read_eos(const Json& config, const Json& text, const Json& generation, ModelConfig& c) {
  RETURN_IF_ERROR(add_eos(config, "config.json", c.vocab, c.eos_ids));
  RETURN_IF_ERROR(add_eos(text, "config.json: text_config", c.vocab, c.eos_ids));
  RETURN_IF_ERROR(add_eos(generation, "generation_config.json", c.vocab, c.eos_ids));
  std::sort(c.eos_ids.begin(), c.eos_ids.end());
  c.eos_ids.erase(std::unique(c.eos_ids.begin(), c.eos_ids.end()), c.eos_ids.end());
  return {};
}

Result<Json> read_json_object(const std::string& folder, const char* name) {
  ASSIGN_OR_RETURN(const std::string text, read_in_folder(folder, name, kMaxConfigBytes));
  const std::string path = fmt::format("{}/{}", folder, name);
  Result<Json> json = parse_json(text);
  if (!json.ok()) return Error(json.error().code, path + ": " + json.error().message);
  if (!json->is_object()) return bad_input(fmt::format("{}: expected an object, found {}", path, json->type_name()));
  return json;
}

}  // namespace

std::string supported_architectures() {
  std::string out;
  for (const Architecture& a : kArchitectures) out += (out.empty() ? "" : ", ") + std::string(a.name);
  return out;
}

Result<ModelConfig> parse_config(const Json& config, const Json& generation) {
  ASSIGN_OR_RETURN(const Architecture architecture, find_architecture(config));
  const Json* nested = config.find("text_config");
  const Json& text = nested != nullptr ? *nested : config;
  const std::string where = nested != nullptr ? "config.json: text_config" : "config.json";
  if (!text.is_object()) return bad_input(fmt::format("{}: expected an object, found {}", where, text.type_name()));
  ModelConfig c;
  c.architecture = architecture.text_name;
  c.prefix = architecture.prefix;
  ConfigReader reader(text, where);
  read_sizes(reader, c);
  RETURN_IF_ERROR(reader.status());
  read_mlp(reader, c);
  RETURN_IF_ERROR(reader.status());
  c.latent_norm_eps = c.rms_norm_eps;
  if (is_kimi_linear(c)) RETURN_IF_ERROR(read_linear_attention(reader, where, c));
  if (c.rope_enabled) RETURN_IF_ERROR(read_rope(reader, where, c.rope_config));
  RETURN_IF_ERROR(read_eos(config, text, generation, c));
  ASSIGN_OR_RETURN(c.quantization, read_quantization(config, text));
  return c;
}

Result<ModelConfig> read_config(const std::string& folder) {
  ASSIGN_OR_RETURN(const Json config, read_json_object(folder, "config.json"));
  Json generation;
  if (folder_has(folder, "generation_config.json")) {
    ASSIGN_OR_RETURN(generation, read_json_object(folder, "generation_config.json"));
  }
  return parse_config(config, generation);
}

Status check_limits(const ModelConfig& c, const ShapeLimits& limits, const char* backend) {
  struct Field {
    const char* key;
    int64_t value, unit, most;
  };
  const int64_t unit = limits.unit, any = ShapeLimits::kAny;
  std::vector<Field> fields = {{"hidden_size", c.hidden, unit, any},
                               {"q_lora_rank", c.q_lora, unit, any},
                               {"kv_lora_rank", c.kv_lora, limits.latent_unit, limits.max_latent},
                               {"qk_nope_head_dim", c.nope, unit, any},
                               {"qk_rope_head_dim", c.rope, unit, limits.max_rope},
                               {"v_head_dim", c.value, unit, any}};
  int64_t moe_layers = 0;
  for (int64_t i = 0; i < c.num_layers; ++i) moe_layers += c.is_moe(i);
  if (moe_layers < c.num_layers) fields.push_back({"intermediate_size", c.local_inter(), unit, any});
  const Keys& keys = keys_of(c);
  if (moe_layers > 0) {
    fields.push_back({"moe_intermediate_size", c.local_expert_inter(), unit, any});
    fields.push_back({"moe_intermediate_size", c.local_shared_inter(), unit, any});
    fields.push_back({keys.num_experts, c.num_experts, 1, limits.max_experts});
    fields.push_back({keys.top_k, c.top_k, 1, limits.max_top_k});
    fields.push_back({keys.num_groups, c.num_groups, 1, limits.max_groups});
  }
  for (const Field& f : fields) {
    if (f.value % f.unit == 0 && f.value <= f.most) continue;
    const std::string multiple = f.unit > 1 ? fmt::format("a multiple of {}", f.unit) : "",
                      most = fmt::format("at most {}", f.most);
    const std::string need = f.most == any ? multiple : f.unit == 1 ? most : fmt::format("{}, {}", multiple, most);
    return bad_input(
        fmt::format("config.json: {}: --device {} expects {}, found {}{}; --device cpu takes any", f.key, backend, need,
                    f.value, c.ranks.size > 1 ? fmt::format(" on each of {} ranks", c.ranks.size) : ""),
        f.key);
  }
  return {};
}

std::vector<float> rope_inv_freq(const RopeConfig& rope, int64_t dim) {
  std::vector<float> out(dim / 2);
  double low = 0, high = 0;
  if (rope.yarn) {
    // The pair that turns r times over the original context (Peng et al. 2023, section 3.2).
    const auto pair_of = [&](double r) {
      return static_cast<double>(dim) *
             std::log(static_cast<double>(rope.yarn->original_positions) / (2 * std::numbers::pi * r)) /
             (2 * std::log(rope.theta));
    };
    low = std::max(std::floor(pair_of(rope.yarn->beta_fast)), 0.0);
    high = std::min(std::ceil(pair_of(rope.yarn->beta_slow)), static_cast<double>(dim - 1));
    if (low == high) high += 0.001;
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    double f = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    if (rope.yarn) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      f = f / rope.yarn->factor * ramp + f * (1 - ramp);
    }
    out[i] = static_cast<float>(f);
  }
  return out;
}

double yarn_mscale(double factor, double c) {
  return factor <= 1 ? 1 : 0.1 * c * std::log(factor) + 1;
}

double rope_cos_sin_factor(const RopeConfig& rope) {
  if (!rope.yarn) return 1;
  return yarn_mscale(rope.yarn->factor, rope.yarn->mscale) / yarn_mscale(rope.yarn->factor, rope.yarn->mscale_all_dim);
}

double mla_softmax_scale(const ModelConfig& config) {
  const double plain = 1 / std::sqrt(static_cast<double>(config.nope + config.rope));
  if (!config.rope_config.yarn) return plain;
  const double m = yarn_mscale(config.rope_config.yarn->factor, config.rope_config.yarn->mscale_all_dim);
  return plain * m * m;
}

}  // namespace perigee

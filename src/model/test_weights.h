// For tests: a tiny config.json and a writer of safetensors files.
#pragma once

#include <fmt/core.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/temp_folder.h"
#include "model/safetensors.h"
#include "model/weights.h"

namespace perigee {

inline Json json(const std::string& text) {
  auto parsed = parse_json(text);
  CHECK(parsed.ok(), parsed.error().message);
  return std::move(*parsed);
}

// A K2-like network of three layers whose matrices are all different in shape.
inline Json tiny_config() {
  return json(R"({"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 40, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 160,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2,
    "norm_topk_prob": true, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1,
                     "original_max_position_embeddings": 64},
    "max_position_embeddings": 256, "eos_token_id": 1, "tie_word_embeddings": false})");
}

// A Kimi-Linear-like network of five layers: KDA, KDA, MLA, KDA, MLA; heads of 128, which is what backends compute.
inline Json tiny_hybrid_config() {
  return json(R"({"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 96,
    "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": null,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "mla_use_nope": true,
    "intermediate_size": 160, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_token": 3,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": true, "moe_renormalize": true,
    "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "model_max_length": 512, "eos_token_id": 1,
    "linear_attn_config": {"head_dim": 128, "num_heads": 3, "short_conv_kernel_size": 4,
                           "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5]}})");
}

// The same as transformers 5 (5.17) writes it.
inline Json tiny_hybrid_config_of_transformers_5() {
  Json config = tiny_hybrid_config();
  for (const char* gone : {"mla_use_nope", "first_k_dense_replace", "moe_layer_freq", "moe_router_activation_func",
                           "use_grouped_topk", "linear_attn_config"})
    config.set(gone, Json());
  const Json added = json(R"({"dtype": "bfloat16", "head_dim": 8, "qk_head_dim": 24, "hidden_act": "silu",
    "attention_bias": false, "tie_word_embeddings": false, "rope_parameters": null,
    "linear_num_heads": 3, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"]})");
  for (const Json::Member& member : added.as_object()) config.set(member.first, member.second);
  return config;
}

inline Json int4_quantization() {
  return json(R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                                              "symmetric": true, "actorder": null}}}})");
}

inline Json fp8_quantization() {
  return json(R"({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})");
}

struct StoredTensor {
  std::string name, type;
  std::vector<int64_t> shape;
  std::string bytes;
};

// The bytes of a .safetensors file. `pad` more blanks in the header move the data off its alignment.
inline std::string safetensors_bytes(const std::vector<StoredTensor>& tensors, size_t pad = 0) {
  std::string text, data;
  for (const StoredTensor& t : tensors) {
    text += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", text.empty() ? "{" : ",",
                        t.name, t.type, shape_text(t.shape), data.size(), data.size() + t.bytes.size());
    data += t.bytes;
  }
  text += text.empty() ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8 + pad, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

inline std::string bytes_of(const void* data, int64_t count) {
  return std::string(static_cast<const char*>(data), static_cast<size_t>(count));
}

// Every tensor that `specs` declare, as `source` gives them, in stored form.
inline std::vector<StoredTensor> stored_tensors(const TensorSource& source, const std::vector<TensorSpec>& specs) {
  std::vector<StoredTensor> out;
  for (const TensorSpec& spec : specs) {
    if (is_vector(spec.role)) {
      const std::vector<float> v = source.vector(spec);
      out.push_back({spec.stored_name(), "F32", spec.stored_shape(), bytes_of(v.data(), spec.in * 4)});
      continue;
    }
    const RawWeight w = source.matrix(spec);
    const int64_t count = spec.out * spec.in;
    if (w.matrix.format == WeightFormat::kInt4Group32) {
      const int32_t shape[2] = {static_cast<int32_t>(spec.out), static_cast<int32_t>(spec.in)};
      out.push_back({spec.name + ".weight_packed", "I32", {spec.out, spec.in / 8}, bytes_of(w.matrix.data, count / 2)});
      out.push_back(
          {spec.name + ".weight_scale", "BF16", {spec.out, spec.in / 32}, bytes_of(w.matrix.scale, count / 16)});
      out.push_back({spec.name + ".weight_shape", "I32", {2}, bytes_of(shape, 8)});
    } else if (w.matrix.format == WeightFormat::kF8Block128) {
      const int64_t rows = (spec.out + 127) / 128, cols = (spec.in + 127) / 128;
      out.push_back({spec.name + ".weight", "F8_E4M3", {spec.out, spec.in}, bytes_of(w.matrix.data, count)});
      out.push_back({spec.name + ".weight_scale_inv", "F32", {rows, cols}, bytes_of(w.matrix.scale, rows * cols * 4)});
    } else {
      out.push_back({spec.stored_name(), "BF16", spec.stored_shape(), bytes_of(w.matrix.data, count * 2)});
    }
  }
  return out;
}

}  // namespace perigee

// ModelConfig: what config.json says about a network of the DeepSeek-V3 lineage, checked and in one spelling.
//
// Everything comes from the file; no constant is shared between models. Nested configs (Kimi-K2.5: text_config), both
// rope styles, Kimi-Linear's key names and layer lists and all end-of-sequence lists are resolved here, so nothing
// past this header looks at JSON.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "model/shard.h"
#include "ops/weights.h"

namespace perigee {

// YaRN (Peng et al. 2023), static: applied at all positions.
struct YarnConfig {
  double factor = 1;
  double beta_fast = 32, beta_slow = 1;
  double mscale = 1, mscale_all_dim = 0;
  int64_t original_positions = 0;
};

struct RopeConfig {
  double theta = 10000;
  std::optional<YarnConfig> yarn;
};

// How quantised projections are declared; which ones are quantised is seen from the tensors themselves.
enum class Quantization : uint8_t {
  kNone,
  kFp8Block128,  // attention, dense MLP, experts: e4m3 with 128 x 128 scales
  kInt4Group32,  // routed experts only: compressed-tensors, pack-quantized
};

// How a family calls the parts of a mixture of experts.
struct MoeNames {
  const char *block, *gate, *up, *down;
};

struct ModelConfig {
  std::string architecture;  // of the language model
  std::string prefix;        // of its tensor names: "" or "language_model."
  int64_t vocab = 0, hidden = 0, num_layers = 0, heads = 0;
  int64_t q_lora = 0;  // 0: a single q_proj
  int64_t kv_lora = 0, nope = 0, rope = 0, value = 0;
  int64_t inter = 0;  // dense layers
  int64_t moe_inter = 0, num_experts = 0, top_k = 0, num_shared_experts = 0;
  int64_t first_dense = 0;  // layers [0, first_dense) have a dense MLP
  int64_t moe_layer_freq = 1;
  RouterScore score = RouterScore::kSigmoid;
  bool correction_bias = true;  // e_score_correction_bias exists
  int64_t num_groups = 1, top_groups = 1;
  bool normalize_top_k = true;
  double routed_scale = 1;
  // Weights of the chosen experts are scores with the bias (LoadOptions::kimi_linear_biased_routing; never in a file).
  bool bias_in_weights = false;
  bool uniform_routing = false;  // LoadOptions::uniform_routing; never in a file
  MoeNames moe_names = {"mlp", "gate_proj", "up_proj", "down_proj"};
  double rms_norm_eps = 1e-6;
  double latent_norm_eps = 1e-6;  // of the norms of q_a and kv_a: rms_norm_eps, or LoadOptions::latent_norm_eps
  bool rope_enabled = true;       // false: latent attention without positions (NoPE)
  RopeConfig rope_config;
  // Layers with Kimi Delta Attention instead of latent attention.
  std::vector<bool> kda_layers;  // [num_layers], or empty: none
  KdaShape kda;
  int64_t max_positions = 0;
  std::vector<int32_t> eos_ids;  // ascending, unique
  Quantization quantization = Quantization::kNone;
  // Of a draft's one layer (model/eagle3.h), never in a file: what its tensors' names begin with in place of
  // model.layers.0, and the width that its attention reads, 0 for `hidden`.
  std::string draft_layer;
  int64_t draft_attention_width = 0;
  TensorParallel ranks;  // LoadOptions::ranks; never in a file. All sizes above are the whole model's.

  // What this rank keeps of them: see TensorSpec::shard.
  int64_t attention_width() const { return draft_attention_width > 0 ? draft_attention_width : hidden; }
  int64_t local_heads() const { return heads / ranks.size; }
  int64_t local_inter() const { return inter / ranks.size; }
  int64_t local_expert_inter() const { return ranks.whole_experts ? moe_inter : moe_inter / ranks.size; }
  int64_t local_shared_inter() const { return num_shared_experts * moe_inter / ranks.size; }
  KdaShape local_kda() const {
    KdaShape local = kda;
    local.heads /= ranks.size;
    return local;
  }

  bool is_moe(int64_t layer) const { return layer >= first_dense && layer % moe_layer_freq == 0; }
  bool is_kda(int64_t layer) const { return !kda_layers.empty() && kda_layers[static_cast<size_t>(layer)]; }
  int64_t num_kda_layers() const { return std::count(kda_layers.begin(), kda_layers.end(), true); }
};

// `generation` is generation_config.json, or null where there is none. Errors name key, found and expected.
Result<ModelConfig> parse_config(const Json& config, const Json& generation);

// Reads `folder`/config.json and, if present, `folder`/generation_config.json.
Result<ModelConfig> read_config(const std::string& folder);

// Whether `backend` computes a rank's part of such a model: its widths, latents and experts are within `limits`. Errors
// name key, found, the limit and another backend.
Status check_limits(const ModelConfig& config, const ShapeLimits& limits, const char* backend);

// The architectures that parse_config accepts at the top of a config.json, for messages.
std::string supported_architectures();

// Rotary frequencies of `dim` columns: YaRN's blend of theta^(-2i/dim) and the same divided by factor, [dim / 2].
std::vector<float> rope_inv_freq(const RopeConfig& rope, int64_t dim);
// 0.1 c ln(s) + 1 for s > 1, else 1 (YaRN, equation 15, as DeepSeek parametrises it).
double yarn_mscale(double factor, double c);
// What cos and sin are multiplied by: the ratio of the two mscales.
double rope_cos_sin_factor(const RopeConfig& rope);
// (dn + dr)^(-1/2), times mscale(factor, mscale_all_dim)^2 under YaRN.
double mla_softmax_scale(const ModelConfig& config);

}  // namespace perigee

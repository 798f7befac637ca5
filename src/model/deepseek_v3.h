// DeepseekV3: the network of DeepSeek-V3/R1, Kimi-K2 and its successors' text part, Moonlight, DeepSeek-V2-Lite and
// GLM-4.7-Flash: multi-head latent attention and a mixture of experts (DeepSeek-V3 2024, section 2.1).
#pragma once

#include <memory>
#include <vector>

#include "model/config.h"
#include "model/model.h"
#include "model/weights.h"

namespace perigee {

// Every tensor of the network: what build_deepseek_v3() will read.
std::vector<TensorSpec> deepseek_v3_tensors(const ModelConfig& config);

// Packs the weights.
std::unique_ptr<Model> build_deepseek_v3(const ModelConfig& config, WeightReader& reader);

}  // namespace perigee

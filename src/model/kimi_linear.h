// KimiLinear: Kimi-Linear-48B-A3B. Layers with Kimi Delta Attention, whose memory is a state of fixed size, and layers
// with latent attention that knows no positions, in the pattern that the config lists; a mixture of experts after
// both (Kimi Linear 2025, section 4).
#pragma once

#include <memory>
#include <vector>

#include "model/config.h"
#include "model/model.h"
#include "model/weights.h"

namespace perigee {

// Every tensor of the network: what build_kimi_linear() will read.
std::vector<TensorSpec> kimi_linear_tensors(const ModelConfig& config);

// Packs the weights.
std::unique_ptr<Model> build_kimi_linear(const ModelConfig& config, WeightReader& reader);

}  // namespace perigee

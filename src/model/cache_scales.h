// Scales of a kF8E4M3 cache: what its numbers are multiplied by, one for each layer with latent attention. A checkpoint
// may have them; else a file has that `perigee calibrate` wrote (--kv-scale), or all are 1.
#pragma once

#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "model/config.h"

namespace perigee {

// By the name of the layer's attention, "model.layers.3.self_attn". Empty: 1 for all.
using CacheScales = std::map<std::string, float>;

// 1 / scale is finite, too.
inline bool is_cache_scale(float scale) {
  return std::isnormal(scale) && scale > 0;
}

// The names of attentions with a cache of latents, in the order of LatentLayers.
std::vector<std::string> latent_attentions(const ModelConfig& config);

// What read_cache_scales() reads, with `notes` of how the scales were made, which nobody reads.
Json cache_scales_json(const CacheScales& scales, Json notes);

// One scale for each of `attentions`. The file is not trusted: errors name it, the field and the limit.
Result<CacheScales> read_cache_scales(const std::string& path, std::span<const std::string> attentions);

}  // namespace perigee

// Calibration: what prompts leave in a cache that rounds little, from which the scales of an fp8 cache follow. The
// command is run_calibrate (main/commands.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/cache_scales.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace perigee {

using TokenPrompts = std::vector<std::vector<int32_t>>;

// Lines of JSON objects whose `prompt` is text or a list of token ids, as in a completion request; each is cut to
// `max_tokens`. The file is not trusted: errors name it, the line and the limit. Without a tokenizer text is refused.
Result<TokenPrompts> read_prompts(const std::string& path, const Tokenizer* tokenizer, int64_t vocab,
                                  int64_t max_tokens);

// The largest magnitude in the rows [c | k_rope] of each layer with latents. A NaN among them is an error. `progress`,
// if given, is called with the tokens done and their total.
Result<std::vector<float>> largest_latents(const Model& model, Ops& ops, const TokenPrompts& prompts,
                                           const std::function<void(int64_t done, int64_t total)>& progress = nullptr);

// So that `margin` times the largest of each layer is the largest that e4m3 holds; 1 where a layer has only zeros.
CacheScales scales_for(const std::vector<std::string>& attentions, const std::vector<float>& largest, double margin);

}  // namespace perigee

// What config.json says of an EAGLE-3 draft (model/eagle3.h), checked against its target.
#pragma once

#include <vector>

#include "base/json.h"
#include "model/config.h"
#include "model/model.h"

namespace perigee {

struct Eagle3Config {
  ModelConfig layer;                   // its sizes; of one layer. kv_lora 0: its attention is `full`
  FullShape full;                      // of Llama's kind of attention: all ranks' heads
  int64_t vocab = 0;                   // ids that it drafts; fewer than the target's where `d2t` maps them
  std::vector<int32_t> taps;           // layers of the target whose inputs it reads, ascending
  bool norms_each_tap = false;         // fc_norm
  bool norms_all_taps = false;         // norm_before_fc
  bool norms_before_residual = false;  // the residual is the normed hidden state
  bool hands_on_normed = false;        // norm_output: the next pass reads the normed output

  bool has_latents() const { return layer.kv_lora > 0; }
};

// Errors name key, found and expected.
Result<Eagle3Config> parse_eagle3_config(const Json& config, const ModelInfo& target);

// Of a draft's folder.
Result<Json> read_draft_json(const std::string& folder);

}  // namespace perigee

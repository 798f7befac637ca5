// --speculative-config: a JSON object with vLLM's keys, as what ranks are told.
#pragma once

#include <string>

#include "base/result.h"
#include "exec/rank_config.h"

namespace perigee {

// Requires rank's device and layout to be settled. Empty text: no speculation. Errors name the key.
Status read_speculative_config(const std::string& text, RankConfig& rank);

// Before weights are read: that a draft model's folder is there. Empty path: none. The error names the flag and its
// key.
Status check_draft_folder(const std::string& path);

}  // namespace perigee

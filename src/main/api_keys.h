// The keys of `perigee serve`, and what depends on how many there are.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "main/options.h"

namespace perigee {

// --api-key, PERIGEE_API_KEY and the file, as of every option, else `vllm_key`, the value of VLLM_API_KEY (nullptr or
// "": there is none). Logs whether that one is taken. Errors: an empty key; --require-key and no key.
Result<std::vector<std::string>> api_keys(const Options& options, const char* vllm_key);

// --ignore-priority as given, else on with several keys: one client must not starve another.
bool ignores_priority(const Options& options, size_t num_keys);

}  // namespace perigee

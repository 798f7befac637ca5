#include "main/api_keys.h"

#include <algorithm>

#include "base/log.h"

namespace perigee {

Result<std::vector<std::string>> api_keys(const Options& options, const char* vllm_key) {
  std::vector<std::string> keys = options.list("api-key");
  if (std::any_of(keys.begin(), keys.end(), [](const std::string& key) { return key.empty(); }))
    return bad_input("--api-key is empty, which would let everybody in: give a key, or leave the flag out", "api-key");
  if (vllm_key != nullptr && *vllm_key != '\0') {
    const bool taken = keys.empty();
    if (taken) keys.emplace_back(vllm_key);
    log_info("VLLM_API_KEY is ", taken ? "the API key" : "not used: keys are given by --api-key or PERIGEE_API_KEY");
  }
  if (keys.empty() && options.enabled("require-key"))
    return bad_input("--require-key is set and there is no key: give --api-key, PERIGEE_API_KEY or VLLM_API_KEY",
                     "require-key");
  return keys;
}

bool ignores_priority(const Options& options, size_t num_keys) {
  return options.given("ignore-priority") ? options.enabled("ignore-priority") : num_keys > 1;
}

}  // namespace perigee

#include "main/api_keys.h"

#include <algorithm>

#include "base/log.h"

namespace perigee {

void add_key_flags(CommandLine& flags, ServerConfig& server, bool& required) {
  flags.add_list("--api-key", server.api_keys, "keys that clients must send; none: open");
  flags.add_switch("--require-key", required, "refuse to start without --api-key");
  flags.add_switch("--ignore-priority", server.ignore_priority,
                   "the priority of requests has no effect; on when there are several keys");
}

Status settle_keys(const CommandLine& flags, bool required, const char* vllm_key, ServerConfig& server) {
  std::vector<std::string>& given = server.api_keys;
  if (std::any_of(given.begin(), given.end(), [](const std::string& key) { return key.empty(); }))
    return bad_input("--api-key is empty, which would let everybody in: give a key, or leave the flag out", "api-key");
  if (vllm_key != nullptr && *vllm_key != '\0') {
    const bool taken = given.empty();
    if (taken) given.emplace_back(vllm_key);
    log_info("VLLM_API_KEY is ", taken ? "the API key" : "not used: keys are given by --api-key or PERIGEE_API_KEY");
  }
  if (given.empty() && required)
    return bad_input("--require-key is set and there is no key: give --api-key, PERIGEE_API_KEY or VLLM_API_KEY",
                     "require-key");
  if (!flags.given("ignore-priority")) server.ignore_priority = given.size() > 1;
  return {};
}

}  // namespace perigee

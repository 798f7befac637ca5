// The keys of `perigee serve`, and what depends on how many there are.
#pragma once

#include "main/command_line.h"
#include "server/server.h"

namespace perigee {

// --api-key, --require-key and --ignore-priority.
void add_key_flags(CommandLine& flags, ServerConfig& server, bool& required);

// What the flags have set, else `vllm_key`, the value of VLLM_API_KEY (nullptr or "": there is none), of which it logs
// whether it is taken. With several keys one client must not starve another: the priority of requests is ignored unless
// the flag says otherwise. Errors: an empty key; --require-key and no key.
Status settle_keys(const CommandLine& flags, bool required, const char* vllm_key, ServerConfig& server);

}  // namespace perigee

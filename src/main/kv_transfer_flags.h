// The flags of prefill/decode separation (docs/pd.md).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "main/command_line.h"

namespace perigee {

struct KvTransferFlags {
  std::string config;                   // JSON with vLLM's keys
  std::optional<ImportEnd> on_failure;  // none: the JSON's, else fail
  std::vector<std::string> peers;
  std::string secret, secret_file;
  std::string host = "127.0.0.1";
  int32_t port = 5600;
};

void add_kv_transfer_flags(CommandLine& flags, KvTransferFlags& to);

// Variables of other programs that have an effect here; null: not set.
struct KvTransferVariables {
  const char* host = nullptr;            // VLLM_NIXL_SIDE_CHANNEL_HOST
  const char* port = nullptr;            // VLLM_NIXL_SIDE_CHANNEL_PORT
  const char* runtime_folder = nullptr;  // XDG_RUNTIME_DIR
};

// Nothing where there is no --kv-transfer-config. Without a secret that is given, all processes of this user on this
// machine share one, in a file that only they can read, which is made when it is missing. Errors name the flag, and the
// key of its JSON.
Status settle_kv_transfer(const CommandLine& flags, const KvTransferVariables& variables, KvTransferFlags read,
                          HandoverConfig& to);
// The same for what is not to run (`perigee plan`): it needs no secret, and neither reads nor makes one.
Status plan_kv_transfer(const CommandLine& flags, KvTransferFlags read, HandoverConfig& to);

}  // namespace perigee

// What prefill and decode workers are sent, in vLLM's words for a transfer (kv_transfer_params).
#include "router/forward.h"
#include "router/json_members.h"

namespace perigee {

namespace {

constexpr std::string_view kTransfer = "kv_transfer_params";
constexpr std::string_view kPrefillMembers =
    R"("stream":false,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"announce_early":true,)"
    R"("do_remote_prefill":false,)"
    R"("remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null})";

}  // namespace

std::optional<std::string> prefill_body(std::string_view body) {
  const auto members = JsonMembers::read(body);
  if (!members) return std::nullopt;
  std::string more(kPrefillMembers);
  if (members->find("max_completion_tokens") != nullptr) more += R"(,"max_completion_tokens":1)";
  return members->rewritten(
      {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", kTransfer},
      more);
}

std::optional<std::string> decode_body(std::string_view body, std::string_view prefill_reply) {
  const auto members = JsonMembers::read(body);
  const auto reply = JsonMembers::read(prefill_reply);
  const JsonMember* transfer = reply ? reply->find(kTransfer) : nullptr;
  if (!members || transfer == nullptr || !transfer->value.starts_with('{')) return std::nullopt;
  std::string more;
  more.append("\"").append(kTransfer).append("\":").append(transfer->value);
  return members->rewritten({kTransfer}, more);
}

std::string_view prompt_text(std::string_view body) {
  const auto members = JsonMembers::read(body);
  if (!members) return {};
  const JsonMember* prompt = members->find("messages");
  if (prompt == nullptr) prompt = members->find("prompt");
  return prompt == nullptr ? std::string_view() : prompt->value;
}

}  // namespace perigee

#include "server/transfer_params.h"

#include <fmt/format.h>

#include <charconv>
#include <limits>

namespace perigee {
namespace {

constexpr size_t kMaxHostBytes = 255, kTagBytes = 64;
constexpr std::string_view kPassOn = "pass on the kv_transfer_params of the prefill server's reply as they are";

// Sixteen hexadecimal digits.
std::optional<uint64_t> hexadecimal(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<RemotePrefix> read_remote(Fields& fields) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto missing = [&](const char* name) {
    fields.fail(name, fmt::format("is missing or invalid; {}", kPassOn));
    return std::nullopt;
  };
  const auto num_tokens = fields.integer("remote_num_tokens", 0, kMost);
  if (!num_tokens || *num_tokens % kBlockTokens != 0) return missing("remote_num_tokens");
  if (*num_tokens == 0) return std::nullopt;
  const std::string host = fields.text("remote_host", kMaxHostBytes).value_or("");
  if (host.empty()) return missing("remote_host");
  const auto port = fields.integer("remote_port", 1, 65535);
  if (!port) return missing("remote_port");
  const auto engine = hexadecimal(fields.text("remote_engine_id", kMaxHostBytes).value_or(""));
  if (!engine) return missing("remote_engine_id");
  const auto request = hexadecimal(fields.text("remote_request_id", kMaxHostBytes).value_or(""));
  if (!request) return missing("remote_request_id");
  const std::string tag = fields.text("remote_tag", kTagBytes).value_or("");
  if (tag.empty()) return missing("remote_tag");
  const bool v6 = host.find(':') != std::string::npos;
  return RemotePrefix{.peer = fmt::format("{}{}{}:{}", v6 ? "[" : "", host, v6 ? "]" : "", *port),
                      .lease = {*engine, static_cast<int64_t>(*request)},
                      .num_blocks = static_cast<int32_t>(*num_tokens / kBlockTokens),
                      .tag = tag};
}

}  // namespace

TransferParams read_transfer_params(const Json& params, Fields& fields) {
  TransferParams out;
  Fields members(params, "kv_transfer_params.");
  const bool early = members.flag("announce_early", false);
  if (members.flag("do_remote_decode", false)) out.lease = early ? LeaseWish::kFromStart : LeaseWish::kAtEnd;
  const bool fetches = members.flag("do_remote_prefill", false);
  if (out.leases() && fetches)
    members.fail("do_remote_decode", "excludes do_remote_prefill; a prompt is computed on one server");
  else if (fetches)
    out.remote = read_remote(members);
  fields.adopt(members);
  return out;
}

std::optional<RemotePrefix> remote_prefix_of(const Json& body) {
  const Json* params = body.find("kv_transfer_params");
  if (params == nullptr || !params->is_object()) return std::nullopt;
  Fields fields(body);
  TransferParams read = read_transfer_params(*params, fields);
  return fields.status().ok() ? std::move(read.remote) : std::nullopt;
}

Json transfer_params_json(const std::optional<RemotePrefix>& lease) {
  Json out(Json::Object{{"do_remote_prefill", true}, {"do_remote_decode", false}});
  out.set("remote_num_tokens", lease ? static_cast<int64_t>(lease->num_blocks) * kBlockTokens : 0);
  if (!lease) return out;
  const size_t colon = lease->peer.rfind(':');
  std::string host = lease->peer.substr(0, colon);
  if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
  int64_t port = 0;
  if (colon != std::string::npos)
    std::from_chars(lease->peer.data() + colon + 1, lease->peer.data() + lease->peer.size(), port);
  out.set("remote_host", host);
  out.set("remote_port", port);
  out.set("remote_engine_id", fmt::format("{:016x}", lease->lease.incarnation));
  out.set("remote_request_id", fmt::format("{:016x}", static_cast<uint64_t>(lease->lease.number)));
  out.set("remote_tag", lease->tag);
  return out;
}

}  // namespace perigee

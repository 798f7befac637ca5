#include "main/kv_transfer_flags.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "kv/tcp_peer.h"
#include "kv/ucx_path.h"
#include "kv/wire.h"
#include "server/fields.h"

namespace perigee {
namespace {

constexpr const char* kFlag = "kv-transfer-config";
constexpr size_t kLeastSecret = 16, kMostSecret = 4096;  // bytes
constexpr double kMostLeaseS = 3600;

// What other carriers need to be told, and this one does not.
void read_without_effect(Fields& fields) {
  constexpr size_t kMaxText = 1024;
  for (const char* name : {"engine_id", "kv_ip"}) fields.text(name, kMaxText);
  for (const char* name : {"kv_rank", "kv_parallel_size", "kv_port"}) fields.integer(name, 0, 1 << 16);
  fields.real("kv_buffer_size", 0, 1e18);
  fields.choice("kv_buffer_device", {"cuda", "cpu"});
  fields.flag("enable_permute_local_kv", false);
}

// In vLLM these are NIXL's plugins.
void read_backends(Fields& fields, HandoverConfig& to) {
  constexpr size_t kMost = 8;
  const Json* names = fields.array("backends", kMost);
  if (names == nullptr) return;
  for (const Json& name : names->as_array()) {
    const std::string text = name.is_string() ? name.as_string() : "";
    if (text != "TCP" && text != "UCX" && text != "CUDA_IPC")
      return fields.fail("backends", fmt::format("holds {}: this server has \"TCP\", \"UCX\" and \"CUDA_IPC\"",
                                                 dump_json(name).substr(0, 64)));
    to.backends.push_back(text);
  }
}

void read_extra(Fields& fields, HandoverConfig& to) {
  const Json* extra = fields.object("kv_connector_extra_config");
  if (extra == nullptr) return;
  Fields members(*extra, "kv_connector_extra_config.");
  to.lease_s = members.real("kv_lease_duration", 1, kMostLeaseS).value_or(to.lease_s);
  members.refuse("bidirectional_kv_xfer", "prefixes go from prefill to decode only; leave it out", Json(false));
  read_backends(members, to);
  for (const char* name : {"decoder_kv_blocks_ttl", "kv_recompute_threshold", "enforce_handshake_compat",
                           "enable_cross_layers_blocks", "num_threads"})
    members.any(name);
  members.refuse_unknown();
  fields.adopt(members);
}

Status read_json(const Json& object, bool& takes, HandoverConfig& to) {
  Fields fields(object);
  if (!fields.choice("kv_connector", {"NixlConnector"}))
    fields.fail("kv_connector", "is missing: it must be \"NixlConnector\"");
  const auto role = fields.choice("kv_role", {"kv_producer", "kv_consumer", "kv_both"});
  if (!role)
    fields.fail(
        "kv_role",
        "is missing: \"kv_producer\" computes prompts for others, \"kv_consumer\" takes them, \"kv_both\" both");
  to.gives = role && *role != "kv_consumer";
  takes = role && *role != "kv_producer";
  const auto policy = fields.choice("kv_load_failure_policy", {"fail", "recompute"});
  to.on_failure = policy == "recompute" ? ImportEnd::kRecompute : ImportEnd::kFail;
  read_without_effect(fields);
  read_extra(fields, to);
  fields.refuse_unknown();
  return fields.status();
}

Status read_config(const std::string& text, bool& takes, HandoverConfig& to) {
  const Result<Json> object = parse_json(text);
  if (!object.ok()) return bad_input(fmt::format("--{}: {}", kFlag, object.error().message), kFlag);
  if (!object->is_object())
    return bad_input(fmt::format("--{} must be a JSON object such as {{\"kv_connector\": \"NixlConnector\", "
                                 "\"kv_role\": \"kv_producer\"}}, got a value of type {}",
                                 kFlag, object->type_name()),
                     kFlag);
  const Status status = read_json(*object, takes, to);
  if (!status.ok()) return Error(status.error().code, fmt::format("--{}: {}", kFlag, status.error().message), kFlag);
  const Status loaded = to.prefers_ucx() ? UcxPath::check() : Status();
  if (loaded.ok()) return {};
  return bad_input(fmt::format("--{}: \"backends\": {}, or leave UCX out", kFlag, loaded.error().message), kFlag);
}

bool is_address(const std::string& peer) {
  const size_t colon = peer.rfind(':');
  int32_t port = 0;
  return colon != std::string::npos && colon > 0 && Whole{1, 65535}.read(peer.substr(colon + 1), port);
}

// Flags and variables of perigee come first.
Status settle_address(const CommandLine& flags, const KvTransferVariables& variables, KvTransferFlags& read) {
  if (variables.host != nullptr && !flags.given("kv-side-channel-host")) read.host = variables.host;
  if (variables.port != nullptr && !flags.given("kv-side-channel-port") &&
      !Whole{0, 65535}.read(variables.port, read.port))
    return bad_input("VLLM_NIXL_SIDE_CHANNEL_PORT must be a whole number from 0 to 65535", "kv-side-channel-port");
  if (read.host == "0.0.0.0" || read.host == "::" || read.host.empty())
    return bad_input(
        "--kv-side-channel-host is what decode servers are told to connect to: give an address of this "
        "machine that they reach",
        "kv-side-channel-host");
  return {};
}

Error failed(const std::string& path) {
  return bad_input(fmt::format("{}: {}; give all servers the same --kv-secret-file", path, std::strerror(errno)),
                   "kv-secret-file");
}

Result<std::string> read_secret(const std::string& path) {
  Result<std::string> read = read_file(path, kMostSecret);
  if (!read.ok())
    return bad_input(fmt::format("--kv-secret-file {}: give a file of {} to {} bytes that this user can read",
                                 read.error().message, kLeastSecret, kMostSecret),
                     "kv-secret-file");
  std::string secret = *std::move(read);
  while (!secret.empty() && std::isspace(static_cast<unsigned char>(secret.back())) != 0) secret.pop_back();
  return secret;
}

// A folder of this user alone.
Result<std::string> private_folder(const char* given) {
  const std::string path =
      given != nullptr && *given != '\0' ? given : fmt::format("/tmp/perigee-{}", static_cast<unsigned>(getuid()));
  if (mkdir(path.c_str(), S_IRWXU) != 0 && errno != EEXIST) return failed(path);
  struct stat found {};
  if (lstat(path.c_str(), &found) != 0) return failed(path);
  if (!S_ISDIR(found.st_mode) || found.st_uid != getuid() || (found.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    return bad_input(path + " is not a folder of this user alone; give all servers the same --kv-secret-file",
                     "kv-secret-file");
  return path;
}

// Whole under its name at once: another process may look for it at the same time.
Result<std::string> shared_secret(const char* given_folder) {
  ASSIGN_OR_RETURN(const std::string folder, private_folder(given_folder));
  const std::string path = folder + "/perigee-kv-secret";
  if (std::error_code unknown; !std::filesystem::exists(path, unknown)) {
    std::string secret;
    for (const uint8_t byte : make_nonce()) secret += fmt::format("{:02x}", byte);
    const std::string draft = fmt::format("{}.{}", path, static_cast<int>(getpid()));
    const int file = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file < 0) return failed(draft);
    errno = ENOSPC;  // a short write says no more
    const bool written = ::write(file, secret.data(), secret.size()) == static_cast<ssize_t>(secret.size());
    const bool there = written && (::link(draft.c_str(), path.c_str()) == 0 || errno == EEXIST);
    const Error why = failed(path);
    ::close(file);
    ::unlink(draft.c_str());
    if (!there) return why;
  }
  return read_secret(path);
}

Result<std::string> secret_of(const KvTransferFlags& read, bool listens, const char* folder) {
  const bool given = !read.secret.empty() || !read.secret_file.empty();
  if (!given && listens && !is_loopback(read.host))
    return bad_input(fmt::format("--kv-side-channel-host {} can be reached from other machines, and whoever reaches it "
                                 "could read prompts' caches: give all servers the same --kv-secret-file",
                                 read.host),
                     "kv-secret-file");
  if (!given) log_info("cache transfers: without --kv-secret-file only with servers of this user on this machine");
  Result<std::string> secret = !read.secret.empty() ? Result<std::string>(read.secret)
                               : given              ? read_secret(read.secret_file)
                                                    : shared_secret(folder);
  if (secret.ok() && secret->size() < kLeastSecret)
    return bad_input(fmt::format("--kv-secret{} has {} bytes: give {} random ones or more",
                                 read.secret.empty() ? "-file" : "", secret->size(), kLeastSecret),
                     "kv-secret-file");
  return secret;
}

// All but the secret.
Status settle_open(const CommandLine& flags, const KvTransferVariables& variables, KvTransferFlags& read, bool& takes,
                   HandoverConfig& to) {
  if (read.config.empty()) {
    for (const char* name : {"kv-load-failure-policy", "kv-peers", "kv-secret", "kv-secret-file",
                             "kv-side-channel-host", "kv-side-channel-port"})
      if (flags.given(name)) log_warning("--", name, " has no effect without --", kFlag);
    return {};
  }
  RETURN_IF_ERROR(read_config(read.config, takes, to));
  if (read.on_failure) to.on_failure = *read.on_failure;
  if (!read.secret.empty() && !read.secret_file.empty())
    return bad_input("--kv-secret and --kv-secret-file: leave one of the two out", "kv-secret");
  if (to.gives) {
    RETURN_IF_ERROR(settle_address(flags, variables, read));
    to.listens = {.host = read.host, .port = read.port};
  }
  for (const std::string& peer : read.peers)
    if (!is_address(peer))
      return bad_input(
          fmt::format("--kv-peers: \"{}\" is not HOST:PORT; name the --kv-side-channel-host and -port of each "
                      "server whose prompts are taken",
                      peer),
          "kv-peers");
  to.peers = std::move(read.peers);
  return {};
}

void settle_connect(bool takes, HandoverConfig& to) {
  TcpOptions options = TcpOptions::for_leases(to.secret, to.lease_s);
  options.areas = to.allows("CUDA_IPC");
  options.ucx = to.prefers_ucx();
  options.units_over_tcp = to.allows("TCP");
  if (takes) to.connect = connect_by_tcp(options);
}

}  // namespace

void add_kv_transfer_flags(CommandLine& flags, KvTransferFlags& to) {
  flags.group("Prefill and decode on different servers");
  flags.add("--kv-transfer-config", to.config,
            "JSON with vLLM's keys: {\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_producer\"} computes "
            "prompts for others, kv_consumer takes them");
  flags.add(
      "--kv-load-failure-policy", to.on_failure,
      OneOf<std::optional<ImportEnd>>{
          {{"auto", std::nullopt}, {"fail", ImportEnd::kFail}, {"recompute", ImportEnd::kRecompute}}},
      "a request whose prompt does not arrive ends with an error, or is computed here; auto: as the JSON's "
      "kv_load_failure_policy says, else fail. A prompt that the other server withdraws, for want of room or because "
      "its own request was cancelled or too late, is always computed here");
  flags.add_list("--kv-peers", to.peers, "host:port of the servers whose prompts are taken; none: all with the secret");
  flags.add("--kv-secret", to.secret, "what all these servers know; better in a file or in PERIGEE_KV_SECRET");
  flags.add("--kv-secret-file", to.secret_file, "file that holds it; none: servers of this user and machine only");
  flags.add("--kv-side-channel-host", to.host, "address to listen on for servers that take prompts");
  flags.add("--kv-side-channel-port", to.port, Whole{0, 65535}, "its port; 0: any free one");
}

Status settle_kv_transfer(const CommandLine& flags, const KvTransferVariables& variables, KvTransferFlags read,
                          HandoverConfig& to) {
  bool takes = false;
  RETURN_IF_ERROR(settle_open(flags, variables, read, takes, to));
  if (read.config.empty()) return {};
  ASSIGN_OR_RETURN(to.secret, secret_of(read, to.gives, variables.runtime_folder));
  settle_connect(takes, to);
  return {};
}

Status plan_kv_transfer(const CommandLine& flags, KvTransferFlags read, HandoverConfig& to) {
  bool takes = false;
  RETURN_IF_ERROR(settle_open(flags, {}, read, takes, to));
  settle_connect(takes, to);
  return {};
}

}  // namespace perigee

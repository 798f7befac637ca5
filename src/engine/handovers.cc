#include "engine/handovers.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/log.h"
#include "base/rng.h"
#include "kv/cuda/gpu_pages.h"
#include "kv/lease_tag.h"
#include "kv/model_digest.h"
#include "kv/socket.h"

namespace perigee {
namespace {

uint64_t made_up_incarnation() {
  const auto wall = std::chrono::system_clock::now().time_since_epoch().count();
  const auto steady = std::chrono::steady_clock::now().time_since_epoch().count();
  return mix64(static_cast<uint64_t>(wall) ^ mix64(static_cast<uint64_t>(steady)));
}

AreaUse areas_of(const HandoverConfig& handover) {
  constexpr int32_t kAreas = 4;
  const bool mapped = handover.allows("CUDA_IPC");
  return {.given = handover.gives && mapped ? kAreas : 0, .reads = handover.connect && mapped};
}

Error cannot_listen(const Error& why) {
  return Error(why.code,
               fmt::format("--kv-side-channel-host and --kv-side-channel-port: cannot listen: {}; give an address of "
                           "this machine and a free port, or port 0",
                           why.message),
               "kv-side-channel-port");
}

}  // namespace

int64_t Handovers::gpu_bytes(const HandoverConfig& handover) {
  return handover.any() ? gpu_pages_bytes(areas_of(handover)) : 0;
}

Status Handovers::check_config(const EngineConfig& config) {
  constexpr const char* kFlag = "kv-transfer-config";
  if (!config.handover.any()) return {};
  if (!config.scheduling.prefix_caching)
    return bad_input("--kv-transfer-config needs the prefix cache: leave out --no-enable-prefix-caching", kFlag);
  if (!config.handover.gives || !config.handover.listens) return {};
  // Closed again at once: nobody is to connect while weights are read.
  const auto port = Socket::listen(config.handover.listens->host, config.handover.listens->port);
  if (!port.ok()) return cannot_listen(port.error());
  return {};
}

Result<std::unique_ptr<Handovers>> Handovers::create(const EngineConfig& config, const Executor& executor,
                                                     HandoverPosts posts) {
  const HandoverConfig& handover = config.handover;
  if (!handover.any()) return std::unique_ptr<Handovers>();
  RETURN_IF_ERROR(check_config(config));
  ASSIGN_OR_RETURN(const std::vector<RankPages> pages, executor.pages(areas_of(handover)));
  CHECK(!pages.empty(), "ranks without pages");
  PageStore store(pages);
  CacheShape shape;
  ASSIGN_OR_RETURN(shape.model, model_digest(config.rank.load));
  if (!config.rank.draft_model.empty()) {
    LoadOptions draft = config.rank.load;
    draft.path = config.rank.draft_model;
    ASSIGN_OR_RETURN(shape.draft, model_digest(draft));
  }
  if (config.rank.quantization != OnlineQuantization::kNone) shape.model += "-int8";
  shape.deterministic = config.rank.limits.deterministic;
  shape.lease_ms = std::llround(handover.lease_s * 1000);
  store.describe(shape);
  HandoverConfig started = handover;
  if (started.incarnation == 0) started.incarnation = made_up_incarnation();
  auto handovers = std::make_unique<Handovers>(store, shape, started, std::move(posts));
  RETURN_IF_ERROR(handovers->listen());
  return handovers;
}

Handovers::Handovers(const PageStore& store, const CacheShape& shape, const HandoverConfig& config, HandoverPosts posts)
    : config_(config) {
  if (config.gives)
    leases_ = std::make_unique<LeaseTable>(store, shape, config.incarnation, config.lease_s, system_clock(),
                                           [post = posts.lease](SequenceId sequence) { post({sequence}); });
  if (config.connect)
    transfer_ = std::make_unique<Transfer>(store, shape, config.connect,
                                           Transfer::Options{.extend_every_s = config.lease_s / 6,
                                                             .growth_wait_s = config.lease_s / 24,
                                                             .growth_limit_s = config.lease_s * 20,
                                                             .piece_bytes = config.piece_bytes},
                                           [post = posts.import](SequenceId sequence, const TransferEnd& end) {
                                             post({sequence, end});
                                           });
}

Status Handovers::listen() {
  if (!leases_ || !config_.listens) return {};
  const auto& [host, port] = *config_.listens;
  TcpOptions options = TcpOptions::for_leases(config_.secret, config_.lease_s);
  options.areas = config_.allows("CUDA_IPC");
  options.ucx = config_.prefers_ucx();
  auto server = LeaseServer::start(*leases_, host, port, options);
  if (!server.ok()) return cannot_listen(server.error());
  server_ = *std::move(server);
  const bool v6 = host.find(':') != std::string::npos;
  address_ = fmt::format("{}{}{}:{}", v6 ? "[" : "", host, v6 ? "]" : "", server_->port());
  log_info("cache transfers: listening on ", address_);
  return {};
}

// Before any connection: what names a lease comes from a client, who may write any host into it.
Status Handovers::check_peer(const RemotePrefix& remote) const {
  if (!has_lease_tag(config_.secret, remote))
    return bad_input(
        "kv_transfer_params: remote_tag does not fit: pass on what the prefill server has replied as it is; both "
        "servers need the same --kv-secret-file",
        "kv_transfer_params");
  const auto& peers = config_.peers;
  if (!peers.empty() && std::find(peers.begin(), peers.end(), remote.peer) == peers.end())
    return bad_input("kv_transfer_params: remote_host and remote_port are none of --kv-peers", "kv_transfer_params");
  return {};
}

Status Handovers::check(const EngineRequest& request) const {
  if (request.lease != LeaseWish::kNone && !leases_)
    return bad_input(
        "kv_transfer_params: this node does not prefill for others: start it with kv_role kv_producer or kv_both",
        "kv_transfer_params");
  if (!request.remote) return {};
  if (!transfer_)
    return bad_input(
        "kv_transfer_params: this node does not decode what others have prefilled: start it with kv_role kv_consumer "
        "or kv_both",
        "kv_transfer_params");
  const int64_t most = (std::ssize(*request.prompt) - 1) / kBlockTokens;
  RETURN_IF_ERROR(check_peer(*request.remote));
  if (request.remote->num_blocks < 1 || request.remote->num_blocks > most)
    return bad_input(
        fmt::format("kv_transfer_params: {} blocks of {} tokens, of a prompt of {}: 1 to {} could be another node's",
                    request.remote->num_blocks, kBlockTokens, request.prompt->size(), most),
        "kv_transfer_params");
  return {};
}

void Handovers::prepare(const EngineRequest& request, SequenceId sequence, Submit& submit) {
  if (leases_) submit.lease = request.lease;
  if (request.remote && transfer_) {
    submit.remote_blocks = request.remote->num_blocks;
    transfer_->prepare(sequence, *request.remote);
  }
  if (submit.lease != LeaseWish::kNone || submit.remote_blocks > 0) prompts_[sequence] = request.prompt;
}

void Handovers::post(std::vector<Import> imports) {
  for (Import& import : imports) {
    if (import.empty()) {
      transfer_->release(import.sequence);
      continue;
    }
    const auto prompt = prompts_.find(import.sequence);
    CHECK(prompt != prompts_.end(), "sequence ", import.sequence, " imports an unknown prompt");
    transfer_->post(std::move(import), prompt->second);
  }
}

RemotePrefix Handovers::grant(const LeaseGrowth& growth, Tokens prompt) {
  RemotePrefix lease{
      .peer = address_, .lease = leases_->grant(growth, std::move(prompt)), .num_blocks = growth.full_blocks()};
  lease.tag = lease_tag(config_.secret, lease);
  return lease;
}

std::optional<RemotePrefix> Handovers::grow(const LeaseGrowth& growth) {
  const auto prompt = prompts_.find(growth.lease->sequence);
  if (growth.stage == LeaseStage::kGrows && growth.lease->blocks.empty() && prompt != prompts_.end())
    return grant(growth, prompt->second);
  leases_->grow(growth);
  return std::nullopt;
}

void Handovers::handle(const ImportOver& over, Scheduler& scheduler) {
  using How = TransferEnd::How;
  if (over.end.how == How::kArrived) return scheduler.end_import(over.sequence, over.end.arrived);
  // Withdrawn or dropped is no fault, so --kv-load-failure-policy does not apply.
  if (over.end.how != How::kFailed) return scheduler.end_import(over.sequence, ImportEnd::kRecompute);
  const std::string& why = over.end.why->message;
  log_warning("the prompt of sequence ", over.sequence, " did not arrive: ", why);
  scheduler.end_import(over.sequence, config_.on_failure,
                       "the prompt's cache entries did not arrive from the prefill node: " + why);
}

std::optional<RemotePrefix> Handovers::end(const SequenceUpdate& update) {
  std::optional<RemotePrefix> lease;
  const auto prompt = prompts_.find(update.sequence);
  if (update.lease) {
    CHECK(prompt != prompts_.end(), "sequence ", update.sequence, " leases an unknown prompt");
    const int32_t num_tokens = update.lease->num_tokens;
    lease = grant({.stage = LeaseStage::kWhole, .num_tokens = num_tokens, .lease = update.lease}, prompt->second);
  }
  if (transfer_ && prompt != prompts_.end()) transfer_->release(update.sequence);
  if (prompt != prompts_.end()) prompts_.erase(prompt);
  return lease;
}

HandoverCounts Handovers::counts() const {
  HandoverCounts out;
  if (leases_) out.leases = leases_->counts();
  if (server_) out.refused_connections = server_->num_refused();
  if (transfer_) out.transfers = transfer_->counts();
  return out;
}

void Handovers::close() {
  if (transfer_) transfer_->stop();
  if (leases_) leases_->close();  // which ends the waits for it to grow
  if (server_) server_->stop();
}

}  // namespace perigee

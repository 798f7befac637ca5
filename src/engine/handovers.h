// Handovers: an engine's part in prefill/decode separation: the leases that it gives and the transfers that it makes,
// and what the scheduler is told of them.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "control/scheduler.h"
#include "engine/engine.h"
#include "kv/lease_table.h"
#include "kv/tcp_peer.h"
#include "kv/transfer.h"

namespace perigee {

// What comes from threads of a transfer, to be passed on to Handovers::handle() on the engine's thread.
struct LeaseOver {
  SequenceId sequence;
};
struct ImportOver {
  SequenceId sequence;
  TransferEnd end;
};
struct HandoverPosts {
  std::function<void(LeaseOver)> lease;
  std::function<void(ImportOver)> import;
};

class Handovers {
 public:
  // Null where the configuration wants none. Errors name the flag.
  static Result<std::unique_ptr<Handovers>> create(const EngineConfig& config, const Executor& executor,
                                                   HandoverPosts posts);

  // Of pages that are there already. `shape` is whole, and `config` has an incarnation.
  Handovers(const PageStore& store, const CacheShape& shape, const HandoverConfig& config, HandoverPosts posts);

  // Opens its port, where it has one. Its leases have the port's address and a tag of it.
  Status listen();

  LeaseTable* leases() { return leases_.get(); }

  // What transfers keep of each GPU's memory.
  static int64_t gpu_bytes(const HandoverConfig& handover);
  // Whether the configuration's parts fit together, and its port is free; before weights are read, too. Errors name the
  // flag.
  static Status check_config(const EngineConfig& config);

  // --- Any thread ---
  HandoverCounts counts() const;
  // Whether the request's lease or remote prefix is one that this engine gives or takes. Nobody is connected to before
  // the tag of a remote prefix, and its place in --kv-peers, have been checked.
  Status check(const EngineRequest& request) const;
  // Of a request that was refused: nobody will read it. Ignored where it is not one that this engine takes.
  void release(const RemotePrefix& remote) const {
    if (transfer_ && check_peer(remote).ok()) transfer_->release(remote);
  }

  // --- Engine thread ---
  // A choice of a request that names a lease, before it is submitted; then its fields.
  void prepare(const EngineRequest& request, SequenceId sequence, Submit& submit);
  // After each plan.
  void post(std::vector<Import> imports);
  // Of what the scheduler has computed of a lease. Its name, when it begins.
  std::optional<RemotePrefix> grow(const LeaseGrowth& growth);
  void handle(const LeaseOver& over, Scheduler& scheduler) const { scheduler.release(over.sequence); }
  void handle(const ImportOver& over, Scheduler& scheduler);
  // The end of a choice; what its request may tell of its lease.
  std::optional<RemotePrefix> end(const SequenceUpdate& update);
  void expire() {
    if (leases_) leases_->expire();
  }
  // No byte is read or written after this.
  void close();

 private:
  using Tokens = std::shared_ptr<const std::vector<int32_t>>;
  Status check_peer(const RemotePrefix& remote) const;
  RemotePrefix grant(const LeaseGrowth& growth, Tokens prompt);

  const HandoverConfig config_;
  std::string address_;  // "host:port" of the server
  std::unique_ptr<LeaseTable> leases_;
  std::unique_ptr<LeaseServer> server_;
  std::unique_ptr<Transfer> transfer_;
  std::unordered_map<SequenceId, Tokens> prompts_;  // of sequences that are prepared or to be leased
};

}  // namespace perigee

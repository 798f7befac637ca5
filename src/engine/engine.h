// Engine: the place that joins the brain (control) and the hands (exec), on a thread of its own.
//
// Thread-safe: submit, cancel, stats and shutdown may be called from any thread. Outputs arrive through the sink given
// at submission, called on the engine thread; a sink must not block (it posts to its own executor).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "control/cache_size.h"
#include "engine/executor.h"
#include "engine/lag_watch.h"
#include "engine/messages.h"
#include "exec/rank_config.h"
#include "kv/peer.h"

namespace perigee {

// Prefill/decode separation (docs/pd.md): whether this engine gives prefixes to others or takes theirs.
struct HandoverConfig {
  bool gives = false;
  Connect connect = {};                          // set: it takes, this way
  ImportEnd on_failure = ImportEnd::kRecompute;  // --kv-load-failure-policy
  double lease_s = 30;                           // of a lease that nobody extends; a reader does so six times as often
  uint64_t incarnation = 0;                      // 0: made up
  int64_t piece_bytes = 256 << 20;               // of one pull from another node
  std::string secret = {};                       // which all nodes know: shows whose leases are to be believed
  std::vector<std::string> peers = {};           // "host:port", the only ones whose leases are taken; none: any
  std::vector<std::string> backends = {};        // carriers that may be used, the preferred one first; none: as built
  // Where it is asked for leases over TCP, by an address that other nodes can reach; port 0: any.
  struct Address {
    std::string host;
    int port = 0;
  };
  std::optional<Address> listens = {};
  bool allows(std::string_view carrier) const {
    return backends.empty() || std::find(backends.begin(), backends.end(), carrier) != backends.end();
  }
  // UCX only where it is named, before TCP if that is, too.
  bool prefers_ucx() const {
    const auto first = std::find_if(backends.begin(), backends.end(),
                                    [](const std::string& carrier) { return carrier == "UCX" || carrier == "TCP"; });
    return first != backends.end() && *first == "UCX";
  }
  bool any() const { return gives || connect; }
};

struct EngineConfig {
  RankConfig rank;  // of each; rank.size of them
  RankTimeouts rank_timeouts;
  HandoverConfig handover;
  SchedulingPolicy scheduling;  // max_model_len 0: the model's limit, or what fits the cache when that is less
  int32_t max_waiting = 4096;   // --max-waiting-seqs
  int32_t max_choices() const { return max_waiting + rank.limits.max_sequences; }  // that run and wait at once
  bool selfcheck = false;  // after every step: check_integrity(), and that all ranks have sampled the same
  // Called on the engine thread when a device is lost and every choice has got an error. Nothing can be submitted after
  // that; the process should end with code 70.
  std::function<void(const std::string& why)> on_device_lost = {};
};

// Whether the model has as many positions as are asked for. Engine::create() asks before weights are read, too.
Status check_positions(const EngineConfig& config);

using MakeExecutor = std::function<Result<std::unique_ptr<Executor>>(const EngineConfig& config, OnStep on_step)>;

class Engine {
 public:
  // Loads the model, reserves all memory and starts the threads. Errors say what is wrong and what to change.
  static Result<std::unique_ptr<Engine>> create(const EngineConfig& config);
  // The same with hands of another make: tests.
  static Result<std::unique_ptr<Engine>> create(const EngineConfig& config, const MakeExecutor& make_executor);
  ~Engine();

  // kExhausted: the queue is full. kBadInput: can never fit, its tokens or its n choices (message has the numbers).
  // kDeviceLost. The sink is called until every choice has finished, also after cancel(), and never after that.
  Result<RequestId> submit(EngineRequest request, OutputSink sink);

  // What another node holds for a request that is not submitted: it is let go. Ignored where submit() would refuse it.
  void release(const RemotePrefix& remote);

  // Ends one choice (kStop: the server saw a stop string) or all of them (choice -1). Unknown ids are ignored.
  void cancel(RequestId request, int32_t choice = -1, FinishReason reason = FinishReason::kCancelled);

  EngineStats stats() const;
  const ModelInfo& model() const;
  int64_t weight_bytes() const;  // of a rank, with those of a draft
  int32_t max_model_len() const;
  int32_t max_choices() const;  // EngineConfig::max_choices(): what one request can have
  int32_t num_pages() const;    // of a rank
  int32_t state_pages() const;  // of those, what a sequence's recurrent state takes; 0: the model has none
  CacheSize cache_size() const;
  LeaseTable* leases();        // that it gives; null: none. Any thread, until shutdown()
  bool takes_leases() const;   // of other nodes
  int32_t num_drafts() const;  // of a step and sequence, at most; 0: no speculation

  // Ends every request with an error and stops the threads. The server drains first by not submitting and waiting.
  void shutdown();

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee

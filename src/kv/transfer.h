// Transfer: the side that takes. It keeps leases of other nodes alive, fills an engine's pages from them, and lets them
// go.
//
//   prepare   a request has come that names a lease: from now on it is extended
//   post      its pages are there: fill them, then report the end (on_end), exactly once
//   release   it is not needed (any more): its node may free it. After post() this happens by itself at the end
//
// Pages are poisoned before the first byte arrives, and after the last one the lease must still stand: else what was
// read may be another's, and the transfer has failed. Any thread may call; the work is done by threads of its own.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/thread.h"
#include "kv/peer.h"

namespace perigee {

struct TransferCounts {
  int64_t arrived = 0, failed = 0, bytes = 0;
  double seconds = 0;  // of all that arrived, together
};

class Transfer {
 public:
  struct Options {
    int32_t num_pulls = 2;          // transfers at a time, each on a thread; one more extends and releases leases
    double extend_every_s = 5;      // a sixth of a lease's lifetime
    int64_t piece_bytes = 4 << 20;  // of one read, at least a unit
  };
  // `on_end` is called on a thread of the transfer, and must not block.
  Transfer(PageStore store, CacheShape shape, Connect connect, Options options,
           std::function<void(SequenceId, Status)> on_end);
  ~Transfer() { stop(); }

  // Ends the transfers under way at their next piece, and forgets the others: they have no end. No page is written
  // after that. One caller.
  void stop();

  void prepare(SequenceId sequence, RemotePrefix remote);
  // Requires prepare(). `tokens`: those of the remote's blocks come first.
  void post(Import import, std::shared_ptr<const std::vector<int32_t>> tokens);
  void release(SequenceId sequence);  // ignored where there is nothing prepared
  void release(RemotePrefix remote);  // of a request that was refused

  TransferCounts counts() const;

 private:
  struct Prepared {
    RemotePrefix remote;
    Import import = {};
    std::shared_ptr<const std::vector<int32_t>> tokens = {};
    double next_extension_s = 0;
    bool posted = false;  // whose end releases it
  };
  struct Job {
    enum class Kind { kPull, kExtend, kRelease } kind;
    SequenceId sequence;
    Prepared what;
  };

  void run(bool pulls);
  void perform(const Job& job, std::map<std::string, std::unique_ptr<Peer>>& peers);
  std::optional<Job> next_pull(std::unique_lock<std::mutex>& lock);
  std::optional<Job> next_errand(std::unique_lock<std::mutex>& lock);
  Status pull(const Prepared& what, Peer& peer);
  Status pull_group(const Prepared& what, UnitRange units, Peer& peer, std::vector<uint8_t>& staging);
  void finish(const Job& job, const Status& status, double seconds);

  const PageStore store_;
  const CacheShape shape_;
  const Connect connect_;
  const Options options_;
  const std::function<void(SequenceId, Status)> on_end_;

  mutable std::mutex mutex_;
  WaitCondition changed_;
  std::map<SequenceId, Prepared> prepared_;
  std::deque<Job> pulls_, releases_;
  std::atomic<bool> stopping_{false};
  TransferCounts counts_;
  std::vector<Thread> threads_;
};

}  // namespace perigee

// TransferLane: what a Transfer asks of one peer, on threads of its own, so that a peer that does not answer holds up
// nobody else's transfers. Two or so pull, one extends and releases leases, and one waits for leases to grow: a pull
// takes what there is and makes room for others until there is more. A peer that cannot be reached fails all that waits
// for it, at once.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "base/thread.h"
#include "kv/counts.h"
#include "kv/peer.h"

namespace perigee {

struct TransferOptions {
  int32_t num_pulls = 2;            // transfers at a time from one peer
  double extend_every_s = 5;        // a sixth of a lease's lifetime
  double idle_s = 600;              // a peer's threads may end when it was asked nothing for so long
  double growth_wait_s = 1;         // of one question whether leases have grown; less than a peer may be silent
  double growth_limit_s = 600;      // after so long without a further block a transfer has failed
  int64_t piece_bytes = 256 << 20;  // of one pull, at least a unit; between two a stop is seen
};

struct TransferEnd {
  enum class How : uint8_t {
    kArrived,  // every byte is there and was checked
    kFailed,
    kWithdrawn,  // with its lease (LeaseStage): no fault
    kDropped,    // it was released: nobody needs it any more, whatever became of it
  };
  How how = How::kArrived;
  ImportEnd arrived = ImportEnd::kArrived;  // of kArrived: whether all that the import asks for
  std::optional<Error> why = {};            // of kFailed
};

// What all lanes of a transfer share. `on_end` is called on a thread of a lane, and must not block.
struct TransferParts {
  PageStore store;
  CacheShape shape;
  Connect connect;
  TransferOptions options;
  std::function<void(SequenceId, const TransferEnd&)> on_end;
  std::stop_source stop = {};  // ends what waits for a peer
};

// Transfer's words, for one peer. Any thread may call.
class TransferLane {
 public:
  TransferLane(const TransferParts& parts, std::string peer);  // `parts` outlive it
  ~TransferLane();
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;

  const std::string& peer() const { return peer_; }
  void begin_stop();  // the destructor waits for it

  void prepare(SequenceId sequence, RemotePrefix remote);
  bool post(const Import& import, const std::shared_ptr<const std::vector<int32_t>>& tokens);  // false: another lane's
  void release(SequenceId sequence);
  void release(const LeaseName& lease);

  bool is_idle() const;  // for idle_s
  TransferCounts counts() const;

 private:
  struct Prepared {
    RemotePrefix remote;
    Import import = {};
    std::shared_ptr<const std::vector<int32_t>> tokens = {};
    double next_extension_s = 0;
    bool posted = false;            // whose end releases it
    std::stop_source dropped = {};  // nobody needs it any more
  };
  struct Job {
    enum class Kind { kPull, kExtend, kRelease } kind;
    SequenceId sequence;
    Prepared what;
    // Of a pull: how far it is.
    bool opened = false;
    int32_t num_blocks = 0;                         // of the import's, that have arrived
    bool has_tail = false, has_checkpoint = false;  // the lease has the import's
    ImportEnd arrives() const;
    double grown_s = 0;  // when it last got one
    double seconds = 0;  // that it took so far, without its waits
  };
  enum class Outcome {
    kDone,
    kWaits,      // of a pull: for its lease to grow
    kWithdrawn,  // the lease of a pull
  };
  using Lock = std::unique_lock<std::mutex>;

  void run(bool pulls);
  void run_growth();
  Status await_growth(std::unique_ptr<Peer>& peer, uint64_t& known);
  void await_growth(Job job);
  std::optional<Job> next_pull(Lock& lock);
  std::optional<Job> next_errand(Lock& lock);
  Result<Outcome> perform(Job& job, std::unique_ptr<Peer>& peer);
  Result<LeaseHold> open(const Job& job, Peer& peer) const;
  Result<Outcome> pull(Job& job, Peer& peer);
  Status pull_blocks(const Prepared& what, int32_t first, int32_t count, Peer& peer);
  Status pull_group(const Prepared& what, UnitRange units, Peer& peer);
  void pull_again(Lock& lock);
  void finish_pull(const Job& job, const Result<Outcome>& outcome, bool reached);
  void count(const Job& job, const TransferEnd& end);
  void finish_errand(const Job& job, const Error& error, bool reached);

  const TransferParts& parts_;
  const std::string peer_;
  mutable std::mutex mutex_;
  WaitCondition changed_;
  std::map<SequenceId, Prepared> prepared_;
  std::deque<Job> pulls_, releases_;
  std::vector<Job> growing_;  // pulls that wait for their leases to grow
  int32_t num_busy_ = 0;      // threads
  double used_s_ = 0;
  TransferCounts counts_;
  std::atomic<bool> stopping_{false};
  std::vector<Thread> threads_;
};

}  // namespace perigee

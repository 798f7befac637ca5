// Transfer: the side that takes. It keeps leases of other nodes alive, fills an engine's pages from them, and lets them
// go.
//
//   prepare   a request has come that names a lease: from now on it is extended
//   post      its pages are there: fill them, then report how that ended (on_end), exactly once
//   release   it is not needed (any more): its node may free it. After post() this happens by itself at the end
//
// Pages are poisoned before the first byte arrives, and after the last one the lease must still stand: else what was
// read may be another's, and the transfer has failed. Any thread may call; the work is done by threads of its own, some
// for each peer (transfer_lane.h).
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kv/transfer_lane.h"

namespace perigee {

class Transfer {
 public:
  using Options = TransferOptions;

  // `on_end` is called on a thread of the transfer, and must not block.
  Transfer(PageStore store, CacheShape shape, Connect connect, Options options,
           std::function<void(SequenceId, const TransferEnd&)> on_end)
      : parts_{std::move(store), std::move(shape), std::move(connect), options, std::move(on_end)} {}
  ~Transfer() { stop(); }

  // Ends the transfers under way, whatever they wait for, and forgets the others: they have no end. No page is written
  // after that. One caller.
  void stop();

  void prepare(SequenceId sequence, RemotePrefix remote);
  // Requires prepare(). `tokens`: those of the remote's blocks come first.
  void post(Import import, std::shared_ptr<const std::vector<int32_t>> tokens);
  void release(SequenceId sequence);         // ignored where there is nothing prepared
  void release(const RemotePrefix& remote);  // of a request that was refused

  TransferCounts counts() const;
  int32_t num_peers() const;  // that have threads now

 private:
  using Lanes = std::list<TransferLane>;
  TransferLane& lane_of(const std::string& peer);
  Lanes take_idle();

  TransferParts parts_;
  mutable std::mutex mutex_;
  Lanes lanes_;
  TransferCounts ended_;  // of lanes that are gone
  bool stopped_ = false;
};

}  // namespace perigee

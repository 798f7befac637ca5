#include "kv/transfer.h"

#include <algorithm>
#include <utility>

namespace perigee {

void Transfer::stop() {
  Lanes lanes;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    lanes.swap(lanes_);
    for (TransferLane& lane : lanes) {
      lane.begin_stop();  // all of them, before one is waited for
      ended_ += lane.counts();
    }
  }
  parts_.stop.request_stop();
}

// Requires the mutex.
TransferLane& Transfer::lane_of(const std::string& peer) {
  const auto found = std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& lane) { return lane.peer() == peer; });
  return found != lanes_.end() ? *found : lanes_.emplace_back(parts_, peer);
}

// Requires the mutex; they end where it is not held.
Transfer::Lanes Transfer::take_idle() {
  Lanes idle;
  for (auto lane = lanes_.begin(); lane != lanes_.end();) {
    const auto next = std::next(lane);
    if (lane->is_idle()) {
      ended_ += lane->counts();
      idle.splice(idle.end(), lanes_, lane);
    }
    lane = next;
  }
  return idle;
}

void Transfer::prepare(SequenceId sequence, RemotePrefix remote) {
  Lanes idle;
  const std::lock_guard lock(mutex_);
  idle = take_idle();  // first: a lane that got no threads makes room for another of its peer
  TransferLane& lane = lane_of(remote.peer);
  lane.prepare(sequence, std::move(remote));
}

void Transfer::post(Import import, std::shared_ptr<const std::vector<int32_t>> tokens) {
  const std::lock_guard lock(mutex_);
  const SequenceId sequence = import.sequence;
  const bool posted = std::any_of(lanes_.begin(), lanes_.end(), [&](auto& lane) { return lane.post(import, tokens); });
  CHECK(posted, "sequence ", sequence, " prepared no transfer");
}

void Transfer::release(SequenceId sequence) {
  const std::lock_guard lock(mutex_);
  for (TransferLane& lane : lanes_) lane.release(sequence);
}

void Transfer::release(const RemotePrefix& remote) {
  const std::lock_guard lock(mutex_);
  if (!stopped_) lane_of(remote.peer).release(remote.lease);  // else it ends by itself
}

TransferCounts Transfer::counts() const {
  const std::lock_guard lock(mutex_);
  TransferCounts sum = ended_;
  for (const TransferLane& lane : lanes_) sum += lane.counts();
  return sum;
}

int32_t Transfer::num_peers() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int32_t>(lanes_.size());
}

}  // namespace perigee

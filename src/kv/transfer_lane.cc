#include "kv/transfer_lane.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace perigee {

TransferLane::TransferLane(const TransferParts& parts, std::string peer)
    : parts_(parts), peer_(std::move(peer)), used_s_(system_clock().now_s()) {
  try {
    for (int32_t i = 0; i <= parts_.options.num_pulls; ++i) threads_.emplace_back([this, i] { run(i > 0); });
  } catch (const std::system_error& error) {
    log_warning("no threads for transfers from ", peer_, ": ", error.what());
    begin_stop();
    for (Thread& thread : threads_) thread.join();
    threads_.clear();
  }
}

TransferLane::~TransferLane() {
  begin_stop();
  for (Thread& thread : threads_) thread.join();
}

void TransferLane::begin_stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
}

void TransferLane::prepare(SequenceId sequence, RemotePrefix remote) {
  const std::lock_guard lock(mutex_);
  const double next_s = system_clock().now_s() + parts_.options.extend_every_s;
  const bool fresh =
      prepared_.emplace(sequence, Prepared{.remote = std::move(remote), .next_extension_s = next_s}).second;
  CHECK(fresh, "sequence ", sequence, " prepares two transfers");
  changed_.notify_all();
}

bool TransferLane::post(const Import& import, const std::shared_ptr<const std::vector<int32_t>>& tokens) {
  const std::lock_guard lock(mutex_);
  const auto found = prepared_.find(import.sequence);
  if (found == prepared_.end()) return false;
  CHECK(!found->second.posted, "sequence ", import.sequence, " posts two transfers");
  if (threads_.empty()) {
    prepared_.erase(found);
    ++counts_.failed;
    parts_.on_end(import.sequence, Error(Code::kExhausted, "no threads for transfers"));
    return true;
  }
  found->second.posted = true;
  found->second.import = import;
  found->second.tokens = tokens;
  pulls_.push_back({Job::Kind::kPull, found->first, found->second});
  changed_.notify_all();
  return true;
}

void TransferLane::release(SequenceId sequence) {
  const std::lock_guard lock(mutex_);
  const auto found = prepared_.find(sequence);
  if (found == prepared_.end() || found->second.posted) return;
  releases_.push_back({Job::Kind::kRelease, sequence, std::move(found->second)});
  prepared_.erase(found);
  changed_.notify_all();
}

void TransferLane::release(const LeaseName& lease) {
  const std::lock_guard lock(mutex_);
  releases_.push_back({Job::Kind::kRelease, SequenceId(), {.remote = {.lease = lease}}});
  changed_.notify_all();
}

bool TransferLane::is_idle() const {
  const std::lock_guard lock(mutex_);
  if (threads_.empty()) return prepared_.empty();
  return prepared_.empty() && pulls_.empty() && releases_.empty() && num_busy_ == 0 &&
         system_clock().now_s() - used_s_ >= parts_.options.idle_s;
}

TransferCounts TransferLane::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::optional<TransferLane::Job> TransferLane::next_pull(Lock& lock) {
  changed_.wait(lock, [&] { return stopping_ || !pulls_.empty(); });
  if (stopping_) return std::nullopt;
  Job job = std::move(pulls_.front());
  pulls_.pop_front();
  return job;
}

// A release, or else a lease that is to be extended.
std::optional<TransferLane::Job> TransferLane::next_errand(Lock& lock) {
  for (;;) {
    if (stopping_) return std::nullopt;  // leases that are left end by themselves
    if (!releases_.empty()) {
      Job job = std::move(releases_.front());
      releases_.pop_front();
      return job;
    }
    const double now_s = system_clock().now_s();
    double next_s = now_s + parts_.options.extend_every_s;
    for (auto& [sequence, prepared] : prepared_) {
      if (prepared.next_extension_s <= now_s) {
        prepared.next_extension_s = now_s + parts_.options.extend_every_s;
        return Job{Job::Kind::kExtend, sequence, {.remote = prepared.remote}};
      }
      next_s = std::min(next_s, prepared.next_extension_s);
    }
    changed_.wait_for(lock, std::chrono::duration<double>(next_s - now_s));
  }
}

void TransferLane::run(bool pulls) {
  std::unique_ptr<Peer> peer;
  Lock lock(mutex_);
  while (const std::optional<Job> job = pulls ? next_pull(lock) : next_errand(lock)) {
    ++num_busy_;
    lock.unlock();
    const double begin_s = system_clock().now_s();
    Status status;
    try {
      status = perform(*job, peer);
    } catch (const std::bad_alloc&) {
      status = Error(Code::kExhausted, "no memory for a transfer");
    }
    const bool reached = peer != nullptr;
    if (!status.ok()) peer.reset();  // made anew for the next one
    if (pulls)
      finish_pull(*job, status, reached, system_clock().now_s() - begin_s);
    else
      finish_errand(*job, status, reached);
    lock.lock();
    --num_busy_;
    used_s_ = system_clock().now_s();
  }
}

Status TransferLane::perform(const Job& job, std::unique_ptr<Peer>& peer) {
  if (!peer) {
    ASSIGN_OR_RETURN(peer, parts_.connect(peer_, parts_.shape, parts_.stop.get_token()));
  }
  const LeaseName& lease = job.what.remote.lease;
  switch (job.kind) {
    case Job::Kind::kPull: return pull(job.what, *peer);
    case Job::Kind::kExtend: return peer->extend(lease);
    case Job::Kind::kRelease: return peer->release(lease);
  }
  return {};
}

// The lease is let go afterwards: nobody waits for that. Where the peer was not reached it ends by itself, and what
// waited for the same peer has failed with this.
void TransferLane::finish_pull(const Job& job, const Status& status, bool reached, double seconds) {
  std::vector<SequenceId> ended = {job.sequence};
  {
    const std::lock_guard lock(mutex_);
    if (reached) {
      const auto found = prepared_.find(job.sequence);
      releases_.push_back({Job::Kind::kRelease, job.sequence, {.remote = std::move(found->second.remote)}});
    } else {
      for (const Job& waiting : pulls_) ended.push_back(waiting.sequence);
      pulls_.clear();
    }
    for (const SequenceId sequence : ended) prepared_.erase(sequence);
    if (status.ok()) {
      const Import& import = job.what.import;
      const CacheShape& shape = parts_.shape;
      ++counts_.arrived;
      counts_.bytes += std::ssize(import.blocks) * shape.block_bytes;
      if (!import.checkpoint.empty()) counts_.bytes += shape.state_units() * shape.state_unit_bytes;
      counts_.seconds += seconds;
    } else {
      counts_.failed += std::ssize(ended);
    }
    changed_.notify_all();
  }
  for (const SequenceId sequence : ended) parts_.on_end(sequence, status);
}

void TransferLane::finish_errand(const Job& job, const Status& status, bool reached) {
  if (status.ok()) return;
  log_warning("a lease of ", peer_, " could not be ",
              job.kind == Job::Kind::kExtend ? "extended: " : "released: ", status.error().message);
  if (reached) return;
  // Nor can the others now.
  const std::lock_guard lock(mutex_);
  releases_.clear();
  const double next_s = system_clock().now_s() + parts_.options.extend_every_s;
  for (auto& [sequence, prepared] : prepared_) prepared.next_extension_s = next_s;
}

Status TransferLane::pull(const Prepared& what, Peer& peer) {
  const Import& import = what.import;
  RETURN_IF_ERROR(parts_.store.poison(
      {.first_block = import.first_block, .blocks = import.blocks, .checkpoint = import.checkpoint}));
  const LeaseName& lease = what.remote.lease;
  const auto num_tokens = static_cast<size_t>(what.remote.num_blocks) * kBlockTokens;
  if (what.tokens->size() < num_tokens) return bad_input("a lease of more tokens than the prompt has", "num_blocks");
  RETURN_IF_ERROR(peer.open(lease, std::span(*what.tokens).first(num_tokens), what.remote.num_blocks));
  const auto num_blocks = static_cast<int32_t>(import.blocks.size());
  RETURN_IF_ERROR(pull_group(what, {UnitGroup::kBlocks, import.first_block, num_blocks}, peer));
  if (!import.checkpoint.empty())
    RETURN_IF_ERROR(pull_group(what, {UnitGroup::kState, 0, parts_.shape.state_units()}, peer));
  return peer.extend(lease);  // that it stands after the last byte
}

Status TransferLane::pull_group(const Prepared& what, UnitRange units, Peer& peer) {
  const Import& import = what.import;
  const int64_t unit_bytes = parts_.shape.unit_bytes(units.group);
  const int64_t in_piece = std::max<int64_t>(1, parts_.options.piece_bytes / std::max<int64_t>(1, unit_bytes));
  for (int32_t done = 0; done < units.count;) {
    const auto count = static_cast<int32_t>(std::min<int64_t>(in_piece, units.count - done));
    const UnitRange piece{units.group, units.first + done, count};
    if (stopping_) return Error(Code::kUnavailable, "the engine is shutting down");
    RETURN_IF_ERROR(
        peer.pull(what.remote.lease, piece, parts_.store,
                  {.first_block = import.first_block, .blocks = import.blocks, .checkpoint = import.checkpoint}));
    done += piece.count;
  }
  return {};
}

}  // namespace perigee

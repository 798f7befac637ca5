#include "kv/transfer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/log.h"

namespace perigee {
Transfer::Transfer(PageStore store, CacheShape shape, Connect connect, Options options,
                   std::function<void(SequenceId, Status)> on_end)
    : store_(std::move(store)),
      shape_(std::move(shape)),
      connect_(std::move(connect)),
      options_(options),
      on_end_(std::move(on_end)) {
  for (int32_t i = 0; i <= options_.num_pulls; ++i) threads_.emplace_back([this, i] { run(i > 0); });
}

void Transfer::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (Thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void Transfer::prepare(SequenceId sequence, RemotePrefix remote) {
  const std::lock_guard lock(mutex_);
  Prepared prepared{.remote = std::move(remote), .next_extension_s = system_clock().now_s() + options_.extend_every_s};
  const bool fresh = prepared_.emplace(sequence, std::move(prepared)).second;
  CHECK(fresh, "sequence ", sequence, " prepares two transfers");
  changed_.notify_all();
}

void Transfer::post(Import import, std::shared_ptr<const std::vector<int32_t>> tokens) {
  const std::lock_guard lock(mutex_);
  const auto found = prepared_.find(import.sequence);
  CHECK(found != prepared_.end() && !found->second.posted, "sequence ", import.sequence, " prepared no transfer");
  found->second.posted = true;
  found->second.import = std::move(import);
  found->second.tokens = std::move(tokens);
  pulls_.push_back({Job::Kind::kPull, found->first, found->second});
  changed_.notify_all();
}

void Transfer::release(SequenceId sequence) {
  const std::lock_guard lock(mutex_);
  const auto found = prepared_.find(sequence);
  if (found == prepared_.end() || found->second.posted) return;
  releases_.push_back({Job::Kind::kRelease, sequence, std::move(found->second)});
  prepared_.erase(found);
  changed_.notify_all();
}

void Transfer::release(RemotePrefix remote) {
  const std::lock_guard lock(mutex_);
  releases_.push_back({Job::Kind::kRelease, SequenceId(), {.remote = std::move(remote)}});
  changed_.notify_all();
}

TransferCounts Transfer::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::optional<Transfer::Job> Transfer::next_pull(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return stopping_ || !pulls_.empty(); });
  if (stopping_) return std::nullopt;
  Job job = std::move(pulls_.front());
  pulls_.pop_front();
  return job;
}

// A release, or else a lease that is to be extended.
std::optional<Transfer::Job> Transfer::next_errand(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    if (stopping_) return std::nullopt;  // leases that are left end by themselves
    if (!releases_.empty()) {
      Job job = std::move(releases_.front());
      releases_.pop_front();
      return job;
    }
    const double now_s = system_clock().now_s();
    double next_s = now_s + options_.extend_every_s;
    for (auto& [sequence, prepared] : prepared_) {
      if (prepared.next_extension_s <= now_s) {
        prepared.next_extension_s = now_s + options_.extend_every_s;
        return Job{Job::Kind::kExtend, sequence, prepared};
      }
      next_s = std::min(next_s, prepared.next_extension_s);
    }
    changed_.wait_for(lock, std::chrono::duration<double>(next_s - now_s));
  }
}

void Transfer::run(bool pulls) {
  std::map<std::string, std::unique_ptr<Peer>> peers;  // by name
  std::unique_lock lock(mutex_);
  while (const std::optional<Job> job = pulls ? next_pull(lock) : next_errand(lock)) {
    lock.unlock();
    perform(*job, peers);
    lock.lock();
  }
}

void Transfer::perform(const Job& job, std::map<std::string, std::unique_ptr<Peer>>& peers) {
  const double begin_s = system_clock().now_s();
  const RemotePrefix& remote = job.what.remote;
  std::unique_ptr<Peer>& peer = peers[remote.peer];
  Status status;
  if (!peer) {
    auto made = connect_(remote.peer, shape_);
    if (made.ok())
      peer = std::move(*made);
    else
      status = made.error();
  }
  if (status.ok()) {
    switch (job.kind) {
      case Job::Kind::kPull: status = pull(job.what, *peer); break;
      case Job::Kind::kExtend: status = peer->extend(remote.lease); break;
      case Job::Kind::kRelease: status = peer->release(remote.lease); break;
    }
  }
  if (job.kind == Job::Kind::kPull) {
    const double seconds = system_clock().now_s() - begin_s;
    if (peer) (void)peer->release(remote.lease);  // else it ends by itself
    finish(job, status, seconds);
  } else if (!status.ok()) {
    log_warning("a lease of ", remote.peer, " could not be ",
                job.kind == Job::Kind::kExtend ? "extended: " : "released: ", status.error().message);
  }
  if (!status.ok()) peers.erase(remote.peer);  // made anew for the next one
}

void Transfer::finish(const Job& job, const Status& status, double seconds) {
  const Import& import = job.what.import;
  {
    const std::lock_guard lock(mutex_);
    prepared_.erase(job.sequence);
    ++(status.ok() ? counts_.arrived : counts_.failed);
    if (status.ok()) {
      counts_.bytes += std::ssize(import.blocks) * shape_.block_bytes;
      if (!import.checkpoint.empty()) counts_.bytes += shape_.state_units() * shape_.state_unit_bytes;
      counts_.seconds += seconds;
    }
  }
  on_end_(job.sequence, status);
}

Status Transfer::pull(const Prepared& what, Peer& peer) {
  const Import& import = what.import;
  store_.poison({.first_block = import.first_block, .blocks = import.blocks, .checkpoint = import.checkpoint});
  const LeaseName& lease = what.remote.lease;
  const auto num_tokens = static_cast<size_t>(what.remote.num_blocks) * kBlockTokens;
  if (what.tokens->size() < num_tokens) return bad_input("a lease of more tokens than the prompt has", "num_blocks");
  RETURN_IF_ERROR(peer.open(lease, std::span(*what.tokens).first(num_tokens), what.remote.num_blocks));
  std::vector<uint8_t> staging;
  const auto num_blocks = static_cast<int32_t>(import.blocks.size());
  RETURN_IF_ERROR(pull_group(what, {UnitGroup::kBlocks, import.first_block, num_blocks}, peer, staging));
  if (!import.checkpoint.empty())
    RETURN_IF_ERROR(pull_group(what, {UnitGroup::kState, 0, shape_.state_units()}, peer, staging));
  return peer.extend(lease);  // that it stands after the last byte
}

Status Transfer::pull_group(const Prepared& what, UnitRange units, Peer& peer, std::vector<uint8_t>& staging) {
  const Import& import = what.import;
  const int64_t unit_bytes = shape_.unit_bytes(units.group);
  const auto in_piece =
      static_cast<int32_t>(std::max<int64_t>(1, options_.piece_bytes / std::max<int64_t>(1, unit_bytes)));
  for (int32_t done = 0; done < units.count;) {
    const UnitRange piece{units.group, units.first + done, std::min(in_piece, units.count - done)};
    if (stopping_) return Error(Code::kUnavailable, "the engine is shutting down");
    staging.resize(static_cast<size_t>(piece.count * unit_bytes));
    RETURN_IF_ERROR(peer.read(what.remote.lease, piece, staging));
    store_.scatter({.first_block = import.first_block, .blocks = import.blocks, .checkpoint = import.checkpoint}, piece,
                   staging);
    done += piece.count;
  }
  return {};
}

}  // namespace perigee

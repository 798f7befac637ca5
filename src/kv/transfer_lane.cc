#include "kv/transfer_lane.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace perigee {
namespace {

constexpr double kPauseS = 0.05;

}  // namespace

TransferLane::TransferLane(const TransferParts& parts, std::string peer)
    : parts_(parts), peer_(std::move(peer)), used_s_(system_clock().now_s()) {
  try {
    threads_.emplace_back([this] { run(false); });
    threads_.emplace_back([this] { run_growth(); });
    for (int32_t i = 0; i < parts_.options.num_pulls; ++i) threads_.emplace_back([this] { run(true); });
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
    const Error why(Code::kExhausted, "no threads for transfers");
    parts_.on_end(import.sequence, {.how = TransferEnd::How::kFailed, .why = why});
    return true;
  }
  found->second.posted = true;
  found->second.import = import;
  found->second.tokens = tokens;
  pulls_.push_back({.kind = Job::Kind::kPull, .sequence = found->first, .what = found->second});
  changed_.notify_all();
  return true;
}

void TransferLane::release(SequenceId sequence) {
  Lock lock(mutex_);
  const auto found = prepared_.find(sequence);
  if (found == prepared_.end()) return;
  if (found->second.posted) {  // its end comes soon
    found->second.dropped.request_stop();
    return pull_again(lock);
  }
  releases_.push_back({.kind = Job::Kind::kRelease, .sequence = sequence, .what = std::move(found->second)});
  prepared_.erase(found);
  changed_.notify_all();
}

void TransferLane::release(const LeaseName& lease) {
  const std::lock_guard lock(mutex_);
  releases_.push_back({.kind = Job::Kind::kRelease, .what = {.remote = {.lease = lease}}});
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
        return Job{.kind = Job::Kind::kExtend, .sequence = sequence, .what = {.remote = prepared.remote}};
      }
      next_s = std::min(next_s, prepared.next_extension_s);
    }
    changed_.wait_for(lock, std::chrono::duration<double>(next_s - now_s));
  }
}

void TransferLane::run(bool pulls) {
  std::unique_ptr<Peer> peer;
  Lock lock(mutex_);
  while (std::optional<Job> job = pulls ? next_pull(lock) : next_errand(lock)) {
    ++num_busy_;
    lock.unlock();
    const double begin_s = system_clock().now_s();
    Result<Outcome> outcome = Outcome::kDone;
    try {
      outcome = perform(*job, peer);
    } catch (const std::bad_alloc&) {
      outcome = Error(Code::kExhausted, "no memory for a transfer");
    }
    const bool reached = peer != nullptr;
    if (!outcome.ok()) peer.reset();  // made anew for the next one
    job->seconds += system_clock().now_s() - begin_s;
    if (outcome.ok() && *outcome == Outcome::kWaits)
      await_growth(std::move(*job));
    else if (pulls)
      finish_pull(*job, outcome, reached);
    else if (!outcome.ok())
      finish_errand(*job, outcome.error(), reached);
    lock.lock();
    --num_busy_;
    used_s_ = system_clock().now_s();
  }
}

void TransferLane::await_growth(Job job) {
  const std::lock_guard lock(mutex_);
  if (job.what.dropped.stop_requested())
    pulls_.push_back(std::move(job));
  else
    growing_.push_back(std::move(job));
  changed_.notify_all();
}

// Requires the lock. All of them: which lease has grown its pull finds out.
void TransferLane::pull_again(Lock&) {
  std::move(growing_.begin(), growing_.end(), std::back_inserter(pulls_));
  growing_.clear();
  changed_.notify_all();
}

void TransferLane::run_growth() {
  std::unique_ptr<Peer> peer;
  uint64_t known = 0;
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !growing_.empty(); });
    if (stopping_) return;
    lock.unlock();
    Status status;
    try {
      status = await_growth(peer, known);
    } catch (const std::bad_alloc&) {
      status = Error(Code::kExhausted, "no memory to wait for a lease");
    }
    if (!status.ok()) peer.reset();
    if (!status.ok()) sleep_s(kPauseS);  // the pulls find out what it is
    lock.lock();
    pull_again(lock);
  }
}

Status TransferLane::await_growth(std::unique_ptr<Peer>& peer, uint64_t& known) {
  if (!peer) {
    ASSIGN_OR_RETURN(peer, parts_.connect(peer_, parts_.shape, parts_.stop.get_token()));
    known = 0;
  }
  ASSIGN_OR_RETURN(known, peer->await_growth(known, parts_.options.growth_wait_s));
  return {};
}

Result<TransferLane::Outcome> TransferLane::perform(Job& job, std::unique_ptr<Peer>& peer) {
  if (!peer) {
    ASSIGN_OR_RETURN(peer, parts_.connect(peer_, parts_.shape, parts_.stop.get_token()));
  }
  const LeaseName& lease = job.what.remote.lease;
  switch (job.kind) {
    case Job::Kind::kPull: return pull(job, *peer);
    case Job::Kind::kExtend: RETURN_IF_ERROR(peer->extend(lease)); break;
    case Job::Kind::kRelease: RETURN_IF_ERROR(peer->release(lease)); break;
  }
  return Outcome::kDone;
}

ImportEnd TransferLane::Job::arrives() const {
  if (!what.import.checkpoint.empty() && !has_checkpoint) return ImportEnd::kWithoutCheckpoint;
  return what.import.has_tail() && !has_tail ? ImportEnd::kWithoutTail : ImportEnd::kArrived;
}

void TransferLane::count(const Job& job, const TransferEnd& end) {
  switch (end.how) {
    case TransferEnd::How::kArrived: break;
    case TransferEnd::How::kFailed: ++counts_.failed; return;
    case TransferEnd::How::kWithdrawn: ++counts_.withdrawn; return;
    case TransferEnd::How::kDropped: ++counts_.dropped; return;
  }
  const Import& import = job.what.import;
  const CacheShape& shape = parts_.shape;
  ++counts_.arrived;
  counts_.bytes += job.num_blocks * shape.bytes_of_block();
  const int num_states = (job.has_checkpoint ? 1 : 0) + (job.has_tail && !import.tail_state.empty() ? 1 : 0);
  counts_.bytes += num_states * shape.state_units() * shape.state_unit_bytes;
  counts_.seconds += job.seconds;
}

// The lease is let go afterwards: nobody waits for that. Where the peer was not reached it ends by itself, and what
// waited for the same peer has failed with this.
void TransferLane::finish_pull(const Job& job, const Result<Outcome>& outcome, bool reached) {
  using How = TransferEnd::How;
  std::vector<std::pair<SequenceId, TransferEnd>> ends;
  // Requires the lock.
  const auto end = [&](const Job& of) {
    TransferEnd how = {How::kWithdrawn};
    if (outcome.ok() && *outcome == Outcome::kDone) how = {How::kArrived, of.arrives()};
    if (!outcome.ok()) how = {.how = How::kFailed, .why = outcome.error()};
    if (!outcome.ok() && of.what.dropped.stop_requested()) how = {How::kDropped};
    count(of, how);
    prepared_.erase(of.sequence);
    ends.emplace_back(of.sequence, std::move(how));
  };
  {
    Lock lock(mutex_);
    if (reached) {
      const auto found = prepared_.find(job.sequence);
      releases_.push_back(
          {.kind = Job::Kind::kRelease, .sequence = job.sequence, .what = {.remote = std::move(found->second.remote)}});
    } else {
      pull_again(lock);
      for (const Job& waiting : pulls_) end(waiting);
      pulls_.clear();
    }
    end(job);
    changed_.notify_all();
  }
  for (const auto& [sequence, how] : ends) parts_.on_end(sequence, how);
}

void TransferLane::finish_errand(const Job& job, const Error& error, bool reached) {
  log_warning("a lease of ", peer_, " could not be ",
              job.kind == Job::Kind::kExtend ? "extended: " : "released: ", error.message);
  if (reached) return;
  // Nor can the others now.
  const std::lock_guard lock(mutex_);
  releases_.clear();
  const double next_s = system_clock().now_s() + parts_.options.extend_every_s;
  for (auto& [sequence, prepared] : prepared_) prepared.next_extension_s = next_s;
}

Result<LeaseHold> TransferLane::open(const Job& job, Peer& peer) const {
  const auto& [remote, import] = std::tie(job.what.remote, job.what.import);
  RETURN_IF_ERROR(parts_.store.poison(unit_pages(import)));
  if (std::ssize(*job.what.tokens) < int64_t{remote.num_blocks} * kBlockTokens)
    return bad_input("a lease of more tokens than the prompt has", "num_blocks");
  const auto wanted = std::span(*job.what.tokens).first(static_cast<size_t>(import.num_tokens));
  return peer.open(remote.lease, wanted, remote.num_blocks);
}

// What there is of the lease.
Result<TransferLane::Outcome> TransferLane::pull(Job& job, Peer& peer) {
  const Import& import = job.what.import;
  const LeaseName& lease = job.what.remote.lease;
  for (;;) {
    if (job.what.dropped.stop_requested()) return dropped_import();
    ASSIGN_OR_RETURN(const LeaseHold hold, job.opened ? peer.extend(lease) : open(job, peer));
    const double now_s = system_clock().now_s();
    if (!std::exchange(job.opened, true)) job.grown_s = now_s;
    job.has_tail = import.has_tail() && hold.num_tokens == import.num_tokens;
    job.has_checkpoint = !import.checkpoint.empty() && hold.has_checkpoint;
    if (hold.stage == LeaseStage::kWithdrawn) return Outcome::kWithdrawn;
    const int32_t first = import.first_block + job.num_blocks, num_new = hold.num_blocks - first;
    const int64_t num_wanted = std::ssize(import.blocks) - (import.has_tail() && !job.has_tail ? 1 : 0);
    if (num_new > num_wanted - job.num_blocks)
      return bad_input("a lease of more blocks than it was said to have", "num_blocks");
    if (num_new > 0) {
      if (const Status pulled = pull_blocks(job.what, first, num_new, peer); !pulled.ok()) {
        // Refused, perhaps because it was withdrawn meanwhile.
        if (pulled.error().code != Code::kNotFound) return pulled.error();
        ASSIGN_OR_RETURN(const LeaseHold now, peer.extend(lease));
        if (now.stage != LeaseStage::kWithdrawn) return pulled.error();
        return Outcome::kWithdrawn;
      }
      job.num_blocks += num_new;
      job.grown_s = now_s;
    }
    if (hold.stage == LeaseStage::kWhole && job.num_blocks != num_wanted)
      return bad_input("a lease of fewer blocks than it was said to have");
    if (hold.stage == LeaseStage::kWhole) break;
    if (num_new > 0) continue;
    if (now_s - job.grown_s > parts_.options.growth_limit_s)
      return Error(Code::kDeadline, "the prefill node has computed nothing more of the prompt for too long");
    return Outcome::kWaits;
  }
  // There was no room for a checkpoint there, and a sequence of other last tokens cannot start from the tail.
  if (job.arrives() == ImportEnd::kWithoutCheckpoint && !job.has_tail) return Outcome::kWithdrawn;
  if (job.has_checkpoint) RETURN_IF_ERROR(pull_group(job.what, parts_.shape.checkpoint_units(), peer));
  if (!import.tail_state.empty() && job.has_tail)
    RETURN_IF_ERROR(pull_group(job.what, parts_.shape.tail_units(), peer));
  ASSIGN_OR_RETURN(const LeaseHold last, peer.extend(lease));  // it must stand after the last byte
  if (last.stage != LeaseStage::kWhole) return bad_input("a lease that was whole and is not any more", "stage");
  return Outcome::kDone;
}

// With what a draft keeps of them.
Status TransferLane::pull_blocks(const Prepared& what, int32_t first, int32_t count, Peer& peer) {
  RETURN_IF_ERROR(pull_group(what, {UnitGroup::kBlocks, first, count}, peer));
  return pull_group(what, parts_.shape.draft_units(first, count), peer);
}

Status TransferLane::pull_group(const Prepared& what, UnitRange units, Peer& peer) {
  const Import& import = what.import;
  const int64_t unit_bytes = parts_.shape.unit_bytes(units.group);
  const int64_t in_piece = std::max<int64_t>(1, parts_.options.piece_bytes / std::max<int64_t>(1, unit_bytes));
  for (int32_t done = 0; done < units.count;) {
    const auto count = static_cast<int32_t>(std::min<int64_t>(in_piece, units.count - done));
    const UnitRange piece{units.group, units.first + done, count};
    if (stopping_) return Error(Code::kUnavailable, "the engine is shutting down");
    if (what.dropped.stop_requested()) return dropped_import();
    RETURN_IF_ERROR(peer.pull(what.remote.lease, piece, parts_.store, unit_pages(import), what.dropped.get_token()));
    done += piece.count;
  }
  return {};
}

}  // namespace perigee

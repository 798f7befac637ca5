#include "comm/cuda/peer_comms.h"

#include <cuda_runtime.h>
#include <fmt/core.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "base/check.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_kernels.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/per_device.h"

namespace perigee {
namespace {

// A rank in a group.
struct Member {
  Buffer memory;  // PeerMemory and mailboxes
  std::unique_ptr<PeerComm> comm;
};

using Group = std::vector<Member>;

PeerMemory* memory_of(const Member& member) {
  return reinterpret_cast<PeerMemory*>(member.memory.data());
}

Error lost() {
  return {Code::kDeviceLost, "another rank of the group is lost"};
}

void reserve(Member& member, size_t size, uint64_t first_epoch) {
  member.memory = device_buffer(sizeof(PeerMemory) + 2 * size * mailbox_bytes(static_cast<int32_t>(size)));
  if (member.memory.data() == nullptr) return;
  cuda_ok(cudaMemset(member.memory.data(), 0, member.memory.size()), "clearing mailboxes");
  const uint64_t counter = first_epoch << kEpochShift;
  device_copy(&memory_of(member)->counter, &counter, sizeof(counter));
}

Status reach(int device, int other) {
  if (device == other) return {};
  const auto refused = [&](const char* why) {
    return Error(Code::kUnavailable, fmt::format("GPU {} cannot reach the memory of GPU {}: {}", device, other, why),
                 "device");
  };
  int can = 0;
  if (const cudaError_t error = cudaDeviceCanAccessPeer(&can, device, other); error != cudaSuccess)
    return refused(cudaGetErrorString(error));
  if (can == 0) return refused("no peer access between them");
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // else the next launch would find it
  if (error == cudaErrorPeerAccessAlreadyEnabled) return {};
  return refused(cudaGetErrorString(error));
}

}  // namespace

struct PeerComms::State {
  State(int32_t the_size, int32_t the_dcp_size, uint64_t the_first_epoch)
      : size(the_size), dcp_size(the_dcp_size), first_epoch(the_first_epoch), ranks(static_cast<size_t>(the_size)) {
    all.resize(ranks.size());
    if (dcp_size > 1)
      for (int32_t g = 0; g < size / dcp_size; ++g) dcp.emplace_back(static_cast<size_t>(dcp_size));
  }

  struct Rank {
    int device = -1;
    Buffer words;  // PeerWords
    std::atomic<PeerWords*> shown{nullptr};
  };

  bool meet();
  void fail(Error error);
  Status reserve_rank(int32_t r);
  Status reach_others(int32_t r) const;
  Comm* join(Group& group, int32_t first_rank, int32_t rank, uint64_t* come_to);

  const int32_t size, dcp_size;
  const uint64_t first_epoch;
  std::atomic<bool> aborted{false};
  std::vector<Rank> ranks;  // never resized
  Group all;
  std::vector<Group> dcp;

  std::mutex mutex;  // guards what follows, and the meetings
  std::condition_variable changed;
  int32_t num_met = 0;
  std::optional<Error> failure;
};

// Waits until all ranks have come. False: one has failed, or the group aborts.
bool PeerComms::State::meet() {
  std::unique_lock lock(mutex);
  const int32_t target = (num_met / size + 1) * size;
  ++num_met;
  changed.notify_all();
  changed.wait(lock, [&] { return num_met >= target || failure || aborted; });
  return !failure && !aborted;
}

void PeerComms::State::fail(Error error) {
  const std::lock_guard lock(mutex);
  if (!failure) failure = std::move(error);
  changed.notify_all();
}

Status PeerComms::State::reserve_rank(int32_t r) {
  Rank& rank = ranks[static_cast<size_t>(r)];
  rank.device = current_device();
  rank.words = pinned_buffer(sizeof(PeerWords));
  reserve(all[static_cast<size_t>(r)], static_cast<size_t>(size), first_epoch);
  if (dcp_size > 1)
    reserve(dcp[static_cast<size_t>(r / dcp_size)][static_cast<size_t>(r % dcp_size)], static_cast<size_t>(dcp_size),
            first_epoch);
  cuda_ok(load_peer_kernels(), "loading collectives");
  RETURN_IF_ERROR(device_status());
  auto* words = reinterpret_cast<PeerWords*>(rank.words.data());
  words->come_to_all = words->come_to_dcp = first_epoch;
  const std::lock_guard lock(mutex);
  words->abort = aborted ? 1 : 0;
  rank.shown = words;
  return {};
}

Status PeerComms::State::reach_others(int32_t r) const {
  const int device = ranks[static_cast<size_t>(r)].device;
  for (const Rank& other : ranks) RETURN_IF_ERROR(reach(device, other.device));
  return {};
}

// Once all ranks have reserved theirs.
Comm* PeerComms::State::join(Group& group, int32_t first_rank, int32_t rank, uint64_t* come_to) {
  const Rank& own = ranks[static_cast<size_t>(rank)];
  PeerView view{.rank = rank - first_rank, .size = static_cast<int32_t>(group.size())};
  for (size_t i = 0; i < group.size(); ++i) view.memory[i] = memory_of(group[i]);
  for (size_t i = 0; i < ranks.size(); ++i)
    for (size_t j = 0; j < i; ++j) view.one_gpu |= ranks[i].device == ranks[j].device;
  view.abort = &own.shown.load()->abort;
  view.come_to = come_to;
  view.one_shot_bytes = one_shot_bytes(view.size);
  Member& member = group[static_cast<size_t>(view.rank)];
  member.comm = std::make_unique<PeerComm>(view, aborted);
  return member.comm.get();
}

PeerComms::PeerComms(int32_t size, int32_t dcp_size, uint64_t first_epoch) {
  CHECK(size >= 1 && dcp_size >= 1 && size % dcp_size == 0, size, " ranks in groups of ", dcp_size);
  state_ = std::make_unique<State>(size, dcp_size, first_epoch);
}

PeerComms::~PeerComms() = default;

Result<PeerComms::Pair> PeerComms::connect(int32_t rank) {
  State& s = *state_;
  if (s.size > kMostPeers)
    return Error(Code::kUnavailable, fmt::format("{} GPUs in a group; there may be {}", s.size, kMostPeers), "device");
  const auto failed = [&]() -> Error {
    const std::lock_guard lock(s.mutex);
    return s.failure ? *s.failure : lost();
  };
  if (Status reserved = s.reserve_rank(rank); !reserved.ok()) s.fail(reserved.error());
  if (!s.meet()) return failed();
  if (Status reached = s.reach_others(rank); !reached.ok()) s.fail(reached.error());
  if (!s.meet()) return failed();
  PeerWords* words = s.ranks[static_cast<size_t>(rank)].shown;
  Pair pair{.all = s.join(s.all, 0, rank, &words->come_to_all), .dcp = &Comm::alone()};
  if (s.dcp_size > 1) {
    const int32_t group = rank / s.dcp_size;
    pair.dcp = s.join(s.dcp[static_cast<size_t>(group)], group * s.dcp_size, rank, &words->come_to_dcp);
  }
  return pair;
}

void PeerComms::abort() {
  const std::lock_guard lock(state_->mutex);
  state_->aborted = true;
  for (State::Rank& rank : state_->ranks)
    if (PeerWords* words = rank.shown) __atomic_store_n(&words->abort, 1, __ATOMIC_RELEASE);
  state_->changed.notify_all();
}

int64_t PeerComms::num_meetings(int32_t rank) const {
  const PeerWords* words = state_->ranks[static_cast<size_t>(rank)].shown;
  if (words == nullptr) return 0;
  const uint64_t all = __atomic_load_n(&words->come_to_all, __ATOMIC_RELAXED);
  const uint64_t dcp = __atomic_load_n(&words->come_to_dcp, __ATOMIC_RELAXED);
  return static_cast<int64_t>(all - state_->first_epoch + (dcp - state_->first_epoch));
}

}  // namespace perigee

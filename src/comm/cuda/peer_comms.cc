#include "comm/cuda/peer_comms.h"

#include <cuda_runtime.h>
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_kernels.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/per_device.h"

namespace perigee {
namespace {

// A rank in a group.
struct Member {
  Buffer memory;  // PeerMemory and boxes
  Buffer counter;
  std::unique_ptr<PeerComm> comm;
};

using Group = std::vector<Member>;

PeerMemory* memory_of(const Member& member) {
  return reinterpret_cast<PeerMemory*>(member.memory.data());
}

Error lost() {
  return {Code::kDeviceLost, "another rank of the group is lost"};
}

void reserve(Member& member, size_t size, bool direct, uint64_t first_epoch) {
  const auto ranks = static_cast<int32_t>(size);
  const size_t bytes = sizeof(PeerMemory) + all_box_bytes(ranks), numbers = 2 * size * number_box_bytes(ranks);
  member.memory = direct ? device_buffer(bytes) : pinned_buffer(bytes);
  member.counter = device_buffer(sizeof(uint64_t));
  if (member.memory.data() == nullptr || member.counter.data() == nullptr) return;
  uint8_t* const boxes = member.memory.data() + bytes - numbers;
  if (direct) {
    cuda_ok(cudaMemset(member.memory.data(), 0, bytes - numbers), "clearing mailboxes");
    cuda_ok(cudaMemset(boxes, kBlankByte, numbers), "clearing boxes of numbers");
  } else {
    std::memset(boxes, kBlankByte, numbers);
  }
  const uint64_t counter = first_epoch << kEpochShift;
  device_copy(member.counter.data(), &counter, sizeof(counter));
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
  State(int32_t the_size, int32_t the_dcp_size, const CollectiveOptions& the_options, uint64_t the_first_epoch)
      : size(the_size),
        dcp_size(the_dcp_size),
        options(the_options),
        first_epoch(the_first_epoch),
        ranks(static_cast<size_t>(the_size)) {
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
  Status show_device(int32_t r);
  void reach_others(int32_t r);
  Status make_nccl_ids(int32_t r);
  Status reserve_rank(int32_t r);
  // A rank's group: dcp group g, or all ranks.
  struct Place {
    Group& members;
    int32_t first_rank;
    size_t nccl_id;
    uint64_t* come_to;
  };
  Result<Comm*> join(const Place& group, int32_t rank);

  const int32_t size, dcp_size;
  const CollectiveOptions options;
  const uint64_t first_epoch;
  std::atomic<bool> aborted{false};
  std::vector<Rank> ranks;  // never resized
  Group all;
  std::vector<Group> dcp;

  std::mutex mutex;  // guards what follows, and the meetings
  std::condition_variable changed;
  int32_t num_met = 0;
  std::optional<Error> failure;
  std::string unreachable;       // why GPUs do not reach each other's memory; empty: they do, or need not
  std::vector<NcclId> nccl_ids;  // of all ranks, then of each dcp group
  bool by_nccl() const { return options.carrier == Carrier::kNccl; }
  bool direct() const { return !by_nccl() && options.carrier != Carrier::kHost && unreachable.empty(); }
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

Status PeerComms::State::show_device(int32_t r) {
  Rank& rank = ranks[static_cast<size_t>(r)];
  rank.device = current_device();
  rank.words = pinned_buffer(sizeof(PeerWords));
  RETURN_IF_ERROR(device_status());
  auto* words = reinterpret_cast<PeerWords*>(rank.words.data());
  words->come_to_all = words->come_to_dcp = first_epoch;
  const std::lock_guard lock(mutex);
  words->abort = aborted ? 1 : 0;
  rank.shown = words;
  return {};
}

// Once all ranks have shown their device.
void PeerComms::State::reach_others(int32_t r) {
  if (options.carrier == Carrier::kHost || by_nccl()) return;
  const int device = ranks[static_cast<size_t>(r)].device;
  for (const Rank& other : ranks) {
    const Status reached = reach(device, other.device);
    if (reached.ok()) continue;
    if (options.carrier == Carrier::kPeer) return fail(reached.error());
    const std::lock_guard lock(mutex);
    unreachable = reached.error().message;
  }
}

Status PeerComms::State::make_nccl_ids(int32_t r) {
  ASSIGN_OR_RETURN(const NcclLibrary* nccl, NcclLibrary::load());
  if (r > 0) return {};
  nccl_ids.resize(1 + dcp.size());
  for (NcclId& id : nccl_ids)
    if (const int error = nccl->make_id(&id); error != 0)
      return Error(Code::kUnavailable, std::string("--comm nccl: ") + nccl->error_text(error), "comm");
  log_info("collectives of ", size, " GPUs: NCCL ", nccl_version(*nccl));
  return {};
}

// Once all ranks have tried to reach each other.
Status PeerComms::State::reserve_rank(int32_t r) {
  if (by_nccl()) return make_nccl_ids(r);
  reserve(all[static_cast<size_t>(r)], static_cast<size_t>(size), direct(), first_epoch);
  if (dcp_size > 1)
    reserve(dcp[static_cast<size_t>(r / dcp_size)][static_cast<size_t>(r % dcp_size)], static_cast<size_t>(dcp_size),
            direct(), first_epoch);
  cuda_ok(load_peer_kernels(), "loading collectives");
  if (r == 0) log_info(peer_choices_text(size, direct(), unreachable));
  return device_status();
}

// Once all ranks have reserved theirs.
Result<Comm*> PeerComms::State::join(const Place& group, int32_t rank) {
  const Rank& own = ranks[static_cast<size_t>(rank)];
  PeerView view{.rank = rank - group.first_rank, .size = static_cast<int32_t>(group.members.size())};
  Member& member = group.members[static_cast<size_t>(view.rank)];
  view.direct = direct();
  view.mailbox_bytes = static_cast<uint32_t>(mailbox_bytes(view.size));
  view.number_box_bytes = static_cast<uint32_t>(number_box_bytes(view.size));
  for (size_t i = 0; i < group.members.size(); ++i) view.memory[i] = memory_of(group.members[i]);
  for (size_t i = 0; i < ranks.size(); ++i)
    for (size_t j = 0; j < i; ++j) view.one_gpu |= ranks[i].device == ranks[j].device;
  view.abort = &own.shown.load()->abort;
  view.come_to = group.come_to;
  view.counter = reinterpret_cast<uint64_t*>(member.counter.data());
  std::unique_ptr<NcclRank> nccl;
  if (by_nccl()) {
    ASSIGN_OR_RETURN(const NcclLibrary* library, NcclLibrary::load());
    ASSIGN_OR_RETURN(nccl, NcclRank::join(*library, nccl_ids[group.nccl_id], view.rank, view.size, view.come_to));
  } else {
    view.one_shot_bytes = options.one_shot_bytes.value_or(one_shot_bytes(view.size));
    view.flagged_bytes = kFlaggedBytes;
  }
  const std::lock_guard lock(mutex);  // abort() reads it
  member.comm = std::make_unique<PeerComm>(view, aborted, std::move(nccl));
  return member.comm.get();
}

PeerComms::PeerComms(int32_t size, int32_t dcp_size, const CollectiveOptions& options, uint64_t first_epoch) {
  CHECK(size >= 1 && dcp_size >= 1 && size % dcp_size == 0, size, " ranks in groups of ", dcp_size);
  state_ = std::make_unique<State>(size, dcp_size, options, first_epoch);
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
  if (const Status shown = s.show_device(rank); !shown.ok()) s.fail(shown.error());
  if (!s.meet()) return failed();
  s.reach_others(rank);
  if (!s.meet()) return failed();
  if (const Status reserved = s.reserve_rank(rank); !reserved.ok()) s.fail(reserved.error());
  if (!s.meet()) return failed();
  PeerWords* words = s.ranks[static_cast<size_t>(rank)].shown;
  Pair pair{.all = nullptr, .dcp = &Comm::alone()};
  ASSIGN_OR_RETURN(pair.all,
                   s.join({.members = s.all, .first_rank = 0, .nccl_id = 0, .come_to = &words->come_to_all}, rank));
  if (s.dcp_size > 1) {
    const auto group = static_cast<size_t>(rank / s.dcp_size);
    ASSIGN_OR_RETURN(pair.dcp, s.join({.members = s.dcp[group],
                                       .first_rank = rank / s.dcp_size * s.dcp_size,
                                       .nccl_id = 1 + group,
                                       .come_to = &words->come_to_dcp},
                                      rank));
  }
  return pair;
}

void PeerComms::abort() {
  const std::lock_guard lock(state_->mutex);
  state_->aborted = true;
  for (State::Rank& rank : state_->ranks)
    if (PeerWords* words = rank.shown) __atomic_store_n(&words->abort, 1, __ATOMIC_RELEASE);
  const auto end_calls = [](const Group& group) {
    for (const Member& member : group)
      if (member.comm != nullptr) member.comm->abort();
  };
  end_calls(state_->all);
  std::for_each(state_->dcp.begin(), state_->dcp.end(), end_calls);
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

// A group of GPU ranks for tests: threads with a stream and memory of their own, on one GPU or on as many as ranks.
//
// Memory is reserved before the first call, and copies go through the rank's stream: where ranks share a GPU, whatever
// waits for the whole GPU would wait for a rank that waits for this one.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <barrier>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "comm/cuda/nccl_library.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_comms.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"
#include "tensor/cuda/gpus.h"

namespace perigee {

enum class Placed { kOnOneGpu, kApart };

// A kind of group: where its ranks are, and what carries their data.
struct PeerKind {
  PeerKind(Placed the_placed, Carrier the_carrier = Carrier::kPeer) : placed(the_placed), carrier(the_carrier) {}
  Placed placed;
  Carrier carrier;
};

inline std::string kind_name(PeerKind kind) {
  return std::string(kind.placed == Placed::kApart ? "Apart" : "OnOneGpu") +
         (kind.carrier == Carrier::kHost   ? "ThroughTheHost"
          : kind.carrier == Carrier::kNccl ? "ByNccl"
                                           : "");
}

class PeerGroup;

class PeerRank {
 public:
  PeerRank(PeerGroup& the_group, int32_t the_rank, size_t bytes)
      : group(the_group), rank(the_rank), memory_(device_buffer(bytes)) {}

  // Device memory until reset().
  void* reserve(size_t bytes) {
    const size_t at = used_;
    used_ += (bytes + 255) / 256 * 256;
    CHECK(used_ <= memory_.size(), used_, " bytes of ", memory_.size());
    return memory_.data() + at;
  }
  void reset() { used_ = 0; }
  // Waits first: a copy of pageable memory keeps others of its GPU from copying until it has begun.
  void copy(void* to, const void* from, size_t bytes) {
    stream.synchronize();
    cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.get()), "a test's copy");
    stream.synchronize();
  }
  template <typename T>
  T* upload(const std::vector<T>& values) {
    T* there = static_cast<T*>(reserve(values.size() * sizeof(T)));
    copy(there, values.data(), values.size() * sizeof(T));
    return there;
  }
  template <typename T>
  std::vector<T> download(const T* there, size_t count) {
    std::vector<T> values(count);
    copy(values.data(), there, count * sizeof(T));
    return values;
  }
  void meet();  // on the host

  PeerGroup& group;
  const int32_t rank;
  Stream stream;
  PeerComm* comm = nullptr;
  PeerComm* dcp = nullptr;  // none of groups of one

 private:
  Buffer memory_;
  size_t used_ = 0;
};

class PeerGroup {
 public:
  PeerGroup(int32_t the_size, PeerKind kind, size_t the_bytes = 64 << 20, int32_t dcp_size = 1,
            uint64_t first_epoch = 0)
      : size(the_size),
        placed(kind.placed),
        bytes(the_bytes),
        comms(the_size, dcp_size, {.carrier = kind.carrier, .one_shot_bytes = {}}, first_epoch),
        meeting(the_size) {}

  // Runs f as each rank, and waits. False: the group hung for `limit` and was aborted. Once `failed` is so, a rank that
  // leaves f early does not keep the others waiting.
  bool run(const std::function<void(PeerRank&)>& f, const std::function<bool()>& failed,
           std::chrono::seconds limit = std::chrono::seconds(60)) {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false, hung = false;
    {
      std::jthread watch([&] {
        std::unique_lock lock(mutex);
        hung = !changed.wait_for(lock, limit, [&] { return done; });
        if (hung) comms.abort();
      });
      {
        std::vector<std::jthread> threads;
        for (int32_t r = 0; r < size; ++r) threads.emplace_back([&, r] { run_rank(r, f, failed); });
      }
      const std::lock_guard lock(mutex);
      done = true;
      changed.notify_all();
    }
    return !hung;
  }

  const int32_t size;
  const Placed placed;
  const size_t bytes;
  PeerComms comms;
  std::barrier<> meeting;

 private:
  void run_rank(int32_t r, const std::function<void(PeerRank&)>& f, const std::function<bool()>& failed) {
    CHECK(select_device(placed == Placed::kApart ? r : 0).ok());
    PeerRank rank(*this, r, bytes);
    auto pair = comms.connect(r);
    CHECK(pair.ok(), pair.error().message);
    rank.comm = static_cast<PeerComm*>(pair->all);
    rank.comm->set_stream(rank.stream.get());
    if (pair->dcp->size() > 1) {
      rank.dcp = static_cast<PeerComm*>(pair->dcp);
      rank.dcp->set_stream(rank.stream.get());
    }
    meeting.arrive_and_wait();
    f(rank);
    if (failed()) comms.abort();
    rank.stream.synchronize();
    meeting.arrive_and_wait();
  }
};

inline void PeerRank::meet() {
  group.meeting.arrive_and_wait();
}

// Why this machine cannot run a group that is placed so; nullopt if it can.
inline std::optional<std::string> no_peers(PeerKind kind) {
  if (const Status status = select_device(0); !status.ok()) return status.error().message;
  if (kind.placed == Placed::kApart && list_gpus().size() < 2) return "one GPU";
  if (kind.carrier == Carrier::kNccl)
    if (const auto nccl = NcclLibrary::load(); !nccl.ok()) return nccl.error().message;
  return std::nullopt;
}

// Sizes of groups to test.
inline std::vector<int32_t> peer_sizes(PeerKind kind) {
  if (kind.placed == Placed::kOnOneGpu) return {2, 3};
  std::vector<int32_t> sizes = {2};
  for (const int32_t size : {3, 4, 8})
    if (size <= std::ssize(list_gpus())) sizes.push_back(size);
  return sizes;
}

// Values that any order of addition tells from any other.
inline float peer_value(uint64_t call, int32_t rank, int64_t i) {
  uint64_t bits = (call * 64 + static_cast<uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(i);
  bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 32) * 0x94D049BB133111EBu;
  const float magnitude = static_cast<float>(1 << (bits % 20));
  return (static_cast<float>(bits >> 40) / 16777216.0f - 0.5f) * magnitude;
}

// Tests of groups on one GPU, and with a GPU for each rank where there are so many. Kind: PeerKind, or Placed alone.
template <typename Kind>
class PeerSuite : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (const auto why = no_peers(this->GetParam())) GTEST_SKIP() << *why;
  }
};

inline void run(PeerGroup& group, const std::function<void(PeerRank&)>& f) {
  EXPECT_TRUE(group.run(f, [] { return testing::Test::HasFatalFailure(); })) << "the group hangs";
}

}  // namespace perigee

// UnitCopy: one copy of many units at a time, on a stream of its own. One caller at a time.
#pragma once

#include "kv/cuda/unit_kernels.h"
#include "kv/shared_area.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {

class UnitCopy {
 public:
  enum Digests { kWithoutDigests, kWithDigests };

  // Of the calling thread's GPU.
  explicit UnitCopy(int32_t most_units)
      : most_units_(static_cast<size_t>(most_units)),
        moves_(device_buffer(most_units_ * sizeof(UnitMove))),
        host_moves_(pinned_buffer(most_units_ * sizeof(UnitMove))),
        digests_(device_buffer(most_units_ * sizeof(uint64_t))),
        host_digests_(pinned_buffer(most_units_ * sizeof(uint64_t))) {}

  const Stream& stream() const { return stream_; }

  // Of units move_of(0 ... count - 1). Requires that the copy before is done.
  template <typename MoveOf>
  void start(size_t count, int64_t unit_bytes, Digests with, MoveOf&& move_of) {
    CHECK(count <= most_units_ && unit_bytes % 16 == 0, count, " units of ", unit_bytes, " bytes");
    if (host_moves_.data() == nullptr) return;  // the GPU has failed
    auto* moves = reinterpret_cast<UnitMove*>(host_moves_.data());
    for (size_t i = 0; i < count; ++i) moves[i] = move_of(i);
    send(moves_, host_moves_, count * sizeof(UnitMove));
    auto* digests = with == kWithDigests ? reinterpret_cast<uint64_t*>(digests_.data()) : nullptr;
    if (digests != nullptr)
      cuda_ok(cudaMemsetAsync(digests, 0, count * sizeof(uint64_t), stream_.get()), "clearing digests");
    cuda_ok(move_units(reinterpret_cast<const UnitMove*>(moves_.data()), static_cast<int32_t>(count), unit_bytes,
                       digests, stream_.get()),
            "copying cache entries");
    if (digests != nullptr) send(host_digests_, digests_, count * sizeof(uint64_t));
  }
  // Once the stream is done.
  std::span<const uint64_t> digests(size_t count) const {
    return {reinterpret_cast<const uint64_t*>(host_digests_.data()), count};
  }

 private:
  void send(const Buffer& to, const Buffer& from, size_t bytes) {
    cuda_ok(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDefault, stream_.get()), "copying lists of units");
  }

  const size_t most_units_;
  Buffer moves_, host_moves_, digests_, host_digests_;
  Stream stream_;
};

}  // namespace perigee

// How GPU ranks exchange data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace perigee {

enum class Carrier : uint8_t {
  kAuto,  // kPeer where every GPU reaches the memory of every other one, else kHost
  kPeer,  // kernels read and write the memory of other GPUs
  kHost,  // kernels write into mailboxes in pinned host memory
  kNccl,  // NCCL gathers, kernels add up
};

struct CollectiveOptions {
  Carrier carrier = Carrier::kAuto;
  std::optional<size_t> one_shot_bytes;  // tests: in place of the choice (comm/cuda/peer_choose.h)
};

}  // namespace perigee

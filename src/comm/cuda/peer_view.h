// What kernels of collectives read and write: memory that every rank of a group can reach.
#pragma once

#include <cstdint>

#include "comm/cuda/peer_choose.h"

namespace perigee {

constexpr int kMostPeerBlocks = 512;
constexpr int kMostAddresses = 2;  // that one call exchanges

// One rank's, in its GPU's memory or in pinned host memory: what the others write. All of it is there twice, for even
// and odd epochs: a rank that has ended its call of epoch e has heard of every other rank in it, so all of them have
// ended e - 1, and what they were sent then may be overwritten in e + 1.
struct PeerMemory {
  // Addresses that a rank shows to a block, each as two halves: 32 bits | flag << 32.
  alignas(256) uint64_t messages[2][kMostPeerBlocks][kMostPeers][kMostAddresses][2];
  alignas(256) uint32_t flags[2][kMostPeerBlocks][kMostPeers];
  // Followed by mailboxes [2][ranks][mailbox_bytes()] and boxes of numbers [2][ranks][number_box_bytes()].
};
constexpr int kEpochShift = 16;
constexpr int kBlankByte = 0xFF;  // of a box of numbers where nothing has come

// Of kernels that read and write the others' memory: so many fill the links, and each has to wait for its stores.
constexpr int kWidePeerThreads = 512, kMostWidePeerBlocks = 64;

// One rank's, in pinned host memory.
struct PeerWords {
  alignas(64) uint32_t abort;                     // the host's
  alignas(64) uint64_t come_to_all, come_to_dcp;  // epochs of the newest calls, by kernels
};

// As a kernel's parameter.
struct PeerView {
  int32_t rank = 0, size = 1;
  bool one_gpu = false;  // some ranks share a GPU; the same on all
  bool direct = true;    // kernels reach the memory of all GPUs; else mailboxes alone, which are the host's
  PeerMemory* memory[kMostPeers] = {};
  // (epoch of the newest call that has ended) << 16 | blocks of the current one that have ended; in device memory.
  uint64_t* counter = nullptr;
  const uint32_t* abort = nullptr;
  uint64_t* come_to = nullptr;
  // mailbox_bytes() and number_box_bytes() of `size`: kernels must not divide for every box that they read or write.
  uint32_t mailbox_bytes = 0, number_box_bytes = 0;
  size_t one_shot_bytes = 0;
  size_t flagged_bytes = 0;  // of a rank's numbers: up to so many travel with flags

  // Of a kernel of small blocks. Where ranks share a GPU, all their blocks must find a place.
  int64_t most_blocks() const { return one_gpu ? kMostPeerBlocks / 4 : kMostPeerBlocks; }
};

}  // namespace perigee

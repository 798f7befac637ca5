// What links between the GPUs of this machine give collectives. No CUDA header here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace perigee {

// Sums over two GPUs.
struct SumRates {
  double us = 0;   // of the smallest operands: f32 [1, 2304]
  double gbs = 0;  // of large ones: bytes of the operand each way
};

struct PeerLink {
  int32_t first = 0, second = 0;
  std::string why_none;  // empty: the GPUs reach each other's memory
  SumRates peer, host;   // through peer memory, through the host's
};

// Of every pair, one after the other; a second for each. None on a build without CUDA.
std::vector<PeerLink> measure_peer_links(int32_t num_gpus);

}  // namespace perigee

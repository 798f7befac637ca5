// Which form of a collective runs: pure functions of sizes. No CUDA header.
//
// One-shot: each rank writes its data into a mailbox of every other rank, each 4 bytes beside their flag. One trip over
// the links, twice the bytes. Two-shot: ranks show each other where their data lies, and each adds up its share of it
// and writes the sum to all. Three trips, no byte too many. Through the host: one-shot in mailboxes in its memory, as
// many calls as these ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace perigee {

constexpr int32_t kMostPeers = 8;
// Of one rank's data, flags among them, in one other rank's memory.
constexpr size_t mailbox_bytes(int32_t num_ranks) {
  return (size_t{8} << 10) / static_cast<size_t>(num_ranks) << 10;
}

// The most bytes of an operand that one-shot is chosen for.
size_t one_shot_bytes(int32_t num_ranks);
// For the log. `direct`: GPUs reach each other's memory; `why_not`: empty if that was not asked for.
std::string peer_choices_text(int32_t num_ranks, bool direct, const std::string& why_not = "");

}  // namespace perigee

// Which form of a collective runs: pure functions of sizes. No CUDA header.
//
// One-shot: each rank writes its data into a box of every other rank. One trip over the links. Numbers go into boxes of
// their own, which are blank until they come; of other data each 4 bytes have their flag beside them in a mailbox,
// which takes twice the bytes. Two-shot: ranks show each other where their data lies, and each adds up its share of it
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

// Of one rank's numbers in one other rank's memory.
constexpr size_t number_box_bytes(int32_t num_ranks) {
  return (size_t{16} << 10) / static_cast<size_t>(num_ranks) << 10;
}
// Both kinds of a rank, for even and odd calls.
constexpr size_t all_box_bytes(int32_t num_ranks) {
  return 2 * static_cast<size_t>(num_ranks) * (mailbox_bytes(num_ranks) + number_box_bytes(num_ranks));
}

// The most bytes of numbers to sum that one-shot is chosen for; of data with flags half as many.
size_t one_shot_bytes(int32_t num_ranks);
// Numbers of up to so many bytes travel with flags, so that no reader has to clear their box.
constexpr size_t kFlaggedBytes = size_t{128} << 10;
// For the log. `direct`: GPUs reach each other's memory; `why_not`: empty if that was not asked for.
std::string peer_choices_text(int32_t num_ranks, bool direct, const std::string& why_not = "");

}  // namespace perigee

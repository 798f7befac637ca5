#include "comm/cuda/peer_choose.h"

#include <fmt/core.h>

#include <algorithm>

namespace perigee {

size_t one_shot_bytes(int32_t num_ranks) {
  // One-shot sends 2 (p - 1) n bytes where two-shot sends 2 (p - 1) / p n; what it saves is the time of kSaved bytes
  // (two H200s: both take 13 us for 64 x 7,168 numbers).
  constexpr size_t kSaved = 1792 << 10;
  const auto others = static_cast<size_t>(std::max(num_ranks - 1, 1));
  const size_t pays = kSaved * static_cast<size_t>(num_ranks) / (2 * others * others);
  return std::min(pays, mailbox_bytes(num_ranks) / 2);
}

std::string peer_choices_text(int32_t num_ranks, bool direct, const std::string& why_not) {
  if (!direct)
    return fmt::format("collectives of {} GPUs: through host memory{}{}", num_ranks,
                       why_not.empty() ? "" : ", because ", why_not);
  return fmt::format("collectives of {} GPUs: peer memory, one-shot up to {} KiB, two-shot above", num_ranks,
                     one_shot_bytes(num_ranks) >> 10);
}

}  // namespace perigee

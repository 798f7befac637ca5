#include "comm/cuda/peer_choose.h"

#include <fmt/core.h>

#include <algorithm>

namespace perigee {

size_t one_shot_bytes(int32_t num_ranks) {
  // One-shot sends (p - 1) n bytes where two-shot sends 2 (p - 1) / p n; what it saves is the time of kSaved bytes
  // (measured beside sums that are normed, docs/results/cuda.md). Two ranks send the same either way, but copy once
  // more of much.
  constexpr size_t kSaved = 768 << 10, kMost = 2 << 20;
  const auto ranks = static_cast<size_t>(std::max(num_ranks, 2));
  return ranks == 2 ? kMost : std::min(kMost, kSaved * ranks / ((ranks - 1) * (ranks - 2)));
}

std::string peer_choices_text(int32_t num_ranks, bool direct, const std::string& why_not) {
  if (!direct)
    return fmt::format("collectives of {} GPUs: through host memory{}{}", num_ranks,
                       why_not.empty() ? "" : ", because ", why_not);
  return fmt::format("collectives of {} GPUs: peer memory, one-shot up to {} KiB, two-shot above", num_ranks,
                     one_shot_bytes(num_ranks) >> 10);
}

}  // namespace perigee

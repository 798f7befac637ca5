#include "control/mask_jobs.h"

#include <algorithm>

#include "control/faults.h"

namespace perigee {
namespace {

// `mask` has no more words than the vocabulary takes; bits beyond it mean nothing.
bool allows_any(std::span<const uint32_t> mask, int64_t vocab) {
  const auto whole = static_cast<std::ptrdiff_t>(vocab / 32);
  if (std::any_of(mask.begin(), mask.begin() + whole, [](uint32_t word) { return word != 0; })) return true;
  return vocab % 32 != 0 && (mask.back() & ((1u << (vocab % 32)) - 1)) != 0;
}

// An end that the constraint leaves no way around comes before min_tokens.
void forbid(std::span<const int32_t> ids, int64_t vocab, std::span<uint32_t> mask) {
  const auto bit = [&](int32_t id) { return 1u << (id % 32); };
  const auto word = [&](int32_t id) -> uint32_t& { return mask[static_cast<size_t>(id / 32)]; };
  std::vector<int32_t> taken;
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab || (word(id) & bit(id)) == 0) continue;
    word(id) &= ~bit(id);
    taken.push_back(id);
  }
  if (taken.empty() || allows_any(mask, vocab)) return;
  for (const int32_t id : taken) word(id) |= bit(id);
}

}  // namespace

bool make_masks(const MaskJob& job, int64_t vocab, std::vector<uint32_t>& words) {
  const auto width = static_cast<size_t>((vocab + 31) / 32);
  words.resize(width * job.num_places());
  job.state->masks({job.drafts.begin(), job.drafts.size()}, job.ids_left, static_cast<int64_t>(width), words.data());
  if (planted(Fault::kMaskOfOtherPlace))
    std::rotate(words.begin(), words.end() - static_cast<std::ptrdiff_t>(width), words.end());
  for (size_t place = 0; place < job.num_places(); ++place) {
    const std::span<uint32_t> mask(words.data() + place * width, width);
    if (!allows_any(mask, vocab)) {
      if (place == 0) return false;
      std::fill(mask.begin(), mask.end(), ~0u);  // after a draft that ends the reply: nobody reads it
    } else if (static_cast<int32_t>(place) < job.num_without_stop) {
      forbid(job.stop_ids, vocab, mask);
    }
  }
  return true;
}

}  // namespace perigee

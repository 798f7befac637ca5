#include "control/prefix_match.h"

#include <algorithm>
#include <array>

#include "control/faults.h"

namespace perigee {

void PrefixMatch::update(const Sequence& sequence, int32_t max_blocks) {
  if (sequence.id() != sequence_ || sequence.input != input_ || max_blocks != max_blocks_) {
    sequence_ = sequence.id();
    input_ = sequence.input;
    max_blocks_ = max_blocks;
    root_ = index_.root(sequence.request.cache_salt);
    blocks_.clear();
    num_published_ = num_erased_ = -1;
  }
  if (num_erased_ != index_.num_erased() && !planted(Fault::kStaleMatch)) {
    const auto is_gone = [this](const PrefixNode& block) { return !index_.contains(block); };
    blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), is_gone), blocks_.end());
  }
  if (num_published_ != index_.num_published()) {
    std::array<int32_t, kBlockTokens> scratch;
    while (static_cast<int32_t>(blocks_.size()) < max_blocks) {
      const auto block = static_cast<int32_t>(blocks_.size());
      const auto found = index_.find(blocks_.empty() ? root_ : blocks_.back(), sequence.block_tokens(block, scratch),
                                     sequence.request.cache_salt, sequence.extra_key(block));
      if (!found) break;
      blocks_.push_back(*found);
    }
  }
  num_published_ = index_.num_published();
  num_erased_ = index_.num_erased();
}

}  // namespace perigee

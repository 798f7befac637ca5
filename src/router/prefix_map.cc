#include "router/prefix_map.h"

#include "base/rng.h"

namespace perigee {

namespace {

constexpr size_t kMostBytes = 1u << 20;

uint64_t pair_of(uint64_t block, uint64_t worker) {
  return mix64(block + mix64(worker + 1));
}

}  // namespace

PrefixBlocks prefix_blocks(std::string_view prompt) {
  PrefixBlocks blocks;
  prompt = prompt.substr(0, kMostBytes);
  blocks.reserve(prompt.size() / kPrefixBlockBytes);
  uint64_t hash = 0;
  for (; prompt.size() >= kPrefixBlockBytes; prompt.remove_prefix(kPrefixBlockBytes)) {
    hash = mix64(hash ^ std::hash<std::string_view>()(prompt.substr(0, kPrefixBlockBytes)));
    blocks.push_back(hash);
  }
  return blocks;
}

// What is known is a beginning, because remember() renews a prompt's first blocks last; so it is searched by halves.
size_t PrefixMap::known_blocks(const PrefixBlocks& prompt, uint64_t worker) const {
  size_t known = 0;
  for (size_t unknown = prompt.size() + 1; unknown - known > 1;) {
    const size_t middle = known + (unknown - known) / 2;
    (knows(pair_of(prompt[middle - 1], worker)) ? known : unknown) = middle;
  }
  return known;
}

void PrefixMap::remember(const PrefixBlocks& prompt, uint64_t worker) {
  for (size_t i = prompt.size(); i-- > 0;) {
    if (recent_.size() >= max_pairs_ / 2) {
      older_.swap(recent_);
      recent_.clear();
    }
    const uint64_t pair = pair_of(prompt[i], worker);
    older_.erase(pair);
    recent_.insert(pair);
  }
}

}  // namespace perigee

// PrefixMap: which worker has probably seen the beginning of a prompt, so that its cache may hold it. Pure.
//
// A prompt is its text cut into blocks of 512 bytes, each hashed with all before it. The map remembers (block, worker)
// pairs in bounded memory and forgets those longest not used. It is a guess: workers evict on their own.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace perigee {

using PrefixBlocks = std::vector<uint64_t>;  // one hash for each block of a prompt, of everything up to its end

constexpr size_t kPrefixBlockBytes = 512;
PrefixBlocks prefix_blocks(std::string_view prompt);  // of its first MiB

class PrefixMap {
 public:
  explicit PrefixMap(size_t max_pairs) : max_pairs_(max_pairs) {}

  size_t known_blocks(const PrefixBlocks& prompt, uint64_t worker) const;  // from the prompt's beginning on
  void remember(const PrefixBlocks& prompt, uint64_t worker);

  size_t pairs() const { return recent_.size() + older_.size(); }  // at most max_pairs

 private:
  bool knows(uint64_t pair) const { return recent_.contains(pair) || older_.contains(pair); }

  const size_t max_pairs_;
  std::unordered_set<uint64_t> recent_, older_;  // when `recent_` has half of them, `older_` is forgotten
};

}  // namespace perigee

// CacheSize: what the page pools hold, one of so many pages at each dcp index. Scheduler, engine and `perigee plan`
// count by it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "control/place.h"

namespace perigee {

constexpr int64_t blocks_of(int64_t num_tokens) {
  return (num_tokens + kBlockTokens - 1) / kBlockTokens;
}

struct CacheSize {
  int64_t pages = 0;        // at each dcp index
  int64_t state_pages = 0;  // of one sequence's recurrent state, at each dcp index
  int32_t dcp_size = 1;
  Dealing dealing = Dealing::kFewest;

  // Of one sequence, when nothing else has pages.
  int64_t max_blocks() const { return dcp_size * std::max<int64_t>(pages - state_pages, 0); }
  int64_t max_tokens() const { return max_blocks() * kBlockTokens; }

  // Of a sequence of so many tokens, at the dcp index that has most of them.
  int64_t pages_of(int64_t num_tokens) const { return (blocks_of(num_tokens) + dcp_size - 1) / dcp_size + state_pages; }
  // How many of these there is room for. Their blocks fill up all indices; dealt in turn, the first one.
  double sequences_of(int64_t num_tokens) const {
    const int64_t at_all = blocks_of(num_tokens) + dcp_size * state_pages;
    return dealing == Dealing::kInTurn ? static_cast<double>(pages) / static_cast<double>(pages_of(num_tokens))
                                       : static_cast<double>(dcp_size * pages) / static_cast<double>(at_all);
  }
};

}  // namespace perigee

// PrefixCache: the pages of the pools and what is known to be in them: published blocks, and checkpoints at blocks.
//
// Keeps pools, prefix index and checkpoints in step: what is evicted is forgotten, with its checkpoint; what is
// forgotten and held by nobody is free. Knows sequences as the tokens of their blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "control/checkpoints.h"
#include "control/pools.h"
#include "control/prefix_index.h"
#include "control/sequence.h"

namespace perigee {

class PrefixCache {
 public:
  explicit PrefixCache(const SchedulerConfig& config);

  Pools& pools() { return pools_; }
  const Pools& pools() const { return pools_; }
  const PrefixIndex& index() const { return index_; }
  Checkpoints& checkpoints() { return checkpoints_; }
  const Checkpoints& checkpoints() const { return checkpoints_; }
  int64_t num_evicted_checkpoints() const { return num_evicted_checkpoints_; }

  // Enters a block of the sequence, which `page` holds, into the index after `chain`. Nothing when the block before it
  // is gone.
  std::optional<PrefixNode> publish_block(const PrefixNode& chain, const Sequence& sequence, int32_t block,
                                          PlaceId page);
  // Enters the full blocks of the sequence's first num_tokens tokens into the index. A block that another page holds
  // already keeps that page there; the chain goes on from it.
  void publish_blocks(Sequence& sequence, int32_t num_tokens);

  // All that this sequence read leaves the index: which of its blocks spoilt its output is not known, and the next
  // request with this prompt computes them anew.
  void forget_blocks(const Sequence& sequence);
  void forget_all();

  // INV-1 for the places [first, first + holders.size()), which are known to have so many holders each.
  void check_pages(int32_t first, const std::vector<int32_t>& holders) const;
  // Sums over all pages.
  void check_totals() const;

 private:
  friend struct SchedulerBreaker;  // a test
  void page_evicted(PlaceId page);
  void forget_block(PlaceId page);
  void forget_and_free(PlaceId page);

  PrefixIndex index_;
  Pools pools_;
  Checkpoints checkpoints_;
  const int32_t pages_of_checkpoint_;
  int64_t num_evicted_checkpoints_ = 0;
};

}  // namespace perigee

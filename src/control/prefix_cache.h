// PrefixCache: the pages of one pool and what is known to be in them: published blocks, and checkpoints at blocks.
//
// Keeps pool, prefix index and checkpoints in step: what is evicted is forgotten, with its checkpoint; what is
// forgotten and held by nobody is free. Knows sequences as the tokens of their blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "control/block_pool.h"
#include "control/checkpoints.h"
#include "control/prefix_index.h"
#include "control/sequence.h"

namespace perigee {

class PrefixCache {
 public:
  PrefixCache(int32_t num_pages, uint64_t hash_seed, int32_t hash_bits);

  BlockPool& pool() { return pool_; }
  const BlockPool& pool() const { return pool_; }
  const PrefixIndex& index() const { return index_; }
  Checkpoints& checkpoints() { return checkpoints_; }
  const Checkpoints& checkpoints() const { return checkpoints_; }
  int64_t num_evicted_checkpoints() const { return num_evicted_checkpoints_; }

  // Pages that were counted before: there must be so many.
  std::vector<PageHandle> take_pages(PageOwner owner, int32_t count);

  // Enters the full blocks of the sequence's first num_tokens tokens into the index. A block that another page holds
  // already keeps that page there; the chain goes on from it.
  void publish_blocks(Sequence& sequence, int32_t num_tokens);

  // All that this sequence read leaves the index: which of its blocks spoilt its output is not known, and the next
  // request with this prompt computes them anew.
  void forget_blocks(const Sequence& sequence);
  void forget_all();

  // INV-1 for the pages [first, first + holders.size()), which are known to have so many holders each.
  void check_pages(int32_t first, const std::vector<int32_t>& holders) const;
  // Sums over the whole pool.
  void check_totals(int32_t pages_of_checkpoint) const;

 private:
  friend struct SchedulerBreaker;  // a test
  void page_evicted(PageId page);
  void forget_block(PageId page);
  void forget_and_free(PageId page);

  PrefixIndex index_;
  BlockPool pool_;
  Checkpoints checkpoints_;
  int64_t num_evicted_checkpoints_ = 0;
};

}  // namespace perigee

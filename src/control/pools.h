// Pools: a page pool for each dcp index, all of one size, as one: what BlockPool is, for pages that have a PlaceId.
//
// A block lies at one index, and which one that is follows from where its sequence's other blocks are (see Dealing). A
// recurrent state is sharded by head over all ranks: it has pages at every index.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "control/block_pool.h"

namespace perigee {

class Pools {
 public:
  // num_pages at each of dcp_size indices. `on_evict`: see BlockPool.
  Pools(int32_t dcp_size, int32_t num_pages, const std::function<void(PlaceId)>& on_evict,
        Dealing dealing = Dealing::kFewest);

  Pools(const Pools&) = delete;
  Pools& operator=(const Pools&) = delete;

  int32_t dcp_size() const { return static_cast<int32_t>(pools_.size()); }

  // Whether this block of a sequence, counted from 0, may lie at the index.
  bool may_lie(int32_t block, int32_t dcp_index) const {
    return dealing_ == Dealing::kFewest || block % dcp_size() == dcp_index;
  }
  // A page for one more block of a sequence that has so many at each index: of those where it may lie at the index with
  // fewest, of those the one with most available pages, of those the lowest. Indices without a page are passed over;
  // empty when all are.
  PageHandle allocate_block(const CountAtIndex& num_blocks);

  // `count` pages at every index, index after index. They were counted before: there must be so many.
  std::vector<PageHandle> allocate_everywhere(PageOwner owner, int32_t count);
  // How often that can be done so that `reserve` pages are left, wherever these lie.
  int32_t num_everywhere(int32_t count, int32_t reserve) const;

  // As BlockPool's.
  PageHandle share(PlaceId place) { return pool_of(place).share(page_of(place)); }
  void publish(PlaceId place) { pool_of(place).publish(page_of(place)); }
  void unpublish(PlaceId place) { pool_of(place).unpublish(page_of(place)); }
  void demote(PlaceId place) { pool_of(place).demote(page_of(place)); }
  int32_t num_holders(PlaceId place) const { return pool_of(place).num_holders(page_of(place)); }
  bool is_published(PlaceId place) const { return pool_of(place).is_published(page_of(place)); }
  PageOwner owner(PlaceId place) const { return pool_of(place).owner(page_of(place)); }

  // Counts the page at its index if nobody holds it.
  void count_if_idle(PlaceId place, CountAtIndex& count) const;

  int32_t num_available(int32_t dcp_index) const { return at(dcp_index).num_available(); }

  // Of all indices.
  int32_t num_pages() const { return dcp_size() * pages_of_pool_; }
  int32_t num_free() const { return sum(&BlockPool::num_free); }
  int32_t num_cached() const { return sum(&BlockPool::num_cached); }
  int32_t num_used() const { return sum(&BlockPool::num_used); }
  int32_t num_available() const { return sum(&BlockPool::num_available); }
  int32_t num_owned(PageOwner owner) const {
    return sum([owner](const BlockPool& pool) { return pool.num_owned(owner); });
  }

  void check_integrity() const;
  void check_page(PlaceId place) const { pool_of(place).check_page(page_of(place)); }

 private:
  int32_t index_of(PlaceId place) const { return place.value / pages_of_pool_; }
  PageId page_of(PlaceId place) const { return PageId(place.value % pages_of_pool_); }
  BlockPool& at(int32_t dcp_index) { return *pools_[static_cast<size_t>(dcp_index)]; }
  const BlockPool& at(int32_t dcp_index) const { return *pools_[static_cast<size_t>(dcp_index)]; }
  BlockPool& pool_of(PlaceId place) { return at(index_of(place)); }
  const BlockPool& pool_of(PlaceId place) const { return at(index_of(place)); }
  template <typename Count>
  int32_t sum(Count count) const {
    int32_t total = 0;
    for (const auto& pool : pools_) total += std::invoke(count, *pool);
    return total;
  }

  const int32_t pages_of_pool_;
  const Dealing dealing_;
  std::vector<std::unique_ptr<BlockPool>> pools_;  // by dcp index
};

inline void Pools::count_if_idle(PlaceId place, CountAtIndex& count) const {
  const int32_t index = index_of(place);
  if (at(index).num_holders(page_of(place)) == 0) ++count[static_cast<size_t>(index)];
}

inline PageHandle Pools::allocate_block(const CountAtIndex& num_blocks) {
  BlockPool* best = nullptr;
  const auto blocks_at = [&](const BlockPool& pool) { return num_blocks[static_cast<size_t>(pool.dcp_index())]; };
  const auto is_better = [&](const BlockPool& a, const BlockPool& b) {
    if (blocks_at(a) != blocks_at(b)) return blocks_at(a) < blocks_at(b);
    return a.num_available() > b.num_available();
  };
  const int32_t block = std::accumulate(num_blocks.begin(), num_blocks.end(), 0);
  for (const auto& pool : pools_) {
    if (pool->num_available() == 0 || !may_lie(block, pool->dcp_index())) continue;
    if (best == nullptr || is_better(*pool, *best)) best = pool.get();
  }
  return best == nullptr ? PageHandle() : best->allocate(PageOwner::kLatent);
}

}  // namespace perigee

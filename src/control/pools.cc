#include "control/pools.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace perigee {

Pools::Pools(int32_t dcp_size, int32_t num_pages, const std::function<void(PlaceId)>& on_evict)
    : pages_of_pool_(num_pages) {
  CHECK(dcp_size >= 1 && dcp_size <= kMaxDcpSize, "pools for a dcp size of ", dcp_size);
  CHECK(num_pages <= std::numeric_limits<int32_t>::max() / dcp_size, dcp_size, " pools of ", num_pages, " pages");
  for (int32_t index = 0; index < dcp_size; ++index) {
    const auto evict = [this, index, on_evict](PageId page) {
      if (on_evict) on_evict(at(index).place(page));
    };
    pools_.push_back(std::make_unique<BlockPool>(num_pages, evict, index));
  }
}

PageHandle Pools::allocate_block(const CountAtIndex& num_blocks) {
  BlockPool* best = nullptr;
  const auto blocks_at = [&](const BlockPool& pool) { return num_blocks[static_cast<size_t>(pool.dcp_index())]; };
  const auto is_better = [&](const BlockPool& a, const BlockPool& b) {
    if (blocks_at(a) != blocks_at(b)) return blocks_at(a) < blocks_at(b);
    return a.num_available() > b.num_available();
  };
  for (const auto& pool : pools_)
    if (pool->num_available() > 0 && (best == nullptr || is_better(*pool, *best))) best = pool.get();
  return best == nullptr ? PageHandle() : best->allocate(PageOwner::kLatent);
}

std::vector<PageHandle> Pools::allocate_everywhere(PageOwner owner, int32_t count) {
  std::vector<PageHandle> pages;
  pages.reserve(static_cast<size_t>(count) * pools_.size());
  for (const auto& pool : pools_) {
    for (int32_t i = 0; i < count; ++i) {
      pages.push_back(pool->allocate(owner));
      CHECK(pages.back(), "pages that were counted are not there");
    }
  }
  return pages;
}

int32_t Pools::num_everywhere(int32_t count, int32_t reserve) const {
  int32_t times = std::max(num_available() - reserve, 0) / (count * dcp_size());
  for (const auto& pool : pools_) times = std::min(times, pool->num_available() / count);
  return times;
}

void Pools::count_if_idle(PlaceId place, CountAtIndex& count) const {
  const int32_t index = index_of(place);
  if (at(index).num_holders(page_of(place)) == 0) ++count[static_cast<size_t>(index)];
}

int32_t Pools::num_owned(PageOwner owner) const {
  int32_t total = 0;
  for (const auto& pool : pools_) total += pool->num_owned(owner);
  return total;
}

int32_t Pools::sum(int32_t (BlockPool::*count)() const) const {
  int32_t total = 0;
  for (const auto& pool : pools_) total += (*pool.*count)();
  return total;
}

void Pools::check_integrity() const {
  for (const auto& pool : pools_) pool->check_integrity();
}

}  // namespace perigee

#include "control/pools.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace perigee {

Pools::Pools(int32_t dcp_size, int32_t num_pages, const std::function<void(PlaceId)>& on_evict, Dealing dealing)
    : pages_of_pool_(num_pages), dealing_(dealing) {
  CHECK(dcp_size >= 1 && dcp_size <= kMaxDcpSize, "pools for a dcp size of ", dcp_size);
  CHECK(num_pages <= std::numeric_limits<int32_t>::max() / dcp_size, dcp_size, " pools of ", num_pages, " pages");
  for (int32_t index = 0; index < dcp_size; ++index) {
    const auto evict = [this, index, on_evict](PageId page) {
      if (on_evict) on_evict(at(index).place(page));
    };
    pools_.push_back(std::make_unique<BlockPool>(num_pages, evict, index));
  }
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
  int32_t times = std::numeric_limits<int32_t>::max(), num_available = 0;
  for (const auto& pool : pools_) times = std::min(times, pool->num_available() / count);
  for (const auto& pool : pools_) num_available += pool->num_available();
  return std::min(times, std::max(num_available - reserve, 0) / (count * dcp_size()));
}

void Pools::check_integrity() const {
  for (const auto& pool : pools_) pool->check_integrity();
}

}  // namespace perigee

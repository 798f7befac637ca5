// Test only: a node's pages of latents, without an engine.
#pragma once

#include <vector>

#include "kv/page_store.h"

namespace perigee {

struct TestPages {
  explicit TestPages(int32_t num_pages) : memory(static_cast<size_t>(num_pages * layout.page_bytes())) {
    store.describe(shape);
  }
  uint8_t* page(int32_t id) { return memory.data() + id * layout.page_bytes(); }

  CacheLayout layout = {CacheGroup::latent(1, 48, 16, LatentFormat::kBF16)};
  std::vector<uint8_t> memory;
  PageStore store{{RankPages{.base = memory.data(), .layout = layout}}};
  CacheShape shape;
};

// Pages first, first + 1, ...
inline std::vector<Placement> pages_from(int32_t first, int32_t count) {
  std::vector<Placement> pages;
  for (int32_t i = 0; i < count; ++i) pages.push_back({PageId(first + i), 0});
  return pages;
}

}  // namespace perigee

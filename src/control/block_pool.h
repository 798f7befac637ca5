// BlockPool: who holds which page of one rank's memory pool. It knows page ids only, no bytes, no tokens. Ranks with
// the same dcp index have equal pools, and one BlockPool.
//
// A page is free, used (at least one PageHandle names it) or cached (no handle, but published: a prefix hit may revive
// it, and allocation may evict it, demoted pages before others, least recently released first). Handles are move-only
// and counted: losing the last one frees the page, so there is no release to forget. Each page has one typed owner,
// because latent blocks, recurrent states and their checkpoints share a pool but never a page (DESIGN D7). All state
// lies in arrays indexed by page id.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "control/place.h"

namespace perigee {

enum class PageOwner : uint8_t { kNone, kLatent, kState, kCheckpoint };
inline constexpr size_t kNumPageOwners = 4;

class BlockPool;

// One holder of one page. Must not outlive the pool.
class PageHandle {
 public:
  PageHandle() = default;
  PageHandle(PageHandle&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), page_(other.page_) {}
  PageHandle& operator=(PageHandle&& other) noexcept {
    if (this == &other) return *this;
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    page_ = other.page_;
    return *this;
  }
  ~PageHandle() { reset(); }

  explicit operator bool() const { return pool_ != nullptr; }
  PageId page() const { return page_; }
  Placement placement() const;
  PlaceId place() const;
  void reset();

 private:
  friend class BlockPool;
  PageHandle(BlockPool* pool, PageId page) : pool_(pool), page_(page) {}

  BlockPool* pool_ = nullptr;
  PageId page_;
};

class BlockPool {
 public:
  // `on_evict` hears of every cached page that allocation takes, before it has a new owner; it may unpublish others.
  BlockPool(int32_t num_pages, std::function<void(PageId)> on_evict, int32_t dcp_index = 0);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // A page that nobody holds: a free one, else the cached one that is next to go. Empty when there is neither.
  PageHandle allocate(PageOwner owner);

  // One more holder of a used or cached page (a prefix hit).
  PageHandle share(PageId page);

  // A used page is to be cached, not freed, when its last handle goes; unpublish takes that back, and frees a cached
  // page at once. Both are idempotent.
  void publish(PageId page);
  void unpublish(PageId page);

  // A published page is to be evicted before those that are not demoted, until it is shared again. Idempotent.
  void demote(PageId page);

  int32_t dcp_index() const { return dcp_index_; }
  PlaceId place(PageId page) const { return PlaceId(dcp_index_ * num_pages() + page.value); }

  int32_t num_pages() const { return static_cast<int32_t>(pages_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return num_cached_; }
  int32_t num_used() const { return num_pages() - num_free() - num_cached_; }
  int32_t num_available() const { return num_free() + num_cached_; }
  int32_t num_owned(PageOwner owner) const { return num_owned_[static_cast<size_t>(owner)]; }  // used or cached

  int32_t num_holders(PageId page) const { return at(page).holders; }
  bool is_published(PageId page) const { return at(page).published; }
  PageOwner owner(PageId page) const { return at(page).owner; }

  void check_integrity() const;        // CHECKs that the lists and the pages agree; linear
  void check_page(PageId page) const;  // of that what concerns this page and its neighbours; constant

 private:
  friend class PageHandle;
  friend struct BlockPoolBreaker;  // its test
  static constexpr int32_t kNil = -1;

  struct Page {
    int32_t holders = 0;
    int32_t older = kNil,
            newer = kNil;  // neighbours in the list of cached pages; `older` of a free one: index in free_
    PageOwner owner = PageOwner::kNone;
    bool published = false;
    bool demoted = false;
  };
  struct List {  // of cached pages
    int32_t oldest = kNil, newest = kNil;
  };

  Page& at(PageId page) {
    DCHECK(page.valid() && page.value < num_pages(), "page ", page);
    return pages_[static_cast<size_t>(page.value)];
  }
  const Page& at(PageId page) const {
    DCHECK(page.valid() && page.value < num_pages(), "page ", page);
    return pages_[static_cast<size_t>(page.value)];
  }
  void drop_holder(PageId page);
  void push_cached(PageId page);
  void remove_cached(PageId page);
  void push_free(PageId page);
  int32_t& owned(PageOwner owner) { return num_owned_[static_cast<size_t>(owner)]; }
  List& list_of(const Page& page) { return page.demoted ? demoted_ : cached_; }

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  List cached_, demoted_;
  int32_t num_cached_ = 0;
  std::array<int32_t, kNumPageOwners> num_owned_{};
  std::function<void(PageId)> on_evict_;
  const int32_t dcp_index_;
};

inline Placement PageHandle::placement() const {
  return {.page = page_, .dcp_index = pool_->dcp_index()};
}
inline PlaceId PageHandle::place() const {
  return pool_->place(page_);
}
inline void PageHandle::reset() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->drop_holder(page_);
}

// Drops handles last to first, so that of a chain of blocks the tail is evicted before its parents.
inline void release_back_to_front(std::vector<PageHandle>& handles) {
  while (!handles.empty()) handles.pop_back();
}

}  // namespace perigee

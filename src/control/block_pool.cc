#include "control/block_pool.h"

#include <utility>

namespace perigee {

BlockPool::BlockPool(int32_t num_pages, std::function<void(PageId)> on_evict, int32_t dcp_index)
    : on_evict_(std::move(on_evict)), dcp_index_(dcp_index) {
  CHECK(num_pages > 0, "a pool of ", num_pages, " pages");
  pages_.resize(static_cast<size_t>(num_pages));
  free_.reserve(static_cast<size_t>(num_pages));
  for (int32_t page = num_pages - 1; page >= 0; --page) {
    at(PageId(page)).older = num_free();
    free_.push_back(page);
  }
}

PageHandle BlockPool::allocate(PageOwner owner) {
  PageId page;
  if (!free_.empty()) {
    page = PageId(free_.back());
    free_.pop_back();
    at(page).older = kNil;
  } else if (num_cached_ > 0) {
    page = PageId(demoted_.oldest != kNil ? demoted_.oldest : cached_.oldest);
    remove_cached(page);
    at(page).demoted = false;
    at(page).published = false;
    if (on_evict_) on_evict_(page);
    --owned(at(page).owner);
  } else {
    return {};
  }
  CHECK(at(page).holders == 0, "page ", page, " is allocated while it has holders");
  at(page).holders = 1;
  at(page).owner = owner;
  ++owned(owner);
  return PageHandle(this, page);
}

PageHandle BlockPool::share(PageId page) {
  Page& entry = at(page);
  CHECK(entry.holders > 0 || entry.published, "a free page is shared: ", page);
  if (entry.holders == 0) remove_cached(page);
  entry.demoted = false;
  ++entry.holders;
  return PageHandle(this, page);
}

void BlockPool::publish(PageId page) {
  CHECK(at(page).holders > 0, "a page without holder is published: ", page);
  at(page).published = true;
}

void BlockPool::unpublish(PageId page) {
  Page& entry = at(page);
  if (!entry.published) return;
  entry.published = false;
  if (entry.holders == 0) {
    remove_cached(page);
    push_free(page);
  }
  entry.demoted = false;
}

void BlockPool::demote(PageId page) {
  Page& entry = at(page);
  CHECK(entry.published, "an unpublished page is demoted: ", page);
  if (entry.demoted) return;
  if (entry.holders == 0) remove_cached(page);
  entry.demoted = true;
  if (entry.holders == 0) push_cached(page);
}

void BlockPool::drop_holder(PageId page) {
  Page& entry = at(page);
  CHECK(entry.holders > 0, "page ", page, " is released twice");
  if (--entry.holders > 0) return;
  if (entry.published) {
    push_cached(page);
  } else {
    push_free(page);
  }
}

void BlockPool::push_free(PageId page) {
  --owned(std::exchange(at(page).owner, PageOwner::kNone));
  at(page).older = num_free();
  free_.push_back(page.value);
}

void BlockPool::push_cached(PageId page) {
  Page& entry = at(page);
  List& list = list_of(entry);
  entry.older = list.newest;
  entry.newer = kNil;
  (list.newest == kNil ? list.oldest : at(PageId(list.newest)).newer) = page.value;
  list.newest = page.value;
  ++num_cached_;
}

void BlockPool::remove_cached(PageId page) {
  Page& entry = at(page);
  List& list = list_of(entry);
  (entry.older == kNil ? list.oldest : at(PageId(entry.older)).newer) = entry.newer;
  (entry.newer == kNil ? list.newest : at(PageId(entry.newer)).older) = entry.older;
  entry.older = entry.newer = kNil;
  --num_cached_;
}

void BlockPool::check_page(PageId page) const {
  const Page& entry = at(page);
  CHECK(entry.holders >= 0 && (entry.published || !entry.demoted), "page ", page, " has ", entry.holders, " holders");
  if (entry.holders > 0) {
    CHECK(entry.owner != PageOwner::kNone, "used page ", page, " is of no type");
    return;
  }
  if (!entry.published) {
    CHECK(entry.owner == PageOwner::kNone, "free page ", page, " is in use");
    CHECK(entry.older >= 0 && entry.older < num_free() && free_[static_cast<size_t>(entry.older)] == page.value,
          "page ", page, " is lost");
    return;
  }
  CHECK(entry.owner != PageOwner::kNone, "cached page ", page, " is of no type");
  const List& list = entry.demoted ? demoted_ : cached_;
  const auto is_neighbour = [&](int32_t other) { return at(PageId(other)).demoted == entry.demoted; };
  CHECK(entry.older == kNil ? list.oldest == page.value
                            : at(PageId(entry.older)).newer == page.value && is_neighbour(entry.older),
        "cached page ", page, " has lost the one before it");
  CHECK(entry.newer == kNil ? list.newest == page.value
                            : at(PageId(entry.newer)).older == page.value && is_neighbour(entry.newer),
        "cached page ", page, " has lost the one after it");
}

void BlockPool::check_integrity() const {
  for (int32_t page = 0; page < num_pages(); ++page) check_page(PageId(page));
  std::vector<uint8_t> idle(pages_.size(), 0);
  for (const int32_t page : free_) {
    const Page& entry = at(PageId(page));
    CHECK(entry.holders == 0 && !entry.published && !entry.demoted && entry.owner == PageOwner::kNone, "free page ",
          page, " is in use");
    CHECK(idle[static_cast<size_t>(page)]++ == 0, "page ", page, " is free twice");
  }
  int32_t num_listed = 0;
  for (const List* list : {&cached_, &demoted_}) {
    for (int32_t page = list->oldest; page != kNil; page = at(PageId(page)).newer) {
      const Page& entry = at(PageId(page));
      CHECK(entry.holders == 0 && entry.published, "cached page ", page, " is in use");
      CHECK(entry.demoted == (list == &demoted_), "page ", page, " is in the wrong list");
      CHECK(idle[static_cast<size_t>(page)]++ == 0, "page ", page, " is free and cached");
      ++num_listed;
    }
  }
  CHECK(num_listed == num_cached_, num_listed, " cached pages listed, ", num_cached_, " counted");
  std::array<int32_t, kNumPageOwners> num_owned{};
  for (size_t page = 0; page < pages_.size(); ++page) {
    CHECK((pages_[page].holders == 0) == (idle[page] == 1), "page ", page, " is lost");
    if (pages_[page].owner != PageOwner::kNone) ++num_owned[static_cast<size_t>(pages_[page].owner)];
  }
  CHECK(num_owned == num_owned_, "pages are counted under the wrong owner");
}

}  // namespace perigee

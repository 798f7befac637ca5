#include "control/block_pool.h"

#include <gtest/gtest.h>

#include <list>

#include "base/rng.h"
#include "base/soak.h"

namespace perigee {
namespace {

// What a pool is, written the slow way.
struct Model {
  explicit Model(int num_pages) : holders(num_pages, 0), published(num_pages, false), is_demoted(num_pages, false) {
    for (int page = num_pages - 1; page >= 0; --page) free.push_back(page);
  }

  int allocate() {
    int page = -1;
    if (!free.empty()) {
      page = free.back();
      free.pop_back();
    } else if (!cached.empty() || !demoted.empty()) {
      std::list<int>& list = demoted.empty() ? cached : demoted;
      page = list.front();
      list.pop_front();
      published[page] = is_demoted[page] = false;
      evicted.push_back(page);
    } else {
      return -1;
    }
    holders[page] = 1;
    return page;
  }
  void share(int page) {
    if (holders[page]++ == 0) forget(page);
    is_demoted[page] = false;
  }
  void release(int page) {
    if (--holders[page] > 0) return;
    if (!published[page])
      free.push_back(page);
    else
      (is_demoted[page] ? demoted : cached).push_back(page);
  }
  void demote(int page) {
    if (is_demoted[page]) return;
    is_demoted[page] = true;
    if (holders[page] > 0) return;
    cached.remove(page);
    demoted.push_back(page);
  }
  void forget(int page) {
    cached.remove(page);
    demoted.remove(page);
  }
  void unpublish(int page) {
    if (published[page] && holders[page] == 0) {
      forget(page);
      free.push_back(page);
    }
    published[page] = is_demoted[page] = false;
  }

  std::vector<int> holders, free, evicted;
  std::vector<bool> published, is_demoted;
  std::list<int> cached, demoted;  // least recently released first
};

class PoolAndModel {
 public:
  PoolAndModel(uint64_t seed, int num_pages)
      : rng_(seed), model_(num_pages), pool_(num_pages, [this](PageId page) { evicted_.push_back(page.value); }) {}

  void step() {
    switch (rng_.below(7)) {
      case 0:
      case 1: allocate(); break;
      case 2: share(); break;
      case 3: publish(); break;
      case 4: unpublish(); break;
      case 5: demote(); break;
      default: release(); break;
    }
  }

  void allocate() {
    PageHandle handle = pool_.allocate(rng_.chance(0.5) ? PageOwner::kLatent : PageOwner::kState);
    const int page = model_.allocate();
    ASSERT_EQ(handle ? handle.page().value : -1, page);
    if (handle) handles_.push_back(std::move(handle));
  }
  void share() {
    const int page = static_cast<int>(rng_.below(model_.holders.size()));
    if (model_.holders[page] == 0 && !model_.published[page]) return;
    handles_.push_back(pool_.share(PageId(page)));
    model_.share(page);
  }
  void publish() {
    if (handles_.empty()) return;
    const PageId page = any_handle().page();
    pool_.publish(page);
    model_.published[page.value] = true;
  }
  void unpublish() {
    const int page = static_cast<int>(rng_.below(model_.holders.size()));
    pool_.unpublish(PageId(page));
    model_.unpublish(page);
  }
  void demote() {
    const int page = static_cast<int>(rng_.below(model_.holders.size()));
    if (!model_.published[page]) return;
    pool_.demote(PageId(page));
    model_.demote(page);
  }
  void release() {
    if (handles_.empty()) return;
    std::swap(any_handle(), handles_.back());
    const int page = handles_.back().page().value;
    handles_.pop_back();
    model_.release(page);
  }

  void compare() const {
    ASSERT_EQ(pool_.num_free(), static_cast<int>(model_.free.size()));
    ASSERT_EQ(pool_.num_cached(), static_cast<int>(model_.cached.size() + model_.demoted.size()));
    ASSERT_EQ(evicted_, model_.evicted);
    for (size_t page = 0; page < model_.holders.size(); ++page) {
      ASSERT_EQ(pool_.num_holders(PageId(static_cast<int>(page))), model_.holders[page]);
      ASSERT_EQ(pool_.is_published(PageId(static_cast<int>(page))), model_.published[page]);
    }
    pool_.check_integrity();
  }
  void forget_evicted() {
    evicted_.clear();
    model_.evicted.clear();
  }

 private:
  PageHandle& any_handle() { return handles_[rng_.below(handles_.size())]; }

  Rng rng_;
  Model model_;
  std::vector<int> evicted_;
  BlockPool pool_;
  std::vector<PageHandle> handles_;
};

TEST(BlockPool, AgreesWithTheModelOverRandomOperations) {
  const int64_t num_operations = soak_requested() ? 10'000'000 : 1'000'000;
  constexpr int kOperationsPerPool = 1000;
  for (int64_t pool = 0; pool < num_operations / kOperationsPerPool; ++pool) {
    PoolAndModel both(static_cast<uint64_t>(pool), 1 + static_cast<int>(pool % 23));
    for (int i = 0; i < kOperationsPerPool; ++i) {
      ASSERT_NO_FATAL_FAILURE(both.step()) << "pool " << pool << " operation " << i;
      if (i % 8 != 0) continue;
      ASSERT_NO_FATAL_FAILURE(both.compare()) << "pool " << pool << " operation " << i;
      both.forget_evicted();
    }
  }
}

TEST(BlockPool, LosingTheLastHandleFreesThePage) {
  BlockPool pool(2, {});
  PageHandle first = pool.allocate(PageOwner::kLatent);
  PageHandle second = pool.share(first.page());
  EXPECT_EQ(pool.num_used(), 1);
  first.reset();
  EXPECT_EQ(pool.num_used(), 1);
  second = PageHandle();
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPool, MovedHandlesHoldOnce) {
  BlockPool pool(1, {});
  PageHandle a = pool.allocate(PageOwner::kLatent);
  PageHandle b = std::move(a);
  EXPECT_FALSE(a);
  EXPECT_EQ(pool.num_holders(b.page()), 1);
  PageHandle& same = b;
  b = std::move(same);
  EXPECT_TRUE(b);
  EXPECT_FALSE(pool.allocate(PageOwner::kLatent));
}

TEST(BlockPool, EvictsTheLeastRecentlyReleased) {
  std::vector<PageId> evicted;
  BlockPool pool(3, [&](PageId page) { evicted.push_back(page); });
  std::vector<PageHandle> handles;
  for (int i = 0; i < 3; ++i) {
    handles.push_back(pool.allocate(PageOwner::kLatent));
    pool.publish(handles.back().page());
  }
  const PageId tail = handles[2].page();
  const PageId middle = handles[1].page();
  release_back_to_front(handles);
  EXPECT_EQ(pool.num_cached(), 3);
  { const PageHandle revived = pool.share(tail); }  // now the most recent
  const PageHandle fresh = pool.allocate(PageOwner::kState);
  EXPECT_EQ(evicted, std::vector<PageId>{middle});
  EXPECT_EQ(pool.owner(fresh.page()), PageOwner::kState);
}

TEST(BlockPool, DemotedPagesGoFirstUntilTheyAreShared) {
  std::vector<PageId> evicted;
  BlockPool pool(3, [&](PageId page) { evicted.push_back(page); });
  std::vector<PageHandle> handles;
  for (int i = 0; i < 3; ++i) {
    handles.push_back(pool.allocate(PageOwner::kLatent));
    pool.publish(handles.back().page());
  }
  const PageId first = handles[0].page(), second = handles[1].page(), third = handles[2].page();
  pool.demote(second);
  handles.clear();
  pool.demote(third);
  { const PageHandle revived = pool.share(second); }
  handles.push_back(pool.allocate(PageOwner::kLatent));
  handles.push_back(pool.allocate(PageOwner::kLatent));
  EXPECT_EQ(evicted, (std::vector<PageId>{third, first}));
  EXPECT_TRUE(pool.is_published(second));
}

TEST(BlockPoolDeathTest, MisuseIsABug) {
  BlockPool pool(2, {});
  EXPECT_DEATH(pool.share(PageId(0)), "free page is shared");
  EXPECT_DEATH(pool.publish(PageId(0)), "without holder");
  EXPECT_DEATH(pool.demote(PageId(0)), "unpublished");
}

}  // namespace
}  // namespace perigee

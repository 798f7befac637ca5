// Books that are wrong are found: each field of a page, by the whole check and by the one that goes slice by slice.
#include <gtest/gtest.h>

#include "control/scheduler_impl.h"
#include "control/scheduler_testing.h"

namespace perigee {

struct BlockPoolBreaker {
  using Page = BlockPool::Page;
  static Page& page(BlockPool& pool, int32_t page) { return pool.at(PageId(page)); }
  static std::vector<int32_t>& free(BlockPool& pool) { return pool.free_; }
};

struct SchedulerBreaker {
  static Scheduler::Impl& impl(Scheduler& scheduler) { return *scheduler.impl_; }
  static PrefixIndex& index(PrefixCache& cache) { return cache.index_; }
};

namespace {

// Pages 0 and 1 are used, 2 ... 4 cached, 5 and 6 cached and demoted, 7 free.
class PoolIntegrityDeathTest : public testing::Test {
 protected:
  PoolIntegrityDeathTest() : pool_(8, nullptr) {
    for (int i = 0; i < 7; ++i) {
      handles_.push_back(pool_.allocate(PageOwner::kLatent));
      if (i >= 2) pool_.publish(handles_.back().page());
    }
    pool_.demote(PageId(5));
    pool_.demote(PageId(6));
    handles_.erase(handles_.begin() + 2, handles_.end());
  }
  template <typename Break>
  void expect_found(int32_t page, Break break_it, const char* what) {
    pool_.check_integrity();
    for (int32_t i = 0; i < pool_.num_pages(); ++i) pool_.check_page(PageId(i));
    EXPECT_DEATH((break_it(BlockPoolBreaker::page(pool_, page)), pool_.check_page(PageId(page))), what);
    EXPECT_DEATH((break_it(BlockPoolBreaker::page(pool_, page)), pool_.check_integrity()), "CHECK");
  }
  using Page = BlockPoolBreaker::Page;
  BlockPool pool_;
  std::vector<PageHandle> handles_;
};

TEST_F(PoolIntegrityDeathTest, UsedPages) {
  expect_found(
      0, [](Page& page) { page.holders = -1; }, "holders");
  expect_found(
      0, [](Page& page) { page.holders = 0; }, "in use");
  expect_found(
      1, [](Page& page) { page.owner = PageOwner::kNone; }, "no type");
  expect_found(
      1, [](Page& page) { page.demoted = true; }, "holders");
}

TEST_F(PoolIntegrityDeathTest, CachedPages) {
  expect_found(
      3, [](Page& page) { page.published = false; }, "in use");
  expect_found(
      3, [](Page& page) { page.owner = PageOwner::kNone; }, "no type");
  expect_found(
      3, [](Page& page) { page.demoted = true; }, "the one before it");
  expect_found(
      3, [](Page& page) { page.older = page.newer; }, "the one before it");
  expect_found(
      3, [](Page& page) { page.older = -1; }, "the one before it");
  expect_found(
      3, [](Page& page) { page.newer = -1; }, "the one after it");
  expect_found(
      2, [](Page& page) { page.newer = 3 - page.newer; }, "the one after it");
  expect_found(
      5, [](Page& page) { page.demoted = false; }, "the one");
}

TEST_F(PoolIntegrityDeathTest, FreePages) {
  expect_found(
      7, [](Page& page) { page.older = 1; }, "lost");
  expect_found(
      7, [](Page& page) { page.owner = PageOwner::kState; }, "in use");
  expect_found(
      7, [](Page& page) { page.published = true; }, "no type");
  EXPECT_DEATH((BlockPoolBreaker::free(pool_).push_back(7), pool_.check_integrity()), "free twice");
  EXPECT_DEATH((BlockPoolBreaker::free(pool_)[0] = 1, pool_.check_page(PageId(7))), "lost");
}

// The page of a sequence that runs is far back in the pool: found in the slice that holds it, and not before.
TEST(SchedulerIntegrityDeathTest, SlicesCoverThePoolInTurn) {
  SchedulerConfig config = small_config();
  config.num_pages = 100;
  config.max_model_len = 6400;
  config.max_step_tokens = 6400;
  SchedulerHarness h(config);
  h.submit(64 * 90, 5);
  h.step();
  PrefixIndex& index = SchedulerBreaker::index(SchedulerBreaker::impl(h.scheduler).cache_);
  const auto slices_until_found = [&](int count) {
    index.erase(PlaceId(70));
    for (int i = 0; i < count; ++i) h.scheduler.check_some(20);
  };
  for (int round = 0; round < 2; ++round)
    for (int slice = 0; slice < 5; ++slice) h.scheduler.check_some(20);
  EXPECT_EXIT((slices_until_found(3), std::_Exit(3)), testing::ExitedWithCode(3), "");
  EXPECT_DEATH(slices_until_found(4), "page 70 is published and unknown");
  EXPECT_DEATH((index.erase(PlaceId(70)), h.scheduler.check_integrity()), "page 70 is published and unknown");
}

TEST(SchedulerIntegrityDeathTest, BooksOfSequencesAndSlots) {
  SchedulerHarness h(small_config());
  h.submit(100, 5);
  h.submit(100, 5);
  h.step();
  h.submit(2000 / 64, 5, 3);
  auto& impl = SchedulerBreaker::impl(h.scheduler);
  const auto expect_found = [&](auto break_it, const char* what) {
    h.scheduler.check_integrity();
    EXPECT_DEATH((break_it(), h.scheduler.check_some(1)), what);
    EXPECT_DEATH((break_it(), h.scheduler.check_integrity()), what);
  };
  Running& running = impl.running_[0]->running();
  expect_found([&] { ++impl.num_ended_; }, "in limbo");
  expect_found([&] { impl.sequences_[SequenceId(99)] = nullptr; }, "in no list");
  expect_found([&] { impl.waiting_[0] = impl.running_[1], std::swap(impl.running_[0], impl.running_[1]); },
               "out of order");
  expect_found([&] { impl.free_slots_.pop_back(); }, "a slot is lost");
  expect_found([&] { impl.slots_[static_cast<size_t>(running.slot.value)] = impl.running_[1]; }, "another sequence");
  expect_found([&] { running.num_confirmed = running.scheduled.least + 1; }, "ahead of itself");
  expect_found([&] { running.scheduled.most = 1000; }, "outside its pages");
  expect_found([&] { running.ids_in_flight = 9; }, "samples too much");
  expect_found([&] { running.plans = 1; }, "lost a plan");
  expect_found([&] { ++running.num_blocks_at[0]; }, "miscounts its blocks");
  expect_found([&] { impl.waiting_[0]->state = Running(); }, "holds something");
  EXPECT_DEATH((running.pages.pop_back(), h.scheduler.check_integrity()), "outside its pages");
  std::vector<PageHandle>& pages = impl.running_[1]->running().pages;
  const PlaceId page = running.pages[0].place();
  EXPECT_DEATH((pages.push_back(impl.cache_.pools().share(page)), pages.pop_back(), impl.cache_.pools().demote(page),
                impl.cache_.checkpoints().drop(page), SchedulerBreaker::index(impl.cache_).erase(page),
                h.scheduler.check_integrity()),
               "published and unknown");
}

}  // namespace
}  // namespace perigee

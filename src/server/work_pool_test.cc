#include "server/work_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <new>

#include "base/eventually.h"

namespace perigee {
namespace {

using Lane = WorkPool::Lane;

// Long work that does not end leaves short work its threads, and the other way round it may use all of them.
TEST(WorkPool, LongWorkNeverDelaysShortWork) {
  WorkPool pool(3, 100);
  std::promise<void> gate;
  const std::shared_future<void> open = gate.get_future().share();
  std::atomic<int> long_begun{0}, short_done{0};
  for (int i = 0; i < 5; ++i)
    pool.submit(Lane::kLong, [&, open] {
      ++long_begun;
      open.wait();
    });
  EXPECT_TRUE(eventually([&] { return long_begun == 1; }));
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(pool.try_submit(Lane::kShort, [&] { ++short_done; }));
  EXPECT_TRUE(eventually([&] { return short_done == 20; }));
  EXPECT_EQ(long_begun, 1);
  gate.set_value();
  EXPECT_TRUE(eventually([&] { return long_begun == 5; }));
}

TEST(WorkPool, RefusesOverItsCapacityButNotWhatIsReserved) {
  std::atomic<int> done{0};
  std::promise<void> gate;
  const std::shared_future<void> open = gate.get_future().share();
  WorkPool pool(2, 2);
  std::atomic<int> begun{0};
  for (const Lane lane : {Lane::kLong, Lane::kShort})
    pool.submit(lane, [&, open] {
      ++begun;
      open.wait();
    });
  ASSERT_TRUE(eventually([&] { return begun == 2; }));
  EXPECT_TRUE(pool.try_submit(Lane::kShort, [&] { ++done; }));
  EXPECT_TRUE(pool.try_submit(Lane::kLong, [&] { ++done; }));
  EXPECT_FALSE(pool.try_submit(Lane::kShort, [&] { ++done; }));
  EXPECT_FALSE(pool.try_submit(Lane::kLong, [&] { ++done; }));
  pool.submit(Lane::kLong, [&] { ++done; });
  gate.set_value();
  EXPECT_TRUE(eventually([&] { return done == 3; }));
}

TEST(WorkPool, AFailureOfOnePieceIsNotTheEnd) {
  WorkPool pool(2, 10);
  std::atomic<bool> done{false};
  pool.submit(Lane::kShort, [] { throw std::bad_alloc(); });
  pool.submit(Lane::kShort, [&] { done = true; });
  EXPECT_TRUE(eventually([&] { return done.load(); }));
}

TEST(WorkPool, ItsEndDropsWhatWaits) {
  const auto held = std::make_shared<int>(0);
  std::promise<void> gate;
  std::atomic<bool> begun{false};
  auto pool = std::make_unique<WorkPool>(2, 10);
  pool->submit(Lane::kLong, [&] {
    begun = true;
    gate.get_future().wait();
  });
  ASSERT_TRUE(eventually([&] { return begun.load(); }));
  EXPECT_TRUE(pool->try_submit(Lane::kLong, [held] { ++*held; }));
  std::thread end([&] { pool.reset(); });
  EXPECT_TRUE(eventually([&] { return held.use_count() == 1; }));
  gate.set_value();
  end.join();
  EXPECT_EQ(*held, 0);
}

}  // namespace
}  // namespace perigee

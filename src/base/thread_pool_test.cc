#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

namespace perigee {
namespace {

TEST(ThreadPool, EveryTaskRunsOnceOnOneThread) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const int64_t tasks : {0, 1, 2, 7, 8, 1000}) {
      std::vector<int> runs(static_cast<size_t>(tasks)), thread_of(static_cast<size_t>(tasks), -1);
      pool.run(tasks, [&](int64_t task, int thread) {
        ++runs[static_cast<size_t>(task)];
        thread_of[static_cast<size_t>(task)] = thread;
      });
      EXPECT_EQ(std::count(runs.begin(), runs.end(), 1), tasks);
      EXPECT_TRUE(std::is_sorted(thread_of.begin(), thread_of.end()));
      for (const int thread : thread_of) EXPECT_TRUE(thread >= 0 && thread < threads);
    }
  }
}

// What a run wrote is seen by the caller and by the next run, also after the workers went to sleep.
TEST(ThreadPool, RunsFollowOneAnother) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64);
  for (int round = 0; round < 2000; ++round) {
    pool.run(64, [&](int64_t task, int) { values[static_cast<size_t>(63 - task)] += task; });
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(values[static_cast<size_t>(i)], 2000 * (63 - i));
}

}  // namespace
}  // namespace perigee

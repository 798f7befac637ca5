#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <numeric>

#include "base/soak.h"

namespace perigee {
namespace {

TEST(ThreadPool, EveryTaskRunsOnce) {
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

std::atomic<bool> held{false}, let_go{false};

void hold(int) {
  held = true;
  while (!let_go) {
  }
}

// What a thread number stands for, such as working memory, is one task's at a time.
TEST(ThreadPool, AThreadNumberIsOfOneTaskAtATime) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> most{0};
  for (int round = 0; round < 200; ++round)
    pool.run(64, [&](int64_t, int thread) {
      const int now = ++inside[static_cast<size_t>(thread)];
      if (now > 1) most = now;
      --inside[static_cast<size_t>(thread)];
    });
  EXPECT_EQ(most, 0);
}

// Of 16 tasks the caller takes two and stays in the first until all others but the second are done.
TEST(ThreadPool, OthersTakeTheTasksOfASlowThread) {
  ThreadPool pool(2);
  std::atomic<int> done{0};
  int seen = 0;
  pool.run(16, [&](int64_t task, int) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (task == 0 && done < 14 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    if (task == 0) seen = done;
    ++done;
  });
  EXPECT_GE(seen, 14);
  EXPECT_EQ(done, 16);
}

// A thread that does not get the processor holds nobody up: the caller does all.
TEST(ThreadPool, DoesNotWaitForAThreadThatHasNotBegun) {
  if (kSanitized) GTEST_SKIP() << "the thread sanitizer delivers signals when it likes";
  held = let_go = false;
  ThreadPool pool(2);
  std::atomic<pthread_t> other{};
  while (other.load() == pthread_t())  // until the worker gets a share at all
    pool.run(2, [&, caller = pthread_self()](int64_t, int) {
      if (pthread_self() != caller) other = pthread_self();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  const auto before = std::signal(SIGUSR1, hold);
  pthread_kill(other.load(), SIGUSR1);
  while (!held) std::this_thread::yield();
  std::vector<int> thread_of(7, -1);
  pool.run(7, [&](int64_t task, int thread) { thread_of[static_cast<size_t>(task)] = thread; });
  EXPECT_EQ(thread_of, std::vector<int>(7, 0));
  let_go = true;
  std::signal(SIGUSR1, before);
  for (int round = 0; round < 100; ++round)
    pool.run(7, [&](int64_t task, int) { ++thread_of[static_cast<size_t>(task)]; });
  EXPECT_EQ(thread_of, std::vector<int>(7, 100));
}

}  // namespace
}  // namespace perigee

#include "base/thread_pool.h"

#include <chrono>

#include "base/check.h"

namespace perigee {
namespace {

// Longer than the gap between two ops of a step, shorter than anyone would notice idle.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kSpinsOfLook = 64;  // between two looks at the clock

// Returns once `value` differs from `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + kSpinTime;
  do {
    for (int spin = 0; spin < kSpinsOfLook; ++spin) {
      if (value.load(std::memory_order_acquire) != old) return;
      __builtin_ia32_pause();
    }
  } while (Clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

constexpr uint64_t pack(uint64_t begin, uint64_t end) {
  return begin << 32 | end;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK(num_threads >= 1, "a thread pool of ", num_threads, " threads");
  ranges_ = std::vector<Range>(static_cast<size_t>(num_threads));
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::dispatch(const Job& job) {
  CHECK(job.num_tasks <= UINT32_MAX, "a run of ", job.num_tasks, " tasks");
  job_ = job;
  const auto num_tasks = static_cast<uint64_t>(job.num_tasks), num_threads = static_cast<uint64_t>(size());
  num_left_.store(static_cast<uint32_t>(num_tasks), std::memory_order_relaxed);
  for (uint64_t i = 0; i < num_threads; ++i)
    ranges_[i].left.store(pack(num_tasks * i / num_threads, num_tasks * (i + 1) / num_threads),
                          std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  run_tasks(0);
  for (uint32_t left = num_left_.load(std::memory_order_acquire); left != 0;
       left = num_left_.load(std::memory_order_acquire)) {
    wait_while(num_left_, left);
  }
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;;) {
    wait_while(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);  // several later, if others did this thread's part of some
    if (stop_.load(std::memory_order_relaxed)) return;
    run_tasks(thread);
  }
}

// A run does not end, nor is its job replaced, before all of its tasks are done. So who took some may read job_, even
// who still looks for tasks of an older run: it then has those of this one.
void ThreadPool::run_tasks(int thread) {
  for (int i = 0; i < size(); ++i) {
    const bool own = i == 0;
    Range& range = ranges_[static_cast<size_t>((thread + i) % size())];
    for (Tasks tasks = range.take(own); tasks.count() > 0; tasks = range.take(own)) {
      job_.call(job_.body, tasks.begin, tasks.end, thread);
      if (num_left_.fetch_sub(tasks.count(), std::memory_order_acq_rel) == tasks.count()) num_left_.notify_one();
    }
  }
}

// A quarter, so that few takes make a range and the last ones are single tasks.
ThreadPool::Tasks ThreadPool::Range::take(bool from_front) {
  for (uint64_t before = left.load(std::memory_order_acquire);;) {
    const Tasks all{.begin = static_cast<uint32_t>(before >> 32), .end = static_cast<uint32_t>(before)};
    if (all.count() == 0) return {};
    const uint32_t n = (all.count() - 1) / 4 + 1;
    const Tasks taken = from_front ? Tasks{all.begin, all.begin + n} : Tasks{all.end - n, all.end};
    const uint64_t after = from_front ? pack(taken.end, all.end) : pack(all.begin, taken.begin);
    if (left.compare_exchange_weak(before, after, std::memory_order_acq_rel, std::memory_order_acquire)) return taken;
  }
}

}  // namespace perigee

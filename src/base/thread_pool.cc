#include "base/thread_pool.h"

#include "base/check.h"

namespace perigee {
namespace {

// About 30 microseconds: longer than the gap between two ops of a step, shorter than anyone would notice idle.
constexpr int kSpins = 600;

// Returns once `value` differs from `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    __builtin_ia32_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK(num_threads >= 1, "a thread pool of ", num_threads, " threads");
  claimed_ = std::vector<std::atomic<uint32_t>>(static_cast<size_t>(num_threads));
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
  job_ = job;
  num_left_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  const uint32_t epoch = epoch_.fetch_add(1, std::memory_order_release) + 1;
  epoch_.notify_all();
  run_share(0);
  for (int share = 1; share < size(); ++share) {
    if (!claim(share, epoch)) continue;
    run_share(share);
    num_left_.fetch_sub(1, std::memory_order_acq_rel);
  }
  for (uint32_t left = num_left_.load(std::memory_order_acquire); left != 0;
       left = num_left_.load(std::memory_order_acquire)) {
    wait_while(num_left_, left);
  }
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;;) {
    wait_while(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);  // several later, if the caller did this thread's share of some
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!claim(thread, seen)) continue;
    run_share(thread);
    if (num_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_left_.notify_one();
  }
}

// An epoch does not end, nor is its job replaced, before each of its shares is claimed and done. So who claims one has
// that epoch's job, and who comes too late finds it taken.
bool ThreadPool::claim(int share, uint32_t epoch) {
  uint32_t before = epoch - 1;
  return claimed_[static_cast<size_t>(share)].compare_exchange_strong(before, epoch, std::memory_order_acq_rel);
}

void ThreadPool::run_share(int share) {
  const int64_t num_threads = size();
  const int64_t begin = job_.num_tasks * share / num_threads;
  const int64_t end = job_.num_tasks * (share + 1) / num_threads;
  if (begin < end) job_.call(job_.body, begin, end, share);
}

}  // namespace perigee

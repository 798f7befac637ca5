#include "base/thread_pool.h"

#include "base/check.h"

namespace perigee {
namespace {

// About 30 microseconds: longer than the gap between two ops of a step, shorter than anyone would notice idle.
constexpr int kSpins = 600;

// Returns once `value` is no longer `old`.
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
  num_running_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  run_share(0);
  for (uint32_t left = num_running_.load(std::memory_order_acquire); left != 0;
       left = num_running_.load(std::memory_order_acquire)) {
    wait_while(num_running_, left);
  }
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;;) {
    wait_while(epoch_, seen);
    ++seen;  // the caller waits for every worker, so epochs are seen one by one
    if (stop_.load(std::memory_order_relaxed)) return;
    run_share(thread);
    if (num_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_running_.notify_one();
  }
}

void ThreadPool::run_share(int thread) {
  const int64_t num_threads = size();
  const int64_t begin = job_.num_tasks * thread / num_threads;
  const int64_t end = job_.num_tasks * (thread + 1) / num_threads;
  if (begin < end) job_.call(job_.body, begin, end, thread);
}

}  // namespace perigee

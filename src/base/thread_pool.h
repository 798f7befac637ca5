// ThreadPool: fixed threads, and the one way to spread a loop over them.
//
// run() splits tasks [0, n) into one contiguous range a thread, the caller being thread 0, and returns when all are
// done. Ranges that no thread has begun when the caller is through with its own are the caller's too, so that on a busy
// machine a run does not wait until each thread has had its turn. Tasks must not depend on each other, so that results
// are the same for any number of threads. Nothing is allocated per run. One run at a time: the pool belongs to one
// caller, and a task may not call run().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace perigee {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // >= 1, the caller included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // f(task, thread) for every task in [0, num_tasks), thread in [0, size()): the range's, whoever runs it.
  template <typename F>
  void run(int64_t num_tasks, F&& f) {
    using Body = std::remove_reference_t<F>;
    if (workers_.empty() || num_tasks <= 1) {
      for (int64_t task = 0; task < num_tasks; ++task) f(task, 0);
      return;
    }
    const auto call = [](void* body, int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) (*static_cast<Body*>(body))(task, thread);
    };
    dispatch({.call = call, .body = const_cast<void*>(static_cast<const void*>(&f)), .num_tasks = num_tasks});
  }

 private:
  struct Job {
    void (*call)(void* body, int64_t begin, int64_t end, int thread) = nullptr;
    void* body = nullptr;
    int64_t num_tasks = 0;
  };

  void dispatch(const Job& job);
  void work(int thread);
  bool claim(int share, uint32_t epoch);
  void run_share(int share);

  Job job_;  // written by the caller before epoch_ is raised, read by who has claimed a share of that epoch
  std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> num_left_{0};           // shares of this epoch, but the caller's own, that are not done
  std::vector<std::atomic<uint32_t>> claimed_;  // the newest epoch of which each share is taken
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace perigee

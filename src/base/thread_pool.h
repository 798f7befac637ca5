// ThreadPool: fixed threads, and the one way to spread a loop over them.
//
// run() splits tasks [0, n) into one contiguous range a thread, the caller being thread 0, and returns when all are
// done. A thread takes tasks from the front of its range, a part at a time, and when that is empty from the ends of the
// others', so that all end together however fast each is, and a run does not wait for a thread that is not there. Tasks
// must not depend on each other, so that results are the same for any number of threads. Nothing is allocated per run.
// One run at a time: the pool belongs to one caller, and a task may not call run().
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

  // f(task, thread) for every task in [0, num_tasks), thread in [0, size()): which thread runs it.
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

  struct Tasks {
    uint32_t begin = 0, end = 0;
    uint32_t count() const { return end - begin; }
  };

  // What nobody has taken of a thread's tasks: begin in the high half, end in the low one. On a cache line of its own.
  struct alignas(64) Range {
    Tasks take(bool from_front);
    std::atomic<uint64_t> left{0};
  };

  void dispatch(const Job& job);
  void work(int thread);
  void run_tasks(int thread);

  Job job_;  // written by the caller before the ranges, read by who has taken tasks
  std::vector<Range> ranges_;
  std::atomic<uint32_t> epoch_{0};     // of runs
  std::atomic<uint32_t> num_left_{0};  // tasks of this run that are not done
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace perigee

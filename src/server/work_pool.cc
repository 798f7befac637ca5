#include "server/work_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <exception>

#include "base/check.h"
#include "base/log.h"

namespace perigee {

namespace {

// On Linux the priority belongs to the thread, whatever POSIX says.
void lower_priority() {
  constexpr int kNice = 5;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
}

}  // namespace

int WorkPool::default_threads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 8, 2, 8);
}

WorkPool::WorkPool(int num_threads, size_t capacity) : capacity_(capacity) {
  CHECK(num_threads >= 2, "a work pool of ", num_threads, " threads");
  for (int i = 0; i < num_threads; ++i) {
    const bool takes_long = i >= (num_threads + 1) / 2;
    threads_.emplace_back([this, takes_long] { run(takes_long); });
  }
}

WorkPool::~WorkPool() {
  {
    Queue dropped_short, dropped_long;  // destroyed after the lock is released, and before the threads are waited for
    const std::lock_guard lock(mutex_);
    stop_ = true;
    short_.swap(dropped_short);
    long_.swap(dropped_long);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool WorkPool::try_submit(Lane lane, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_ || short_.size() + long_.size() >= capacity_) return false;
    (lane == Lane::kShort ? short_ : long_).push_back(std::move(work));
  }
  wake_.notify_all();  // not one: it might be a thread that does not take this lane
  return true;
}

void WorkPool::submit(Lane lane, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    (lane == Lane::kShort ? short_ : long_).push_back(std::move(work));
  }
  wake_.notify_all();
}

WorkPool::Queue* WorkPool::next_queue(bool takes_long) {
  if (takes_long && !long_.empty()) return &long_;
  return short_.empty() ? nullptr : &short_;
}

void WorkPool::run(bool takes_long) {
  if (takes_long) lower_priority();
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || next_queue(takes_long) != nullptr; });
    if (stop_) return;
    Queue& queue = *next_queue(takes_long);
    std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    try {
      work();
    } catch (const std::exception&) {  // out of memory where even its handling had none
      log_line(LogLevel::kError, "work of a request ran out of memory");
    }
    work = nullptr;
    lock.lock();
  }
}

}  // namespace perigee

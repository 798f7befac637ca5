// In place of src/base/thread.h, for the simulation's own build of src/kv: fibers of the process that makes them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace perigee {

namespace sim {
class Fiber;
}

class Thread {
 public:
  Thread() = default;
  explicit Thread(std::function<void()> body);
  Thread(Thread&&) noexcept = default;
  Thread& operator=(Thread&&) noexcept = default;
  bool joinable() const { return fiber_ != nullptr; }
  void join();

 private:
  std::shared_ptr<sim::Fiber> fiber_;
};

class WaitCondition {
 public:
  void notify_one();
  void notify_all();
  void wait(std::unique_lock<std::mutex>& lock) { (void)wait_s(lock, 1e300); }
  template <typename Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate&& predicate) {
    while (!predicate()) wait(lock);
  }
  void wait_for(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> time) {
    (void)wait_s(lock, time.count());
  }
  template <typename Predicate>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::duration<double> time, Predicate&& predicate) {
    if (!predicate()) (void)wait_s(lock, time.count());
    return predicate();
  }

 private:
  bool wait_s(std::unique_lock<std::mutex>& lock, double seconds);
  std::vector<sim::Fiber*> waiting_;
};

void sleep_s(double seconds);
void about_to_touch(const void* page);

}  // namespace perigee

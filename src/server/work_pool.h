// WorkPool: a few threads for what would hold up an event loop: parsing, templates, tokenising, large replies.
//
// Two lanes, so that many large bodies do not delay the small ones: some threads take short work only, the others long
// work first. The latter run at a lower priority, because on a small machine the model computes on the same cores.
// Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace perigee {

class WorkPool {
 public:
  enum class Lane { kShort, kLong };

  // At least 2 threads; half of them, rounded up, take short work only. `capacity`: work that waits in try_submit().
  WorkPool(int num_threads, size_t capacity);
  // Drops what waits and joins the threads after what they are at.
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  // False when `capacity` pieces of work wait. Work must not throw.
  bool try_submit(Lane lane, std::function<void()> work);
  // For work whose amount is bounded elsewhere: the replies of accepted requests.
  void submit(Lane lane, std::function<void()> work);

  static int default_threads();  // by the number of cores

 private:
  using Queue = std::deque<std::function<void()>>;
  void run(bool takes_long);
  Queue* next_queue(bool takes_long);  // a queue with work, or nullptr

  const size_t capacity_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  Queue short_, long_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace perigee

// BoundedQueue: many producers, one consumer, a fixed capacity. The only way bytes cross threads besides atomics.
// Allocates only when it holds more items than ever before.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace perigee {

// First in, first out, in memory that is kept.
template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  void push_back(T&& item) {
    if (size_ == items_.size()) grow();
    items_[(first_ + size_) % items_.size()].emplace(std::move(item));
    ++size_;
  }
  T pop_front() {
    std::optional<T>& front = items_[first_];
    T item = std::move(*front);
    front.reset();
    first_ = (first_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  void grow() {
    std::vector<std::optional<T>> larger(std::max<size_t>(4, 2 * items_.size()));
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<std::optional<T>> items_;
  size_t first_ = 0, size_ = 0;
};

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // False when the queue is full or closed: the caller decides what that means (429, drop, ...).
  bool try_push(T item) {
    {
      std::lock_guard lock(mutex_);
      if (closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    ready_.notify_one();
    return true;
  }

  // For the few items whose number is bounded elsewhere (results of plans in flight, shutdown). False when closed.
  bool push_reserved(T item) {
    {
      std::lock_guard lock(mutex_);
      if (closed_) return false;
      items_.push_back(std::move(item));
    }
    ready_.notify_one();
    return true;
  }

  // Waits for an item. Nothing when the queue is closed and empty.
  std::optional<T> pop() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return closed_ || !items_.empty(); });
    if (items_.empty()) return std::nullopt;
    return items_.pop_front();
  }

  // An item if one waits.
  std::optional<T> try_pop() {
    std::lock_guard lock(mutex_);
    if (items_.empty()) return std::nullopt;
    return items_.pop_front();
  }

  // Moves everything that waits into `out`, after waiting up to `timeout_s` for the first item.
  void drain(std::vector<T>& out, double timeout_s) {
    std::unique_lock lock(mutex_);
    if (items_.empty() && !closed_ && timeout_s > 0)
      ready_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return closed_ || !items_.empty(); });
    while (!items_.empty()) out.push_back(items_.pop_front());
  }

  void close() {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
    }
    ready_.notify_all();
  }

  size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  Ring<T> items_;
  bool closed_ = false;
};

}  // namespace perigee

// Coroutines on one thread's event loop. Asio's own begin an operation once the coroutine is suspended: when that
// throws (std::bad_alloc) the coroutine never hears of it and is destroyed, whoever waits for it. Here whatever
// beginning a wait throws is thrown by its co_await, so every failure reaches the coroutine's own handlers.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <coroutine>
#include <exception>
#include <optional>
#include <utility>

#include "base/log.h"

namespace perigee {

struct TaskPromiseBase {
  struct Final {
    bool await_ready() const noexcept { return false; }
    template <typename Promise>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> ended) const noexcept {
      const std::coroutine_handle<> caller = ended.promise().caller;
      return caller ? caller : std::noop_coroutine();
    }
    void await_resume() const noexcept {}
  };
  std::suspend_always initial_suspend() const noexcept { return {}; }
  Final final_suspend() const noexcept { return {}; }
  void unhandled_exception() noexcept { exception = std::current_exception(); }

  std::coroutine_handle<> caller;  // null while the task has not waited for anything
  std::exception_ptr exception;
};

template <typename T>
struct TaskPromise : TaskPromiseBase {
  void return_value(T result_in) { result = std::move(result_in); }
  T take() { return std::move(*result); }
  std::optional<T> result;
};

template <>
struct TaskPromise<void> : TaskPromiseBase {
  void return_void() const noexcept {}
  void take() const noexcept {}
};

// A coroutine that runs when it is awaited, once. Its end resumes who awaits it; what it throws, the co_await throws.
template <typename T = void>
class [[nodiscard]] Task {
 public:
  struct promise_type : TaskPromise<T> {
    Task get_return_object() noexcept { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
  };

  Task(Task&& other) noexcept : coroutine_(std::exchange(other.coroutine_, nullptr)) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() {
    if (coroutine_) coroutine_.destroy();
  }

  bool await_ready() const noexcept { return false; }
  // A task that ends without a wait lets its caller go on at once: loops over such tasks take no stack.
  bool await_suspend(std::coroutine_handle<> caller) {
    coroutine_.resume();
    if (coroutine_.done()) return false;
    coroutine_.promise().caller = caller;
    return true;
  }
  T await_resume() {
    if (coroutine_.promise().exception) std::rethrow_exception(std::move(coroutine_.promise().exception));
    return coroutine_.promise().take();
  }

 private:
  explicit Task(std::coroutine_handle<promise_type> coroutine) : coroutine_(coroutine) {}
  std::coroutine_handle<promise_type> coroutine_;
};

struct DetachedTask {
  struct promise_type {
    DetachedTask get_return_object() const noexcept { return {}; }
    std::suspend_never initial_suspend() const noexcept { return {}; }
    std::suspend_never final_suspend() const noexcept { return {}; }
    void return_void() const noexcept {}
    void unhandled_exception() const noexcept { log_line(LogLevel::kError, "a task ran out of memory and ended"); }
  };
};

// On the loop's thread, or before it runs. Runs `task` to its first wait and from there on by itself. Throws when there
// is no memory to begin; the task is gone then.
inline DetachedTask spawn(Task<> task) {
  co_await task;
}

// Waits for what Begin starts, a function of the callback. co_await returns the operation's error_code.
template <typename Begin>
class Wait {
 public:
  explicit Wait(Begin begin) : begin_(std::move(begin)) {}
  bool await_ready() const noexcept { return false; }
  void await_suspend(std::coroutine_handle<> waiting) {
    begin_([this, waiting](boost::system::error_code ec) {
      ec_ = ec;
      waiting.resume();
    });
  }
  boost::system::error_code await_resume() const noexcept { return ec_; }

 private:
  Begin begin_;
  boost::system::error_code ec_;
};

template <typename Socket>
auto until_readable(Socket& socket) {
  return Wait([&socket](auto callback) { socket.async_wait(Socket::wait_read, std::move(callback)); });
}

inline auto until_writable(boost::asio::ip::tcp::socket& socket) {
  return Wait([&socket](auto callback) { socket.async_wait(socket.wait_write, std::move(callback)); });
}

// With an error: the timer was cancelled.
inline auto until_expired(boost::asio::steady_timer& timer) {
  return Wait([&timer](auto callback) { timer.async_wait(std::move(callback)); });
}

}  // namespace perigee

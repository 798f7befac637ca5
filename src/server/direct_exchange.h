// Test only: an exchange without a socket. Its executor is whoever calls run_until().
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/eventually.h"
#include "server/http_types.h"

namespace perigee {

class DirectExchange : public Exchange {
 public:
  void respond(HttpReply reply_in) override {
    if (gone || reply || streaming) return;
    reply = std::move(reply_in);
  }
  void begin_stream(HttpHeaders) override { streaming = true; }
  void write(std::string data) override { streamed += data; }
  void finish(bool) override { finished = true; }
  void on_disconnect(std::function<void()> callback) override { callback_ = std::move(callback); }
  void post(std::function<void()> work) override {
    {
      const std::lock_guard lock(mutex_);
      posted_.push_back(std::move(work));
    }
    wake_.notify_all();
  }

  // As if the client had gone; on the executor.
  void disconnect() {
    gone = true;
    if (const auto callback = std::exchange(callback_, nullptr)) callback();
  }

  // As at the end of the loop: what is posted is dropped, since it may hold what holds this.
  void drop() {
    std::deque<std::function<void()>> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(posted_);
    callback_ = nullptr;
  }

  // Runs what is posted until `condition` holds; false when it does not within the limit.
  template <typename Condition>
  bool run_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kHangLimit;
    std::unique_lock lock(mutex_);
    while (!condition()) {
      if (!wake_.wait_until(lock, end, [&] { return !posted_.empty(); })) return false;
      const std::function<void()> work = std::move(posted_.front());
      posted_.pop_front();
      lock.unlock();
      work();
      ++num_run;
      lock.lock();
    }
    return true;
  }
  bool run_until_answered() {
    return run_until([&] { return reply.has_value() || finished; });
  }

  std::optional<HttpReply> reply;
  std::string streamed;
  bool streaming = false, finished = false, gone = false;
  int num_run = 0;  // of what was posted

 private:
  std::mutex mutex_;  // guards posted_
  std::condition_variable wake_;
  std::deque<std::function<void()>> posted_;
  std::function<void()> callback_;
};

inline HttpRequest post_request(std::string path, std::string body, HttpHeaders headers = {}) {
  HttpRequest request;
  request.method = "POST";
  request.path = std::move(path);
  request.headers = std::move(headers);
  request.body = std::move(body);
  return request;
}

}  // namespace perigee

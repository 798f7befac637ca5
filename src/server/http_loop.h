// One thread's event loop. The queue of posted work is its own, so that work posted after the end is dropped instead
// of living for ever inside the io_context. Nothing that throws inside the loop ends the thread.
#pragma once

#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace perigee {

class HttpConnection;

class HttpLoop : public std::enable_shared_from_this<HttpLoop> {
 public:
  HttpLoop() : context_(1), work_(context_.get_executor()) {}
  HttpLoop(const HttpLoop&) = delete;
  HttpLoop& operator=(const HttpLoop&) = delete;

  boost::asio::io_context& context() { return context_; }
  void start();                           // on a thread of its own
  void run();                             // on this thread, until close() and the end of all work
  void post(std::function<void()> work);  // thread-safe; throws std::bad_alloc, and then `work` is not posted
  void close();                           // on the loop: closes every connection, drops posted work, lets run() end
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  // Owned by the loop thread.
  std::set<HttpConnection*> connections;
  std::set<boost::asio::steady_timer*> periodic;
  bool closing = false;
  std::array<char, 16u << 10> scratch;  // what a read returns before it is copied to its connection

 private:
  void run_posted();
  boost::asio::io_context context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::thread thread_;
  std::mutex mutex_;  // guards what follows
  std::vector<std::function<void()>> posted_;
  bool scheduled_ = false;  // a run_posted() is on its way
  bool closed_ = false;
};

}  // namespace perigee

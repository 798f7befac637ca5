// One thread's event loop, and the sockets on it. The queue of posted work is its own, so that work posted after the
// end is dropped instead of living for ever inside the io_context. Nothing that throws inside the loop ends the thread.
#pragma once

#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "server/http_task.h"

namespace perigee {

class HttpSocket;

class HttpLoop : public std::enable_shared_from_this<HttpLoop> {
 public:
  HttpLoop() : context_(1), work_(context_.get_executor()) {}
  HttpLoop(const HttpLoop&) = delete;
  HttpLoop& operator=(const HttpLoop&) = delete;

  boost::asio::io_context& context() { return context_; }
  void start();                           // on a thread of its own
  void run();                             // on this thread, until close() and the end of all work
  void post(std::function<void()> work);  // thread-safe; throws std::bad_alloc, and then `work` is not posted
  void close();                           // on the loop: closes every socket, drops posted work, lets run() end
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  // Owned by the loop thread.
  std::set<HttpSocket*> sockets;
  std::set<boost::asio::steady_timer*> periodic;
  bool closing = false;
  std::array<char, 16u << 10> scratch;  // what a read returns before it is copied

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

// A TCP socket on one loop, with one deadline for whatever is waited for. Connections of clients (http_connection.h)
// and of the router to its workers are made of it. Coroutines on the loop hold it; close() and the deadline end what
// they wait for. Everything is called on the loop.
class HttpSocket : public std::enable_shared_from_this<HttpSocket> {
 public:
  using Steady = std::chrono::steady_clock;

  // Takes the descriptor: `fd` is -1 then. Where memory runs out it may still be the caller's.
  HttpSocket(std::shared_ptr<HttpLoop> loop, int& fd);
  HttpSocket(const HttpSocket&) = delete;
  HttpSocket& operator=(const HttpSocket&) = delete;
  virtual ~HttpSocket();

  HttpLoop& loop() { return *loop_; }
  const std::shared_ptr<HttpLoop>& loop_ptr() const { return loop_; }
  boost::asio::ip::tcp::socket& socket() { return socket_; }
  bool is_open() const { return socket_.is_open(); }
  virtual void close();

  // What is waited for ends at the deadline; was_late() says that this is why.
  void expires_at(Steady::time_point when);
  void expires_after(double s);
  void expires_never() { deadline_ = Steady::time_point::max(); }
  bool was_late() const { return late_; }

  // The bytes that arrived, in the loop's scratch: valid until the next wait. Empty: no more comes.
  Task<std::string_view> read_scratch();
  // `data` stays valid; each byte taken renews `timeout_s`.
  Task<bool> write_all(std::string_view data, double timeout_s);
  bool has_sent() const { return has_sent_; }  // any byte, since it is on this loop
  // Ends it in a way that lets the peer read what was sent: a close with unread bytes would reset the connection.
  Task<> linger();

 protected:
  int release();  // takes the socket off this loop; -1: it is closed

 private:
  void arm();
  void on_timer();

  const std::shared_ptr<HttpLoop> loop_;
  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  Steady::time_point deadline_ = Steady::time_point::max();
  Steady::time_point armed_for_ = Steady::time_point::max();
  bool late_ = false;
  bool has_sent_ = false;
};

}  // namespace perigee

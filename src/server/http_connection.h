// The parts of the HTTP server that name Boost types: an event loop and the connections it owns. Included by
// http_server.cc and http_connection.cc only.
//
// A connection is one coroutine: read head, read body, call the handler, write what the exchange queues, repeat. While
// an answer is under way a second coroutine watches the socket, so that a client that leaves is noticed at once.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "server/http_server.h"

namespace perigee {

class HttpConnection;

// What the connections of one server share.
struct HttpShared {
  HttpConfig config;
  HttpServer::HeadCheck check;
  HttpHandler handler;
  HttpServer::RefusalCount count_refusal;
  std::atomic<size_t> open_connections{0};
  std::atomic<size_t> open_answers{0};
  std::atomic<bool> close_after_replies{false};

  // Connections of one key; false: it has its share already. Thread-safe.
  bool join_key(size_t key);
  void leave_key(size_t key);

 private:
  std::mutex keys_mutex_;
  std::unordered_map<size_t, size_t> connections_of_key_;  // hash of the key -> connections, none of 0
};

// One thread's event loop. The queue of posted work is its own, so that work posted after the end is dropped instead
// of living for ever inside the io_context.
class HttpLoop : public std::enable_shared_from_this<HttpLoop> {
 public:
  HttpLoop() : context_(1), work_(context_.get_executor()) {}

  boost::asio::io_context& context() { return context_; }
  void run() {
    thread_ = std::thread([this] { context_.run(); });
  }
  void post(std::function<void()> work);  // thread-safe
  void close();                           // on the loop: closes every connection, drops posted work, lets run() end
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  // Owned by the loop thread.
  std::set<HttpConnection*> connections;
  std::set<boost::asio::steady_timer*> periodic;
  bool closing = false;

 private:
  void run_posted();
  boost::asio::io_context context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::thread thread_;
  std::mutex mutex_;  // guards the two below
  std::vector<std::function<void()>> posted_;
  bool closed_ = false;
};

// Serves one accepted socket until it closes. Runs on `loop`.
boost::asio::awaitable<void> serve_connection(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpShared> shared,
                                              boost::asio::ip::tcp::socket socket);

void close_connection(HttpConnection& connection);

}  // namespace perigee

// The parts of the HTTP server that its loops share: what belongs to a client, and the client's socket on one loop.
//
// A connection is always in one of two places. Between requests it stands at the door (http_door.h), one loop that
// reads heads and answers probes; from the end of a head to the end of the answer it is served (http_exchange.h) on one
// of the serving loops. HttpPeer is what moves between them, HttpConnection its socket while it is on a loop.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "server/http_body.h"
#include "server/http_loop.h"
#include "server/http_server.h"

namespace perigee {

// What the connections of one server share.
struct HttpShared {
  HttpShared(const HttpConfig& config_in, HttpCallbacks callbacks_in)
      : config(config_in),
        callbacks(std::move(callbacks_in)),
        bodies(std::make_shared<BodyBudget>(config.max_bodies_bytes)) {}

  HttpConfig config;
  HttpCallbacks callbacks;
  const std::shared_ptr<BodyBudget> bodies;
  std::atomic<size_t> open_connections{0};
  std::atomic<size_t> in_service{0};
  std::atomic<size_t> open_answers{0};
  std::atomic<bool> close_after_replies{false};

  // Connections of one key; false: it has its share already. Thread-safe.
  bool join_key(size_t key);
  void leave_key(size_t key);

 private:
  std::mutex keys_mutex_;
  std::unordered_map<size_t, size_t> connections_of_key_;  // hash of the key -> connections, none of 0
};

class Counted {
 public:
  explicit Counted(std::atomic<size_t>& count) : count_(count) { ++count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --count_; }

 private:
  std::atomic<size_t>& count_;
};

std::string body_limit_text(const HttpConfig& config);

// Bytes that were read and not yet understood. Taking from the front moves nothing.
class ByteQueue {
 public:
  std::string_view view() const { return std::string_view(bytes_).substr(begin_); }
  bool empty() const { return begin_ == bytes_.size(); }
  void append(std::string_view more);
  void consume(size_t n);

 private:
  std::string bytes_;
  size_t begin_ = 0;
};

// A client's connection wherever it is. Counts among the open ones; the socket closes with it.
struct HttpPeer {
  HttpPeer(std::shared_ptr<HttpShared> shared_in, int fd_in) : shared(std::move(shared_in)), fd(fd_in) {
    ++shared->open_connections;
  }
  HttpPeer(const HttpPeer&) = delete;
  HttpPeer& operator=(const HttpPeer&) = delete;
  ~HttpPeer();

  void begin_service();
  void end_service();
  // From here on it counts among the connections of that key; false: they are too many, and it counts nowhere.
  bool count_for(std::string_view credentials);

  const std::shared_ptr<HttpShared> shared;
  int fd;              // -1 while an HttpConnection has it
  ByteQueue received;  // read ahead
  bool asked = false;  // it has sent a request before
  bool serving = false;
  std::optional<size_t> key;  // whose connection it is, by hash
};

// A peer's socket on one loop.
class HttpConnection : public HttpSocket {
 public:
  HttpConnection(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer);

  HttpShared& shared() { return *peer_->shared; }
  HttpPeer& peer() { return *peer_; }

  void close() override;
  std::shared_ptr<HttpPeer> leave();  // takes the socket off this loop; null when it is closed

  Task<size_t> read_some();  // appended to peer().received; 0: no more comes
  Task<bool> write_all(std::string_view data) { return HttpSocket::write_all(data, shared().config.write_timeout_s); }

  std::function<void()> lose_exchange;  // set while an answer is under way

 private:
  std::shared_ptr<HttpPeer> peer_;
};

using ConnectionPtr = std::shared_ptr<HttpConnection>;

// Closes it at the end of a scope, however that ends: its client is never left without an answer and without an end.
class ClosedAtEnd {
 public:
  explicit ClosedAtEnd(ConnectionPtr connection) : connection_(std::move(connection)) {}
  ClosedAtEnd(const ClosedAtEnd&) = delete;
  ClosedAtEnd& operator=(const ClosedAtEnd&) = delete;
  ~ClosedAtEnd() { connection_->close(); }

 private:
  const ConnectionPtr connection_;
};

}  // namespace perigee

#include "server/http_door.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "base/log.h"
#include "server/http_exchange.h"

namespace perigee {

// One of those who stand at the door, while it lives.
class HttpDoor::Place {
 public:
  Place(Standing& standing, HttpConnection* connection)
      : standing_(standing), at_(standing.insert(standing.end(), connection)) {}
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() { standing_.erase(at_); }
  void heard() { standing_.splice(standing_.end(), standing_, at_); }

 private:
  Standing& standing_;
  const Standing::iterator at_;
};

HttpDoor::HttpDoor(std::shared_ptr<HttpLoop> loop, std::vector<std::shared_ptr<HttpLoop>> serving,
                   std::shared_ptr<HttpShared> shared)
    : loop_(std::move(loop)), serving_(std::move(serving)), shared_(std::move(shared)) {}

bool HttpDoor::accept_from(int listener) {
  constexpr int kAtOnce = 64;
  for (int i = 0; i < kAtOnce; ++i) {
    make_room();
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0) {  // out of descriptors or memory
      say_closed(std::strerror(errno));
      evict_longest_silent();
      return false;
    }
    const int yes = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    std::shared_ptr<HttpPeer> peer;
    try {
      peer = std::make_shared<HttpPeer>(shared_, fd);
    } catch (const std::exception&) {
      ::close(fd);
      return false;
    }
    enter(std::move(peer));
  }
  return true;
}

// One for each that comes in: those closed leave when this loop gets to them.
void HttpDoor::make_room() {
  const HttpConfig& config = shared_->config;
  if (shared_->open_connections < config.max_connections || standing_.size() <= config.reserved_connections) return;
  say_closed("the server has all the connections that it serves; the longest silent make room");
  evict_longest_silent();
}

void HttpDoor::evict_longest_silent() {
  if (standing_.empty() || !standing_.front()->is_open()) return;
  standing_.splice(standing_.end(), standing_, standing_.begin());
  standing_.back()->close();
}

void HttpDoor::say_closed(const std::string& why) {
  const auto now = std::chrono::steady_clock::now();
  if (now < quiet_until_) return;
  quiet_until_ = now + std::chrono::seconds(10);
  log_warning("connections are closed: ", why, " (said at most every 10 s)");
}

void HttpDoor::enter(std::shared_ptr<HttpPeer> peer) {
  try {
    spawn(stand(std::move(peer)));
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "no memory for a connection");
  }
}

Task<> HttpDoor::stand(std::shared_ptr<HttpPeer> peer) {
  const auto connection = std::make_shared<HttpConnection>(loop_, std::move(peer));
  const ClosedAtEnd closed(connection);
  bool failed = false;
  try {
    HttpHead head;
    const bool serve_it = co_await receive(connection, head);
    if (serve_it) hand_over(connection, std::move(head));
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "a connection ran out of memory");
    failed = true;
  }
  if (failed) co_await refuse_without_memory(connection);
}

// Answers what is answered here, until a request comes that is to be served: true. False: the connection ends.
Task<bool> HttpDoor::receive(ConnectionPtr connection, HttpHead& head) {
  const HttpConfig& config = shared_->config;
  Place place(standing_, connection.get());
  while (!loop_->closing) {
    head = HttpHead();
    const HeadFault fault = co_await read_head(connection, place, head);
    if (fault.status < 0) co_return false;
    connection->peer().asked = true;
    const bool head_only = head.request.method == "HEAD";
    if (fault.status != 0) {
      const std::string message = fault.status == 413 ? body_limit_text(config) : fault.message;
      HttpReply reply = shared_->callbacks.refusal(fault.status, message);
      co_await refuse(connection, std::move(reply), head_only);
      co_return false;
    }
    std::optional<HttpReply> reply;
    if (!head.has_body()) reply = shared_->callbacks.probe(head.request);
    if (!reply && shared_->in_service < config.max_connections) co_return true;
    if (!reply) {
      reply = shared_->callbacks.refusal(
          503, fmt::format("the server is at work on {} connections, the most that it serves; try again",
                           config.max_connections));
      co_await refuse(connection, std::move(*reply), head_only);
      co_return false;
    }
    const bool keep = co_await answer_probe(connection, head, std::move(*reply));
    if (!keep) co_return false;
  }
  co_return false;
}

// The status is negative when the client left or was too slow.
Task<HeadFault> HttpDoor::read_head(ConnectionPtr connection, Place& place, HttpHead& head) {
  const HttpConfig& config = connection->shared().config;
  const HeadLimits limits{config.max_head_bytes, config.max_line_bytes, config.max_headers, config.max_body_bytes};
  ByteQueue& received = connection->peer().received;
  bool idle = connection->peer().asked && received.empty();
  connection->expires_after(idle ? config.idle_timeout_s : config.head_timeout_s);
  for (HeadEnd end;;) {
    if (const size_t size = end.find(received.view()); size > 0) {
      const HeadFault fault = parse_head(received.view().substr(0, size), limits, head);
      received.consume(size);
      connection->expires_never();
      co_return fault;
    }
    if (received.view().size() > config.max_head_bytes) co_return HeadFault{431, "request head too large"};
    const size_t n = co_await connection->read_some();
    if (n == 0) co_return HeadFault{-1, ""};
    place.heard();
    if (std::exchange(idle, false)) connection->expires_after(config.head_timeout_s);
  }
}

Task<bool> HttpDoor::answer_probe(ConnectionPtr connection, const HttpHead& head, HttpReply reply) {
  const bool close = reply.close || !head.keep_alive || shared_->close_after_replies;
  const std::string bytes = reply_bytes(reply, head.request.method == "HEAD", close);
  const bool sent = co_await connection->write_all(bytes);
  if (sent && close) co_await connection->linger();
  co_return sent && !close;
}

void HttpDoor::hand_over(const ConnectionPtr& connection, HttpHead head) {
  struct Visit {
    std::shared_ptr<HttpPeer> peer;
    HttpHead head;
  };
  const auto visit = std::make_shared<Visit>();
  visit->head = std::move(head);
  visit->peer = connection->leave();
  if (!visit->peer) return;
  visit->peer->begin_service();
  const std::shared_ptr<HttpLoop>& loop = serving_[next_++ % serving_.size()];
  loop->post([this, loop, visit] { spawn(serve(loop, std::move(visit->peer), std::move(visit->head))); });
}

Task<> HttpDoor::serve(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer, HttpHead head) {
  std::shared_ptr<HttpPeer> back = co_await serve_request(std::move(loop), std::move(peer), std::move(head));
  if (!back) co_return;
  back->end_service();
  loop_->post([this, back] { enter(back); });
}

}  // namespace perigee

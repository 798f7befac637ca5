#include "server/http_exchange.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/log.h"

namespace perigee {

using boost::system::error_code;
using Steady = HttpConnection::Steady;

namespace {

constexpr std::string_view kComment = ": keep-alive\n\n";
constexpr std::string_view kEventEnd = "\n\n";

std::string head_bytes(int status, std::string_view content_type, const HttpHeaders& headers, bool close) {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\nServer: perigee\r\n", status, http_reason(status));
  if (!content_type.empty()) out += fmt::format("Content-Type: {}\r\n", content_type);
  for (const auto& [name, value] : headers) out += fmt::format("{}: {}\r\n", name, value);
  if (close) out += "Connection: close\r\n";
  return out;
}

std::string chunk_of(std::string_view data) {
  char size[24];
  std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  std::string out;
  out.reserve(data.size() + 16);
  out.append(size).append(data).append("\r\n");
  return out;
}

enum class PeerState { kThere, kSilent, kGone };  // kSilent: it has shut down its sending side, or left

PeerState peer_state(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) <= 0) return PeerState::kThere;
  if ((entry.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) return PeerState::kGone;
  return (entry.revents & POLLRDHUP) != 0 ? PeerState::kSilent : PeerState::kThere;
}

}  // namespace

std::string reply_bytes(const HttpReply& reply, bool head_only, bool close) {
  std::string out = head_bytes(reply.status, reply.content_type, reply.headers, close);
  out += fmt::format("Content-Length: {}\r\n\r\n", reply.body.size());
  if (!head_only) out += reply.body;
  return out;
}

void SocketExchange::respond(HttpReply reply) {
  if (ended || streaming) return;
  close = close || reply.close || shared_->close_after_replies;
  unsent += reply_bytes(reply, head_only, close);
  end();
}

void SocketExchange::begin_stream(HttpHeaders headers) {
  if (ended || streaming) return;
  streaming = true;
  close = close || !http11 || shared_->close_after_replies;
  headers.emplace_back("Cache-Control", "no-cache");
  headers.emplace_back("X-Accel-Buffering", "no");
  unsent += head_bytes(200, "text/event-stream; charset=utf-8", headers, close);
  unsent += http11 ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
  wake.cancel();
}

void SocketExchange::write(std::string data) {
  if (ended || !streaming || head_only || data.empty()) return;
  last_bytes_.append(data, data.size() - std::min(data.size(), kEventEnd.size()));
  last_bytes_.erase(0, last_bytes_.size() - std::min(last_bytes_.size(), kEventEnd.size()));
  unsent += http11 ? chunk_of(data) : data;
  if (unsent.size() > shared_->config.max_unsent_bytes) return lose();
  wake.cancel();
}

void SocketExchange::finish(bool close_in) {
  if (ended || !streaming) return;
  close = close || close_in || shared_->close_after_replies;
  if (http11 && !head_only) unsent += "0\r\n\r\n";
  end();
}

void SocketExchange::on_disconnect(std::function<void()> callback) {
  if (gone) return callback();
  callback_ = std::move(callback);
}

// Work that throws has run out of memory with the answer half made: it is given up like one whose client left.
void SocketExchange::post(std::function<void()> work) {
  loop_->post([self = shared_from_this(), work = std::move(work)] {
    try {
      work();
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "an answer ran out of memory and is given up");
      self->lose();
    }
  });
}

void SocketExchange::lose() {
  gone = true;
  const auto callback = std::exchange(callback_, nullptr);
  const bool untold = !std::exchange(ended, true);
  wake.cancel();
  poll.cancel();
  if (untold && callback) callback();
}

void SocketExchange::comment() {
  if (last_bytes_.empty() || last_bytes_ == kEventEnd) write(std::string(kComment));
}

void SocketExchange::ask_for_life() {
  if (ended || !unsent.empty()) return;
  if (streaming) return comment();
  if (!http11) return;
  unsent = "HTTP/1.1 100 Continue\r\n\r\n";
  wake.cancel();
}

void SocketExchange::end() {
  ended = true;
  callback_ = nullptr;
  wake.cancel();
}

// A readable socket is the end of what the client sends or a pipelined request; in the second case readability says
// nothing more, so the state is polled. An end may mean that the client has left, which only its answer to something
// sent can tell. A stream is asked at once; a whole reply a moment later, since many are there by then.
Task<> watch_client(ConnectionPtr connection, SocketExchangePtr exchange) {
  constexpr std::chrono::milliseconds kPeriod(50), kSilentPeriod(10), kMoment(40), kNextPause(1000);
  co_await until_readable(connection->socket());
  std::optional<Steady::time_point> ask_at;  // set once it is silent
  auto pause = kNextPause;
  while (!exchange->ended && connection->is_open()) {
    const PeerState state = peer_state(connection->socket().native_handle());
    if (state == PeerState::kGone) {
      connection->close();
      break;
    }
    if (state == PeerState::kSilent) {
      const auto now = Steady::now();
      if (!ask_at) ask_at = exchange->streaming ? now : now + kMoment;
      if (now >= *ask_at) {
        exchange->ask_for_life();
        ask_at = now + pause;
        pause *= 2;
      }
    }
    exchange->poll.expires_after(ask_at ? kSilentPeriod : kPeriod);
    co_await until_expired(exchange->poll);
  }
}

Task<bool> write_answer(ConnectionPtr connection, SocketExchangePtr exchange) {
  const auto period = std::chrono::duration_cast<Steady::duration>(
      std::chrono::duration<double>(connection->shared().config.sse_comment_s));
  while (!exchange->gone) {
    if (!exchange->unsent.empty()) {
      const std::string sending = std::exchange(exchange->unsent, {});
      const bool sent = co_await connection->write_all(sending);
      if (!sent) exchange->lose();
      continue;
    }
    if (exchange->ended) break;
    exchange->wake.expires_after(period);
    const error_code ec = co_await until_expired(exchange->wake);
    if (ec) continue;  // there is something to do
    if (exchange->abandoned)
      exchange->lose();
    else
      exchange->comment();  // in a whole reply it has no effect
  }
  co_return !exchange->gone;
}

Task<> refuse(ConnectionPtr connection, HttpReply reply, bool head_only) {
  log_info("a request refused with ", reply.status, " ", http_reason(reply.status));
  const std::string bytes = reply_bytes(reply, head_only, true);
  if (co_await connection->write_all(bytes)) co_await connection->linger();
  connection->close();
}

Task<> refuse_without_memory(ConnectionPtr connection) {
  static constexpr std::string_view kReply =
      "HTTP/1.1 503 Service Unavailable\r\nServer: perigee\r\nRetry-After: 1\r\nConnection: close\r\n"
      "Content-Type: application/json\r\nContent-Length: 125\r\n\r\n"
      R"({"error":{"message":"the server is out of memory for this request",)"
      R"("type":"ServiceUnavailableError","param":null,"code":503}})";
  if (!connection->is_open() || connection->has_sent()) co_return;
  (void)::send(connection->socket().native_handle(), kReply.data(), kReply.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  co_await connection->linger();
}

using boost::system::error_code;
using Steady = HttpConnection::Steady;

namespace {

Steady::duration seconds(double s) {
  return std::chrono::duration_cast<Steady::duration>(std::chrono::duration<double>(s));
}

// What stands against the request before its body is read.
std::optional<HttpReply> check(HttpConnection& connection, const HttpRequest& request) {
  HttpShared& shared = connection.shared();
  if (std::optional<HttpReply> refusal = shared.callbacks.check(request)) return refusal;
  const size_t limit = shared.config.max_connections_per_key;
  const std::string* credentials = request.header("Authorization");
  if (limit == 0 || credentials == nullptr || connection.peer().count_for(*credentials)) return std::nullopt;
  return shared.callbacks.refusal(429, fmt::format("this key has {} connections already", limit));
}

// Why a body was not read to its end. What was read of it is given back before the client is told.
struct BodyFault {
  int status = 0;  // 0: it was; -1: the client left
  std::string message;
};

BodyFault fault_of(BodyReader::Status status, const HttpShared& shared) {
  switch (status) {
    case BodyReader::Status::kMalformed: return {400, "malformed chunked body"};
    case BodyReader::Status::kTooLarge: return {413, body_limit_text(shared.config)};
    case BodyReader::Status::kOverBudget:
      return {503, fmt::format(
                       "the bodies of all requests under way take {} bytes, the most that this server holds; try again",
                       shared.bodies->limit())};
    default: return {};
  }
}

// The deadline moves with the bytes, so a trickle does not hold memory; and what came fast earns no long silence.
Task<BodyFault> read_body(ConnectionPtr connection, HttpHead& head) {
  const HttpConfig& config = connection->shared().config;
  ByteQueue& received = connection->peer().received;
  const auto length = head.chunked ? std::nullopt : std::optional<size_t>(head.content_length);
  BodyReader reader(connection->shared().bodies, length, config.max_body_bytes);
  auto deadline = Steady::now() + seconds(config.body_timeout_s);
  for (;;) {
    std::string_view bytes = received.view();
    const size_t waiting = bytes.size(), known = reader.size();
    const BodyReader::Status status = reader.read(bytes);
    received.consume(waiting - bytes.size());
    if (status == BodyReader::Status::kDone) {
      head.request.body = reader.take_body();
      head.request.body_share = reader.take_share();
    }
    if (status != BodyReader::Status::kMore) co_return fault_of(status, connection->shared());
    const double earned_s = config.body_s_per_mb * static_cast<double>(reader.size() - known) / (1 << 20);
    deadline = std::min(deadline + seconds(earned_s), Steady::now() + seconds(config.body_timeout_s));
    connection->expires_at(deadline);
    const size_t n = co_await connection->read_some();
    if (n == 0 && connection->was_late())
      co_return BodyFault{408, fmt::format("the request body came too slowly: after {:g} s each MB may take {:g} s",
                                           config.body_timeout_s, config.body_s_per_mb)};
    if (n == 0) co_return BodyFault{-1, ""};
  }
}

// The handler itself throws nothing; what it asks for may not be there.
void call_handler(HttpShared& shared, const SocketExchangePtr& exchange, HttpRequest request) {
  try {
    shared.callbacks.handler(exchange, std::move(request));
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "a request handler ran out of memory");
    exchange->respond(shared.callbacks.refusal(503, "the server is out of memory for this request"));
  }
}

// Carries the handler's answer. False: the connection ends here.
Task<bool> answer(ConnectionPtr connection, const HttpHead& head, HttpRequest request) {
  const auto exchange = std::make_shared<SocketExchange>(connection->loop_ptr(), connection->peer().shared);
  HttpShared& shared = connection->shared();
  exchange->http11 = head.http11;
  exchange->head_only = request.method == "HEAD";
  exchange->close = !head.keep_alive;
  connection->lose_exchange = [exchange] { exchange->lose(); };
  spawn(watch_client(connection, exchange));
  connection->expires_never();
  call_handler(shared, exchange, std::move(request));
  const bool sent = co_await write_answer(connection, exchange);
  connection->lose_exchange = nullptr;
  exchange->poll.cancel();
  error_code ignored;
  if (connection->is_open()) connection->socket().cancel(ignored);
  if (sent && exchange->close) co_await connection->linger();
  co_return sent && !exchange->close && connection->is_open();
}

// False: the connection ends here.
Task<bool> read_and_answer(ConnectionPtr connection, HttpHead& head) {
  constexpr std::string_view kGoOn = "HTTP/1.1 100 Continue\r\n\r\n";
  HttpShared& shared = connection->shared();
  const bool head_only = head.request.method == "HEAD";
  if (std::optional<HttpReply> refusal = check(*connection, head.request)) {
    co_await refuse(connection, std::move(*refusal), head_only);
    co_return false;
  }
  if (head.has_body()) {
    if (head.expects_continue) co_await connection->write_all(kGoOn);
    const BodyFault fault = co_await read_body(connection, head);
    if (fault.status < 0) co_return false;
    if (fault.status > 0) {
      HttpReply reply = shared.callbacks.refusal(fault.status, fault.message);
      co_await refuse(connection, std::move(reply), head_only);
      co_return false;
    }
  }
  const Counted open_answer(shared.open_answers);
  const bool keep = co_await answer(connection, head, std::move(head.request));
  co_return keep;
}

}  // namespace

Task<std::shared_ptr<HttpPeer>> serve_request(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer,
                                              HttpHead head) {
  const auto connection = std::make_shared<HttpConnection>(std::move(loop), std::move(peer));
  const ClosedAtEnd closed(connection);
  bool failed = false;
  try {
    const bool keep = co_await read_and_answer(connection, head);
    if (keep) co_return connection->leave();
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "a request ran out of memory and is given up");
    failed = true;
  }
  if (failed && !connection->lose_exchange) co_await refuse_without_memory(connection);
  co_return nullptr;
}

}  // namespace perigee

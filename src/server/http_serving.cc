#include "server/http_serving.h"

#include <algorithm>

#include "base/log.h"
#include "server/http_exchange.h"

namespace perigee {

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
  return shared.callbacks.refusal(429, str_cat("this key has ", limit, " connections already"));
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
      return {503, str_cat("the bodies of all requests under way take ", shared.bodies->limit(),
                           " bytes, the most that this server holds; try again")};
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
      co_return BodyFault{408, str_cat("the request body came too slowly: after ", config.body_timeout_s,
                                       " s each MB may take ", config.body_s_per_mb, " s")};
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

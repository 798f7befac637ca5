#include "server/http_connection.h"

#include <poll.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <string_view>

#include "base/log.h"
#include "server/api_error.h"
#include "server/http_head.h"

namespace perigee {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using Steady = std::chrono::steady_clock;
using asio::redirect_error;
using asio::use_awaitable;

namespace {

Steady::duration seconds(double s) {
  return std::chrono::duration_cast<Steady::duration>(std::chrono::duration<double>(s));
}

std::string chunk_of(std::string_view data) {
  char size[24];
  std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  std::string out;
  out.reserve(data.size() + 16);
  out.append(size).append(data).append("\r\n");
  return out;
}

bool peer_has_closed(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// A reply that neither the check nor the handler gave: counted here.
HttpReply plain_error(const HttpShared& shared, int status, std::string_view message) {
  shared.count_refusal(status);
  HttpReply reply = error_reply(status, std::string(message));
  reply.close = true;
  return reply;
}

}  // namespace

class HttpConnection {
 public:
  HttpConnection(std::shared_ptr<HttpLoop> loop_in, std::shared_ptr<HttpShared> shared_in, asio::ip::tcp::socket socket)
      : loop(std::move(loop_in)),
        shared(std::move(shared_in)),
        stream(std::move(socket)),
        buffer(shared->config.max_head_bytes + (128u << 10)) {
    loop->connections.insert(this);
  }
  ~HttpConnection() {
    loop->connections.erase(this);
    if (key) shared->leave_key(*key);
    --shared->open_connections;
  }
  // From here on it counts among the connections of that key; false: they are too many, and it counts nowhere.
  bool count_for(std::string_view credentials) {
    const size_t hash = std::hash<std::string_view>()(credentials);
    if (key == hash) return true;
    if (key) shared->leave_key(*std::exchange(key, std::nullopt));
    if (!shared->join_key(hash)) return false;
    key = hash;
    return true;
  }
  void close() {
    error_code ignored;
    stream.socket().close(ignored);
    if (lose_exchange) std::exchange(lose_exchange, nullptr)();
  }

  std::shared_ptr<HttpLoop> loop;
  std::shared_ptr<HttpShared> shared;
  beast::tcp_stream stream;
  beast::flat_buffer buffer;
  std::function<void()> lose_exchange;  // set while an answer is under way
  std::optional<size_t> key;            // whose connection it is, by hash
};

bool HttpShared::join_key(size_t key) {
  const std::lock_guard lock(keys_mutex_);
  size_t& count = connections_of_key_[key];
  if (count < config.max_connections_per_key) return ++count > 0;
  if (count == 0) connections_of_key_.erase(key);
  return false;
}

void HttpShared::leave_key(size_t key) {
  const std::lock_guard lock(keys_mutex_);
  const auto found = connections_of_key_.find(key);
  if (--found->second == 0) connections_of_key_.erase(found);
}

void close_connection(HttpConnection& connection) {
  connection.close();
}

namespace {

using ConnectionPtr = std::shared_ptr<HttpConnection>;

// The answer to one request: bytes queued by the handler, taken by the connection's coroutine.
class SocketExchange : public Exchange {
 public:
  SocketExchange(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpShared> shared)
      : loop_(std::move(loop)), shared_(std::move(shared)), wake(loop_->context()), poll(loop_->context()) {}

  void respond(HttpReply reply) override {
    if (ended || streaming) return;
    close = close || reply.close || shared_->close_after_replies;
    unsent = head(reply.status, reply.content_type, reply.headers);
    unsent += str_cat("Content-Length: ", reply.body.size(), "\r\n\r\n");
    if (!head_only) unsent += reply.body;
    end();
  }

  void begin_stream(HttpHeaders headers) override {
    if (ended || streaming) return;
    streaming = true;
    close = close || !chunked || shared_->close_after_replies;
    headers.emplace_back("Cache-Control", "no-cache");
    headers.emplace_back("X-Accel-Buffering", "no");
    unsent = head(200, "text/event-stream; charset=utf-8", headers);
    unsent += chunked ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
    wake.cancel();
  }

  void write(std::string data) override {
    if (ended || !streaming || data.empty()) return;
    unsent += chunked ? chunk_of(data) : data;
    if (unsent.size() > shared_->config.max_unsent_bytes) return lose();
    wake.cancel();
  }

  void finish(bool close_in) override {
    if (ended || !streaming) return;
    close = close || close_in || shared_->close_after_replies;
    if (chunked) unsent += "0\r\n\r\n";
    end();
  }

  void on_disconnect(std::function<void()> callback) override {
    if (gone) return callback();
    callback_ = std::move(callback);
  }

  void post(std::function<void()> work) override { loop_->post(std::move(work)); }

  // The client is gone: tell the handler, unless the answer was complete.
  void lose() {
    gone = true;
    const auto callback = std::exchange(callback_, nullptr);
    if (!ended && callback) callback();
    ended = true;
    wake.cancel();
    poll.cancel();
  }

  bool ended = false;      // the handler has said everything
  bool gone = false;       // the client has left
  bool streaming = false;  // begin_stream() was called
  bool close = false;      // the connection ends with this answer
  bool chunked = true;     // HTTP/1.1
  bool head_only = false;  // the request was HEAD
  std::string unsent;

 private:
  std::string head(int status, std::string_view content_type, const HttpHeaders& headers) const {
    std::string out = str_cat("HTTP/1.1 ", status, " ", http_reason(status), "\r\nServer: perigee\r\n");
    if (!content_type.empty()) out += str_cat("Content-Type: ", content_type, "\r\n");
    for (const auto& [name, value] : headers) out += str_cat(name, ": ", value, "\r\n");
    if (close) out += "Connection: close\r\n";
    return out;
  }
  void end() {
    ended = true;
    callback_ = nullptr;
    wake.cancel();
  }

  std::shared_ptr<HttpLoop> loop_;
  std::shared_ptr<HttpShared> shared_;
  std::function<void()> callback_;

 public:
  asio::steady_timer wake;  // waited on by the writer; cancelled when there is something to do
  asio::steady_timer poll;  // waited on by the watcher
};

// Notices a client that leaves while its answer is under way. A readable socket is either the end of the stream or a
// pipelined request; in the second case readability says nothing more, so the hang-up flag is polled.
asio::awaitable<void> watch(ConnectionPtr connection, std::shared_ptr<SocketExchange> exchange) {
  error_code ec;
  auto& socket = connection->stream.socket();
  co_await socket.async_wait(asio::ip::tcp::socket::wait_read, redirect_error(use_awaitable, ec));
  while (!exchange->ended && socket.is_open()) {
    if (peer_has_closed(socket.native_handle())) {
      connection->close();
      break;
    }
    exchange->poll.expires_after(std::chrono::milliseconds(50));
    co_await exchange->poll.async_wait(redirect_error(use_awaitable, ec));
  }
}

// Writes what the exchange queues until it is complete. False: the client is gone.
asio::awaitable<bool> write_answer(ConnectionPtr connection, std::shared_ptr<SocketExchange> exchange) {
  const HttpConfig& config = connection->shared->config;
  error_code ec;
  while (!exchange->gone) {
    if (!exchange->unsent.empty()) {
      const std::string sending = std::exchange(exchange->unsent, {});
      connection->stream.expires_after(seconds(config.write_timeout_s));
      co_await asio::async_write(connection->stream, asio::buffer(sending), redirect_error(use_awaitable, ec));
      if (ec) exchange->lose();
      continue;
    }
    if (exchange->ended) break;
    exchange->wake.expires_after(seconds(exchange->streaming ? config.sse_comment_s : 3600));
    co_await exchange->wake.async_wait(redirect_error(use_awaitable, ec));
    if (!ec) exchange->write(": keep-alive\n\n");
  }
  co_return !exchange->gone;
}

// Says goodbye in a way that lets the client read the answer: a close with unread bytes would reset the connection.
asio::awaitable<void> linger(ConnectionPtr connection) {
  error_code ec;
  connection->stream.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ec);
  connection->stream.expires_after(std::chrono::seconds(2));
  std::vector<char> waste(64u << 10);
  while (!ec) co_await connection->stream.async_read_some(asio::buffer(waste), redirect_error(use_awaitable, ec));
  connection->close();
}

// Reads until the buffer holds a whole head. 0: the client left or was too slow, > 0: bytes of the head, -1: too large.
asio::awaitable<ptrdiff_t> read_head(ConnectionPtr connection) {
  const HttpConfig& config = connection->shared->config;
  beast::flat_buffer& buffer = connection->buffer;
  bool started = buffer.size() > 0;
  connection->stream.expires_after(seconds(started ? config.head_timeout_s : config.idle_timeout_s));
  for (;;) {
    const std::string_view text(static_cast<const char*>(buffer.data().data()), buffer.size());
    if (const size_t end = text.find("\r\n\r\n"); end != std::string_view::npos) co_return end + 4;
    if (text.size() > config.max_head_bytes) co_return -1;
    error_code ec;
    const size_t n =
        co_await connection->stream.async_read_some(buffer.prepare(4096), redirect_error(use_awaitable, ec));
    buffer.commit(n);
    if (ec || n == 0) co_return 0;
    if (!started) connection->stream.expires_after(seconds(config.head_timeout_s));
    started = true;
  }
}

using Parser = http::request_parser<http::string_body>;

// Reads the body of a parsed head. The deadline moves with the bytes that arrived, not with each of them, so a trickle
// does not hold the connection. 0: done; otherwise the status to refuse with, -1: the client left or was too slow.
asio::awaitable<int> read_body(ConnectionPtr connection, Parser& parser) {
  constexpr double kSlowestBytesPerSecond = 16384;
  const double timeout_s = connection->shared->config.body_timeout_s;
  const auto start = Steady::now();
  error_code ec;
  parser.eager(true);
  while (!parser.is_done()) {
    const auto received = static_cast<double>(parser.get().body().size());
    connection->stream.expires_at(start + seconds(timeout_s + received / kSlowestBytesPerSecond));
    co_await http::async_read_some(connection->stream, connection->buffer, parser, redirect_error(use_awaitable, ec));
    if (ec == http::error::body_limit) co_return 413;
    if (ec == beast::error::timeout) co_return 408;
    if (ec && ec.category() == http::make_error_code(http::error::bad_chunk).category() &&
        ec != http::error::end_of_stream && ec != http::error::partial_message)
      co_return 400;
    if (ec) co_return -1;
  }
  co_return 0;
}

HttpRequest take_request(const Parser& parser) {
  const auto& message = parser.get();
  HttpRequest request;
  request.method = std::string(message.method_string());
  std::string_view target(message.target().data(), message.target().size());
  if (target.starts_with('/')) {
    const size_t mark = target.find('?');
    request.path = std::string(target.substr(0, mark));
    if (mark != std::string_view::npos) request.query = std::string(target.substr(mark + 1));
  }
  for (const auto& field : message) request.headers.emplace_back(field.name_string(), field.value());
  return request;
}

// Parses the head that lies in the buffer. An error status, or 0.
int parse_head(HttpConnection& connection, size_t head_bytes, Parser& parser) {
  error_code ec;
  parser.header_limit(static_cast<uint32_t>(connection.shared->config.max_head_bytes + 1024));
  parser.body_limit(connection.shared->config.max_body_bytes);
  const size_t used = parser.put(asio::buffer(connection.buffer.data().data(), head_bytes), ec);
  if (ec == http::error::body_limit) return 413;
  if (ec == http::error::header_limit) return 431;
  if (ec || !parser.is_header_done()) return 400;
  connection.buffer.consume(used);
  if (parser.content_length() && *parser.content_length() > connection.shared->config.max_body_bytes) return 413;
  const auto encoding = parser.get()[http::field::content_encoding];
  if (!encoding.empty() && encoding != "identity") return 415;
  return 0;
}

std::string refusal_text(int status, const HttpConfig& config) {
  switch (status) {
    case 413: return str_cat("the request body is over the server's limit of ", config.max_body_bytes, " bytes");
    case 431: return "request head larger than the server's limit";
    case 408: return "request body arrived too slowly";
    case 415: return "compressed request bodies are not accepted; send them as they are";
    default: return "malformed HTTP request";
  }
}

// Sends `reply` outside any exchange and ends the connection.
asio::awaitable<void> refuse(ConnectionPtr connection, HttpReply reply) {
  const auto exchange = std::make_shared<SocketExchange>(connection->loop, connection->shared);
  reply.close = true;
  log_info("a request refused with ", reply.status, " ", http_reason(reply.status));
  exchange->respond(std::move(reply));
  if (co_await write_answer(connection, exchange)) co_await linger(connection);
}

// Calls the handler and carries its answer. False: the connection ends here.
asio::awaitable<bool> answer(ConnectionPtr connection, const Parser& parser, HttpRequest request) {
  const auto exchange = std::make_shared<SocketExchange>(connection->loop, connection->shared);
  exchange->chunked = parser.get().version() >= 11;
  exchange->head_only = request.method == "HEAD";
  exchange->close = !parser.keep_alive();
  connection->lose_exchange = [exchange] { exchange->lose(); };
  asio::co_spawn(connection->loop->context(), watch(connection, exchange), asio::detached);
  ++connection->shared->open_answers;
  connection->stream.expires_never();
  try {
    connection->shared->handler(exchange, std::move(request));
  } catch (const std::exception& e) {  // out of memory at most: the handler itself throws nothing
    log_error("request handler failed: ", e.what());
    HttpReply reply = plain_error(*connection->shared, 503, "the server is out of memory for this request");
    exchange->respond(std::move(reply));
  }
  const bool sent = co_await write_answer(connection, exchange);
  --connection->shared->open_answers;
  connection->lose_exchange = nullptr;
  exchange->poll.cancel();
  error_code ignored;
  if (connection->stream.socket().is_open()) connection->stream.socket().cancel(ignored);
  if (sent && exchange->close) co_await linger(connection);
  co_return sent && !exchange->close && connection->stream.socket().is_open();
}

// One request. False: the connection ends here.
asio::awaitable<bool> serve_request(ConnectionPtr connection) {
  const HttpConfig& config = connection->shared->config;
  const ptrdiff_t head_bytes = co_await read_head(connection);
  if (head_bytes == 0) co_return false;
  HeadFault fault{431, "request head too large"};
  if (head_bytes > 0) {
    const std::string_view head(static_cast<const char*>(connection->buffer.data().data()),
                                static_cast<size_t>(head_bytes));
    const HeadLimits limits{config.max_head_bytes, config.max_line_bytes, config.max_headers};
    fault = check_head(head, limits);
  }
  const auto parser = std::make_unique<Parser>();
  std::string message = fault.message;
  if (fault.status == 0) {
    fault.status = parse_head(*connection, static_cast<size_t>(head_bytes), *parser);
    message = refusal_text(fault.status, config);
  }
  if (fault.status != 0) {
    HttpReply reply = plain_error(*connection->shared, fault.status, message);
    co_await refuse(connection, std::move(reply));
    co_return false;
  }
  HttpRequest request = take_request(*parser);
  std::optional<HttpReply> refusal = connection->shared->check(request);
  const std::string* credentials = request.header("Authorization");
  if (!refusal && credentials != nullptr && !connection->count_for(*credentials)) {
    refusal = plain_error(*connection->shared, 429,
                          str_cat("this key has ", config.max_connections_per_key, " connections already"));
  }
  if (refusal && parser->is_done()) parser->get().body().clear();
  if (refusal) {
    co_await refuse(connection, std::move(*refusal));
    co_return false;
  }
  if (!parser->is_done() && parser->get()[http::field::expect] == "100-continue") {
    const std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    error_code ec;
    co_await asio::async_write(connection->stream, asio::buffer(go_on), redirect_error(use_awaitable, ec));
  }
  const int status = co_await read_body(connection, *parser);
  if (status < 0) co_return false;
  if (status > 0) {
    HttpReply reply = plain_error(*connection->shared, status, refusal_text(status, config));
    co_await refuse(connection, std::move(reply));
    co_return false;
  }
  request.body = std::move(parser->get().body());
  const bool keep = co_await answer(connection, *parser, std::move(request));
  co_return keep;
}

}  // namespace

asio::awaitable<void> serve_connection(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpShared> shared,
                                       asio::ip::tcp::socket socket) {
  const auto connection = std::make_shared<HttpConnection>(std::move(loop), std::move(shared), std::move(socket));
  while (!connection->loop->closing) {
    const bool keep = co_await serve_request(connection);
    if (!keep) break;
  }
  connection->close();
}

void HttpLoop::post(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    posted_.push_back(std::move(work));
    if (posted_.size() > 1) return;  // a run_posted() is on its way
    asio::post(context_, [this] { run_posted(); });
  }
}

void HttpLoop::run_posted() {
  std::vector<std::function<void()>> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (auto& item : work) item();
}

void HttpLoop::close() {
  closing = true;
  const std::set<HttpConnection*> open = connections;  // closing never destroys one: its coroutine does
  for (HttpConnection* connection : open) connection->close();
  for (asio::steady_timer* timer : periodic) timer->cancel();
  std::vector<std::function<void()>> dropped;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    dropped.swap(posted_);
  }
  work_.reset();
}

}  // namespace perigee

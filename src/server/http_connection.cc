#include "server/http_connection.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"

namespace perigee {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

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

std::string body_limit_text(const HttpConfig& config) {
  return fmt::format("the request body is over the server's limit of {} bytes", config.max_body_bytes);
}

void ByteQueue::append(std::string_view more) {
  if (begin_ > bytes_.size() / 2) bytes_.erase(0, std::exchange(begin_, 0));
  bytes_.append(more);
}

// Silent connections are many: an empty queue holds no memory.
void ByteQueue::consume(size_t n) {
  begin_ += n;
  if (!empty()) return;
  std::string().swap(bytes_);
  begin_ = 0;
}

HttpPeer::~HttpPeer() {
  if (fd >= 0) ::close(fd);
  if (key) shared->leave_key(*key);
  end_service();
  --shared->open_connections;
}

void HttpPeer::begin_service() {
  if (!std::exchange(serving, true)) ++shared->in_service;
}

void HttpPeer::end_service() {
  if (std::exchange(serving, false)) --shared->in_service;
}

bool HttpPeer::count_for(std::string_view credentials) {
  const size_t hash = std::hash<std::string_view>()(credentials);
  if (key == hash) return true;
  if (key) shared->leave_key(*std::exchange(key, std::nullopt));
  if (!shared->join_key(hash)) return false;
  key = hash;
  return true;
}

HttpConnection::HttpConnection(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer)
    : loop_(std::move(loop)), peer_(std::move(peer)), socket_(loop_->context()), timer_(loop_->context()) {
  socket_.assign(tcp::v4(), peer_->fd);  // no call here depends on the family
  peer_->fd = -1;
  loop_->connections.insert(this);
}

HttpConnection::~HttpConnection() {
  loop_->connections.erase(this);
}

void HttpConnection::close() {
  error_code ignored;
  socket_.close(ignored);
  timer_.cancel(ignored);
  try {
    if (lose_exchange) std::exchange(lose_exchange, nullptr)();
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "no memory to tell that a client has left");
  }
}

std::shared_ptr<HttpPeer> HttpConnection::leave() {
  if (!is_open()) return nullptr;
  error_code ec;
  expires_never();
  timer_.cancel(ec);
  peer_->fd = socket_.release(ec);
  return ec ? nullptr : peer_;
}

void HttpConnection::expires_at(Steady::time_point when) {
  late_ = false;
  deadline_ = when;
  if (deadline_ < armed_for_) arm();
}

void HttpConnection::expires_after(double s) {
  expires_at(Steady::now() + std::chrono::duration_cast<Steady::duration>(std::chrono::duration<double>(s)));
}

// The timer is set again only for an earlier deadline; for a later one it finds out when it fires.
void HttpConnection::arm() {
  armed_for_ = Steady::time_point::max();
  timer_.expires_at(deadline_);
  timer_.async_wait([weak = weak_from_this()](error_code ec) {
    if (ec) return;
    if (const auto self = weak.lock()) self->on_timer();
  });
  armed_for_ = deadline_;
}

void HttpConnection::on_timer() {
  armed_for_ = Steady::time_point::max();
  if (!is_open() || deadline_ == Steady::time_point::max()) return;
  error_code ignored;
  if (Steady::now() >= deadline_) {
    late_ = true;
    socket_.cancel(ignored);
    return;
  }
  try {
    arm();
  } catch (const std::exception&) {  // without memory for a timer it would never end
    close();
  }
}

// Waits without holding memory: the bytes go to the loop's scratch, which is free again when this loop does other work.
Task<size_t> HttpConnection::read_scratch() {
  for (;;) {
    const error_code ec = co_await until_readable(socket_);
    if (ec || !is_open() || late_) co_return 0;
    const ssize_t n = ::recv(socket_.native_handle(), loop_->scratch.data(), loop_->scratch.size(), MSG_DONTWAIT);
    if (n >= 0) co_return static_cast<size_t>(n);
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) co_return 0;
  }
}

Task<size_t> HttpConnection::read_some() {
  const size_t n = co_await read_scratch();
  peer_->received.append(std::string_view(loop_->scratch.data(), n));
  co_return n;
}

Task<bool> HttpConnection::write_all(std::string_view data) {
  while (!data.empty() && is_open()) {
    const ssize_t n = ::send(socket_.native_handle(), data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) co_return false;
    has_sent_ = has_sent_ || n > 0;
    if (n > 0) data.remove_prefix(static_cast<size_t>(n));
    if (data.empty()) break;
    expires_after(shared().config.write_timeout_s);
    const error_code ec = co_await until_writable(socket_);
    if (ec || late_) co_return false;
  }
  expires_never();
  co_return data.empty();
}

Task<> HttpConnection::linger() {
  constexpr double kLingerSeconds = 2;
  error_code ec;
  if (is_open()) socket_.shutdown(tcp::socket::shutdown_send, ec);
  expires_after(kLingerSeconds);
  while (is_open() && !ec) {
    const size_t n = co_await read_scratch();
    if (n == 0 || Steady::now() >= deadline_) break;
  }
  close();
}

}  // namespace perigee

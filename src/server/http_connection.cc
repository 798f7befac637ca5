#include "server/http_connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace perigee {

namespace asio = boost::asio;
using asio::redirect_error;
using asio::use_awaitable;
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
  return str_cat("the request body is over the server's limit of ", config.max_body_bytes, " bytes");
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
  if (lose_exchange) std::exchange(lose_exchange, nullptr)();
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
  armed_for_ = deadline_;
  timer_.expires_at(deadline_);
  timer_.async_wait([weak = weak_from_this()](error_code ec) {
    if (ec) return;
    if (const auto self = weak.lock()) self->on_timer();
  });
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
asio::awaitable<size_t> HttpConnection::read_scratch() {
  error_code ec;
  for (;;) {
    co_await socket_.async_wait(tcp::socket::wait_read, redirect_error(use_awaitable, ec));
    if (ec || !is_open() || late_) co_return 0;
    const ssize_t n = ::recv(socket_.native_handle(), loop_->scratch.data(), loop_->scratch.size(), MSG_DONTWAIT);
    if (n >= 0) co_return static_cast<size_t>(n);
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) co_return 0;
  }
}

asio::awaitable<size_t> HttpConnection::read_some() {
  const size_t n = co_await read_scratch();
  peer_->received.append(std::string_view(loop_->scratch.data(), n));
  co_return n;
}

asio::awaitable<bool> HttpConnection::write_all(std::string_view data) {
  error_code ec;
  while (!data.empty() && is_open()) {
    expires_after(shared().config.write_timeout_s);
    const size_t n = co_await socket_.async_write_some(asio::buffer(data), redirect_error(use_awaitable, ec));
    if (ec || late_) co_return false;
    data.remove_prefix(n);
  }
  expires_never();
  co_return data.empty();
}

asio::awaitable<void> HttpConnection::linger() {
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

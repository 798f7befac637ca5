#include "server/http_connection.h"

#include <fmt/core.h>
#include <unistd.h>

#include "base/log.h"

namespace perigee {

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
    : HttpSocket(std::move(loop), peer->fd), peer_(std::move(peer)) {}

void HttpConnection::close() {
  HttpSocket::close();
  try {
    if (lose_exchange) std::exchange(lose_exchange, nullptr)();
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "no memory to tell that a client has left");
  }
}

std::shared_ptr<HttpPeer> HttpConnection::leave() {
  const int fd = release();
  if (fd < 0) return nullptr;
  peer_->fd = fd;
  return peer_;
}

Task<size_t> HttpConnection::read_some() {
  const std::string_view bytes = co_await read_scratch();
  peer_->received.append(bytes);
  co_return bytes.size();
}

}  // namespace perigee

#include "server/http_loop.h"

#include <sys/socket.h>

#include <boost/asio/post.hpp>

#include "base/log.h"

namespace perigee {

using boost::asio::ip::tcp;
using boost::system::error_code;

void HttpLoop::start() {
  thread_ = std::thread([this] { run(); });
}

// What throws is a callback that ran out of memory; the callbacks after it have done nothing wrong.
void HttpLoop::run() {
  for (;;) {
    try {
      context_.run();
      return;
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "an event loop ran out of memory and goes on");
    }
  }
}

void HttpLoop::post(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  posted_.push_back(std::move(work));
  if (scheduled_) return;
  try {
    boost::asio::post(context_, [this] { run_posted(); });
  } catch (const std::exception&) {
    posted_.pop_back();
    throw;
  }
  scheduled_ = true;
}

void HttpLoop::run_posted() {
  std::vector<std::function<void()>> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
    scheduled_ = false;
  }
  for (auto& item : work) {
    try {
      item();
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "posted work ran out of memory");
    }
  }
}

void HttpLoop::close() {
  closing = true;
  for (HttpSocket* socket : sockets) socket->close();  // destroys none: its coroutine does
  for (boost::asio::steady_timer* timer : periodic) timer->cancel();
  std::vector<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    dropped.swap(posted_);
  }
  work_.reset();
}

HttpSocket::HttpSocket(std::shared_ptr<HttpLoop> loop, int& fd)
    : loop_(std::move(loop)), socket_(loop_->context()), timer_(loop_->context()) {
  socket_.assign(tcp::v4(), fd);  // no call here depends on the family
  fd = -1;
  loop_->sockets.insert(this);
}

HttpSocket::~HttpSocket() {
  loop_->sockets.erase(this);
}

void HttpSocket::close() {
  error_code ignored;
  socket_.close(ignored);
  timer_.cancel(ignored);
}

int HttpSocket::release() {
  if (!is_open()) return -1;
  error_code ec;
  expires_never();
  timer_.cancel(ec);
  const int fd = socket_.release(ec);
  return ec ? -1 : fd;
}

void HttpSocket::expires_at(Steady::time_point when) {
  late_ = false;
  deadline_ = when;
  if (deadline_ < armed_for_) arm();
}

void HttpSocket::expires_after(double s) {
  expires_at(Steady::now() + std::chrono::duration_cast<Steady::duration>(std::chrono::duration<double>(s)));
}

// The timer is set again only for an earlier deadline; for a later one it finds out when it fires.
void HttpSocket::arm() {
  armed_for_ = Steady::time_point::max();
  timer_.expires_at(deadline_);
  timer_.async_wait([weak = weak_from_this()](error_code ec) {
    if (ec) return;
    if (const auto self = weak.lock()) self->on_timer();
  });
  armed_for_ = deadline_;
}

void HttpSocket::on_timer() {
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
Task<std::string_view> HttpSocket::read_scratch() {
  for (;;) {
    const error_code ec = co_await until_readable(socket_);
    if (ec || !is_open() || late_) co_return std::string_view();
    const ssize_t n = ::recv(socket_.native_handle(), loop_->scratch.data(), loop_->scratch.size(), MSG_DONTWAIT);
    if (n >= 0) co_return std::string_view(loop_->scratch.data(), static_cast<size_t>(n));
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) co_return std::string_view();
  }
}

Task<bool> HttpSocket::write_all(std::string_view data, double timeout_s) {
  while (!data.empty() && is_open()) {
    const ssize_t n = ::send(socket_.native_handle(), data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) co_return false;
    has_sent_ = has_sent_ || n > 0;
    if (n > 0) data.remove_prefix(static_cast<size_t>(n));
    if (data.empty()) break;
    expires_after(timeout_s);
    const error_code ec = co_await until_writable(socket_);
    if (ec || late_) co_return false;
  }
  expires_never();
  co_return data.empty();
}

Task<> HttpSocket::linger() {
  constexpr double kLingerSeconds = 2;
  error_code ec;
  if (is_open()) socket_.shutdown(tcp::socket::shutdown_send, ec);
  expires_after(kLingerSeconds);
  while (is_open() && !ec) {
    const std::string_view bytes = co_await read_scratch();
    if (bytes.empty() || Steady::now() >= deadline_) break;
  }
  close();
}

}  // namespace perigee

#include "router/upstream.h"

#include <fmt/core.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "base/clock.h"

namespace perigee {

namespace {

constexpr size_t kMaxIdle = 512;  // of one worker
constexpr size_t kSmallBody = 32u << 10;

// Neither closed by the worker nor with bytes that nobody asked for.
bool is_quiet(HttpSocket& socket) {
  char byte = 0;
  if (!socket.is_open()) return false;
  const ssize_t n = ::recv(socket.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

// So that a worker's machine that is gone is noticed within half a minute, even where nothing is sent.
void watch_peer(int fd) {
  const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
}

}  // namespace

std::shared_ptr<HttpSocket> IdleSockets::take(uint64_t worker) {
  auto& sockets = sockets_[worker];
  while (!sockets.empty()) {
    std::shared_ptr<HttpSocket> socket = std::move(sockets.back());
    sockets.pop_back();
    if (is_quiet(*socket)) return socket;
  }
  return nullptr;
}

// Nobody asks for the connections of a worker that was removed: all are looked at, but seldom.
void IdleSockets::sweep() {
  constexpr double kPeriodSeconds = 10;
  const double now_s = system_clock().now_s();
  if (now_s < next_sweep_s_) return;
  next_sweep_s_ = now_s + kPeriodSeconds;
  for (auto& [worker, sockets] : sockets_)
    std::erase_if(sockets, [](const std::shared_ptr<HttpSocket>& socket) { return !is_quiet(*socket); });
  std::erase_if(sockets_, [](const auto& entry) { return entry.second.empty(); });
}

// The longest idle are the first that a worker closes: each that is kept clears away one of them.
void IdleSockets::keep(uint64_t worker, std::shared_ptr<HttpSocket> socket) {
  sweep();
  auto& sockets = sockets_[worker];
  if (!sockets.empty() && (sockets.size() >= kMaxIdle || !is_quiet(*sockets.front()))) sockets.erase(sockets.begin());
  sockets.push_back(std::move(socket));
}

void UpstreamCall::cancel() {
  cancelled_ = true;
  if (socket_) socket_->close();
}

void UpstreamCall::end_within(double s) {
  using Duration = HttpSocket::Steady::duration;
  end_at_ = HttpSocket::Steady::now() + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s));
  if (socket_) socket_->expires_at(*end_at_);
}

bool UpstreamCall::fail(std::string why) {
  if (fault_.empty()) fault_ = cancelled_ ? "cancelled" : std::move(why);
  if (socket_) socket_->close();
  return false;
}

Task<bool> UpstreamCall::connect(const SocketAddress& address) {
  int fd = ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) co_return fail(fmt::format("no socket: {}", std::strerror(errno)));
  watch_peer(fd);
  int error = ::connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0 ? 0 : errno;
  try {
    socket_ = std::make_shared<HttpSocket>(loop_, fd);
  } catch (...) {
    if (fd >= 0) ::close(fd);
    throw;
  }
  if (error == EINPROGRESS) {
    socket_->expires_after(times_.connect_s);
    const boost::system::error_code ec = co_await until_writable(socket_->socket());
    if (ec || cancelled_ || !socket_->is_open())
      co_return fail(socket_->was_late() ? fmt::format("no connection within {:g} s", times_.connect_s)
                                         : "cannot connect");
    socklen_t size = sizeof error;
    ::getsockopt(socket_->socket().native_handle(), SOL_SOCKET, SO_ERROR, &error, &size);
    socket_->expires_never();
  }
  co_return error == 0 || fail(fmt::format("cannot connect: {}", std::strerror(error)));
}

// True: there is something to wait for. Puts what has arrived of the body into `out`.
bool UpstreamCall::take(std::string_view bytes, std::string& out) {
  for (;;) {
    std::string_view data;
    switch (parser_->next(bytes, data)) {
      case ResponseParser::Event::kMore: return true;
      case ResponseParser::Event::kData: out.append(data); break;
      case ResponseParser::Event::kHead:
        has_head_ = true;
        received_ = bytes;
        return false;
      case ResponseParser::Event::kWhole:
        whole_ = true;
        if (sent_ && parser_->head().keep_alive && bytes.empty() && !cancelled_)
          idle_.keep(worker_, std::exchange(socket_, nullptr));
        else
          socket_->close();
        return false;
      case ResponseParser::Event::kFault: return fail(parser_->fault());
    }
  }
}

std::string UpstreamCall::end_of_connection() {
  return socket_->was_late() ? fmt::format("it was silent for {:g} s", times_.silence_s) : parser_->fault();
}

Task<bool> UpstreamCall::exchange_heads(std::string_view head, std::string_view body) {
  parser_.emplace();
  std::string both;
  if (body.size() <= kSmallBody) both.append(head).append(body);
  socket_->expires_after(times_.write_s);  // a deadline that passed while it was idle counts no more
  sent_ = co_await socket_->write_all(both.empty() ? head : both, times_.write_s);
  if (sent_ && both.empty()) sent_ = co_await socket_->write_all(body, times_.write_s);
  if (!sent_ && socket_->was_late())
    co_return fail(fmt::format("it took nothing of the request for {:g} s", times_.write_s));
  // Else one that refuses a body while it comes has answered, whether or not all of it was taken.
  while (!has_head_ && fault_.empty()) {
    socket_->expires_after(times_.silence_s);
    const std::string_view bytes = co_await socket_->read_scratch();
    heard_ = heard_ || !bytes.empty();
    std::string none;
    if (!bytes.empty() && take(bytes, none)) continue;
    if (bytes.empty() && parser_->end() == ResponseParser::Event::kFault) fail(end_of_connection());
  }
  co_return has_head_;
}

Task<bool> UpstreamCall::begin(UpstreamTarget target, std::string_view head, std::string_view body) {
  worker_ = target.worker;
  for (socket_ = idle_.take(worker_);;) {
    const bool reused = socket_ != nullptr;
    if (!reused) {
      const bool connected = co_await connect(target.address);
      if (!connected) co_return false;
    }
    const bool ok = co_await exchange_heads(head, body);
    if (ok) co_return true;
    if (!reused || heard_ || cancelled_ || socket_->was_late()) co_return false;
    fault_.clear();
    socket_ = nullptr;
  }
}

Task<std::string> UpstreamCall::read() {
  std::string out;
  bool more = !whole_ && fault_.empty() && take(std::exchange(received_, {}), out);
  while (more && out.empty()) {
    if (end_at_)
      socket_->expires_at(*end_at_);
    else
      socket_->expires_after(times_.silence_s);
    const std::string_view bytes = co_await socket_->read_scratch();
    if (!bytes.empty()) {
      more = take(bytes, out);
      continue;
    }
    more = false;
    if (end_at_ && socket_->was_late()) cancelled_ = true;
    if (cancelled_ || socket_->was_late() || parser_->end() == ResponseParser::Event::kFault)
      fail(end_of_connection());
    else
      whole_ = true;
  }
  co_return out;
}

Task<std::optional<std::string>> UpstreamCall::read_all(size_t max_bytes) {
  std::string body;
  for (;;) {
    const std::string piece = co_await read();
    if (piece.empty()) break;
    if (piece.size() > max_bytes - body.size()) {
      fail(fmt::format("its reply is over {} bytes", max_bytes));
      co_return std::nullopt;
    }
    body += piece;
  }
  if (!whole_) co_return std::nullopt;
  co_return body;
}

}  // namespace perigee

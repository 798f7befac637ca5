#include "kv/socket.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/clock.h"

namespace perigee {
namespace {

Error failed(const char* what) {
  return Error(Code::kUnavailable, fmt::format("{}: {}", what, std::strerror(errno)));
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Result<Addresses> resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0)
    return Error(Code::kUnavailable, fmt::format("{}:{}: {}", host, port, gai_strerror(error)));
  return Addresses(found, &freeaddrinfo);
}

// Whether the event came in time.
Status wait_for(int fd, short event, double timeout_s) {
  pollfd waited{.fd = fd, .events = event, .revents = 0};
  int ready = 0;
  do ready = poll(&waited, 1, static_cast<int>(timeout_s * 1000));
  while (ready < 0 && errno == EINTR);
  if (ready < 0) return failed("poll");
  if (ready == 0) return Error(Code::kUnavailable, fmt::format("the peer was silent for {:g} s", timeout_s));
  return {};
}

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

void Socket::Shut::operator()() const noexcept {
  shutdown(fd, SHUT_RDWR);
}

void Socket::end_with(const std::stop_token& stop) {
  if (stop.stop_possible()) on_stop_ = std::make_unique<std::stop_callback<Shut>>(stop, Shut{fd_});
}

Result<Socket> Socket::connect(const std::string& peer, double timeout_s, const std::stop_token& stop) {
  const size_t colon = peer.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == peer.size())
    return bad_input(fmt::format("'{}' is not host:port", peer), "peer");
  std::string host = peer.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  ASSIGN_OR_RETURN(const Addresses addresses, resolve(host, peer.substr(colon + 1), 0));
  Error last(Code::kUnavailable, "no address");
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.valid()) return failed("socket");
    prepare(socket.fd_);
    socket.end_with(stop);
    if (::connect(socket.fd_, a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS) {
      last = failed(peer.c_str());
      continue;
    }
    // A stop before connect() has shut nothing; one after it ends the wait.
    const Status ready = stop.stop_requested() ? Status() : wait_for(socket.fd_, POLLOUT, timeout_s);
    if (stop.stop_requested()) return Error(Code::kUnavailable, "the engine is shutting down");
    if (!ready.ok()) {
      last = ready.error();
      continue;
    }
    socklen_t size = sizeof(errno);
    getsockopt(socket.fd_, SOL_SOCKET, SO_ERROR, &errno, &size);
    if (errno == 0) return socket;
    last = failed(peer.c_str());
  }
  return last;
}

Result<Socket> Socket::listen(const std::string& host, int port) {
  ASSIGN_OR_RETURN(const Addresses addresses, resolve(host, std::to_string(port), AI_PASSIVE));
  Socket socket(::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return failed("socket");
  const int on = 1;
  setsockopt(socket.fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const std::string where = fmt::format("{}:{}", host, port);
  if (bind(socket.fd_, addresses->ai_addr, addresses->ai_addrlen) != 0) return failed(where.c_str());
  if (::listen(socket.fd_, 64) != 0) return failed(where.c_str());
  return socket;
}

Result<Socket> Socket::accept() const {
  for (;;) {
    Socket made(::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC));
    if (made.valid()) {
      prepare(made.fd_);
      return made;
    }
    if (errno != EINTR && errno != ECONNABORTED) return failed("accept");
  }
}

int Socket::port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Status Socket::send(std::span<const uint8_t> bytes, double timeout_s) const {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      RETURN_IF_ERROR(wait_for(fd_, POLLOUT, timeout_s));
    } else if (errno != EINTR) {
      return failed("send");
    }
  }
  return {};
}

Status Socket::receive(std::span<uint8_t> bytes, double timeout_s, double end_s) const {
  while (!bytes.empty()) {
    const double left_s = end_s - system_clock().now_s();
    if (left_s <= 0) return Error(Code::kUnavailable, "the peer was too slow");
    const ssize_t got = recv(fd_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<size_t>(got));
    } else if (got == 0) {
      return Error(Code::kUnavailable, "the peer has closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      RETURN_IF_ERROR(wait_for(fd_, POLLIN, std::min(timeout_s, left_s)));
    } else if (errno != EINTR) {
      return failed("receive");
    }
  }
  return {};
}

bool Socket::is_over() const {
  uint8_t byte = 0;
  const ssize_t got = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void Socket::stop() const {
  if (fd_ >= 0) Shut{fd_}();
}

void Socket::close() {
  on_stop_.reset();  // before the number is another's
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace perigee

// Socket: a TCP connection with a time limit on every wait. Errors are kUnavailable and end it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>

#include "base/result.h"

namespace perigee {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), on_stop_(std::move(other.on_stop_)) {}
  Socket& operator=(Socket&& other) noexcept {
    close();
    fd_ = std::exchange(other.fd_, -1);
    on_stop_ = std::move(other.on_stop_);
    return *this;
  }
  ~Socket() { close(); }

  // To "host:port" or "[address]:port". `stop` acts as stop(), while it connects, too.
  static Result<Socket> connect(const std::string& peer, double timeout_s, const std::stop_token& stop = {});
  // Port 0: any.
  static Result<Socket> listen(const std::string& host, int port);
  Result<Socket> accept() const;  // waits until there is one, or stop()

  bool valid() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  int port() const;  // its own
  // All of it, with at most so long between two bytes, and none received after `end_s` of the system's clock.
  Status send(std::span<const uint8_t> bytes, double timeout_s) const;
  Status receive(std::span<uint8_t> bytes, double timeout_s, double end_s = 1e300) const;
  // Whether the other side has closed it, or stop() was called. Bytes that wait to be read are not looked at.
  bool is_over() const;
  // Ends every wait on it, from any thread.
  void stop() const;
  void close();

 private:
  struct Shut {
    int fd;
    void operator()() const noexcept;
  };
  void end_with(const std::stop_token& stop);

  int fd_ = -1;
  std::unique_ptr<std::stop_callback<Shut>> on_stop_;
};

}  // namespace perigee

// Test only: workers of a router. FakeWorker speaks HTTP and does what a test says; LyingWorker sends bytes as they
// are.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/eventually.h"
#include "server/api_error.h"
#include "server/http_server.h"
#include "server/test_client.h"

namespace perigee {

class FakeWorker {
 public:
  using Handler = std::function<void(const std::shared_ptr<Exchange>&, const HttpRequest&)>;

  explicit FakeWorker(Handler handler) : handler_(std::move(handler)) {
    HttpConfig config;
    config.port = 0;
    HttpCallbacks callbacks;
    callbacks.probe = [this](const HttpRequest& request) -> std::optional<HttpReply> {
      if (request.path != "/readyz") return std::nullopt;
      return HttpReply{.status = ready ? 200 : 503};
    };
    callbacks.check = [](const HttpRequest&) { return std::nullopt; };
    callbacks.handler = [this](const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
      {
        const std::lock_guard lock(mutex_);
        requests_.push_back(request);
      }
      handler_(exchange, request);
    };
    callbacks.refusal = [](int status, const std::string& message) { return error_reply(status, message); };
    server_ = std::move(*HttpServer::start(config, std::move(callbacks)));
  }
  ~FakeWorker() { stop(); }
  void stop() { server_->stop(); }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(server_->port()); }
  std::vector<HttpRequest> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

  std::atomic<bool> ready{true};

 private:
  const Handler handler_;
  std::mutex mutex_;
  std::vector<HttpRequest> requests_;
  std::unique_ptr<HttpServer> server_;
};

// Answers probes; on any other request it sends `reply` and closes the connection, with a reset where `reset` says so.
// With `stays` it does neither, and reads no more than the request's first bytes.
class LyingWorker {
 public:
  LyingWorker(std::string reply, bool reset, bool stays = false)
      : reply_(std::move(reply)), reset_(reset), stays_(stays) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_, 64), 0);
    socklen_t size = sizeof address;
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  LyingWorker(const LyingWorker&) = delete;
  ~LyingWorker() {
    stop_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (const int fd : staying_) ::close(fd);
    ::close(listener_);
  }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  int count() const { return count_; }

 private:
  void run() {
    while (!stop_) {
      const int fd = ::accept(listener_, nullptr, nullptr);
      if (fd >= 0) serve(fd);
    }
  }
  void serve(int fd) {
    char bytes[65536];
    const ssize_t n = ::recv(fd, bytes, sizeof bytes, 0);
    const bool probe = n > 0 && std::string_view(bytes, static_cast<size_t>(n)).starts_with("GET /readyz");
    const std::string reply = probe ? "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" : reply_;
    if (!probe) ++count_;
    if (!probe && stays_) return staying_.push_back(fd);
    ::send(fd, reply.data(), reply.size(), MSG_NOSIGNAL);
    if (!probe && reset_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // what was sent arrives before the reset
      const linger now{1, 0};
      ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    ::close(fd);
  }

  const std::string reply_;
  const bool reset_, stays_;
  std::vector<int> staying_;
  int listener_ = -1, port_ = 0;
  std::atomic<int> count_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace perigee

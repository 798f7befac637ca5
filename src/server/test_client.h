// Test only: a blocking HTTP client on a raw socket, which can also misbehave.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/json.h"

namespace perigee {

class TestClient {
 public:
  explicit TestClient(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  TestClient(const TestClient&) = delete;
  ~TestClient() { close(); }

  bool connected() const { return connected_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void shut_down_sending() { ::shutdown(fd_, SHUT_WR); }
  // A small window, so that what is not read stays with the sender.
  void receive_little() {
    const int bytes = 64 << 10;
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  }
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  // Reads more into text(); false at the end of the stream, which ended() tells, or after `timeout_ms`.
  bool read_some(int timeout_ms = 60000) {
    pollfd entry{fd_, POLLIN, 0};
    if (::poll(&entry, 1, timeout_ms) <= 0) return false;
    char bytes[65536];
    const ssize_t n = recv(fd_, bytes, sizeof bytes, 0);
    ended_ = n <= 0;
    if (ended_) return false;
    text_.append(bytes, static_cast<size_t>(n));
    return true;
  }
  bool read_until(std::string_view mark) {
    while (text_.find(mark) == std::string::npos)
      if (!read_some()) return false;
    return true;
  }
  void read_to_end() {
    while (read_some()) {
    }
  }

  bool ended() const { return ended_; }  // the server has closed the connection, and that was read

  struct Reply {
    int status = 0;  // 0: none came
    std::string head, body;
    Json json() const {
      const auto parsed = parse_json(body);
      return parsed.ok() ? *parsed : Json();
    }
  };
  // Reads one reply with a Content-Length, or a chunked one to its last chunk.
  Reply read_reply() {
    Reply reply;
    if (!read_until("\r\n\r\n")) return reply;
    const size_t end = text_.find("\r\n\r\n") + 4;
    reply.head = text_.substr(0, end);
    reply.status = std::atoi(reply.head.c_str() + 9);
    text_.erase(0, end);
    if (reply.head.find("Transfer-Encoding: chunked") != std::string::npos) {
      reply.body = read_chunks();
      return reply;
    }
    const size_t field = reply.head.find("Content-Length: ");
    const size_t length = field == std::string::npos ? 0 : std::strtoul(reply.head.c_str() + field + 16, nullptr, 10);
    while (text_.size() < length && read_some()) {
    }
    reply.body = text_.substr(0, length);
    text_.erase(0, length);
    return reply;
  }
  Reply get(const std::string& path, const std::string& headers = "") {
    send("GET " + path + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n");
    return read_reply();
  }
  bool send_post(const std::string& path, const std::string& body, const std::string& headers = "") {
    return send("POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n" + headers + "\r\n" + body);
  }
  Reply post(const std::string& path, const std::string& body, const std::string& headers = "") {
    send_post(path, body, headers);
    return read_reply();
  }
  std::string& text() { return text_; }

 private:
  std::string read_chunks() {
    std::string body;
    for (;;) {
      if (!read_until("\r\n")) return body;
      const size_t size = std::strtoul(text_.c_str(), nullptr, 16);
      text_.erase(0, text_.find("\r\n") + 2);
      while (text_.size() < size + 2 && read_some()) {
      }
      body += text_.substr(0, size);
      text_.erase(0, size + 2);
      if (size == 0) return body;
    }
  }
  int fd_;
  bool connected_ = false;
  bool ended_ = false;
  std::string text_;
};

}  // namespace perigee

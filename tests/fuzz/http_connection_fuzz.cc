// A connection's bytes, whole and in pieces, through the door and a serving loop on one thread. The first byte chooses
// the pieces. Never a crash; every reply is well formed; there is one reply for each request that was answered, and
// none after the one that closes; and the pieces change nothing.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "server/api_error.h"
#include "server/http_door.h"

namespace perigee {
namespace {

struct Answers {
  int count = 0;
  bool last_may_be_head = false;  // the connection refused: what the method was is not told
  std::vector<bool> head_only;
  void add(bool head) {
    ++count;
    head_only.push_back(head);
  }
};

HttpConfig small_config() {
  HttpConfig config;
  config.max_body_bytes = 1500;
  config.max_bodies_bytes = 1400;
  config.max_head_bytes = 700;
  config.max_line_bytes = 300;
  config.max_headers = 10;
  config.head_timeout_s = config.idle_timeout_s = config.body_timeout_s = config.write_timeout_s = 3600;
  return config;
}

void answer(const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
  if (request.path == "/s") {
    exchange->begin_stream({});
    exchange->write("data: " + std::to_string(request.body.size()) + "\n\n");
    return exchange->finish(request.query == "close");
  }
  HttpReply reply;
  reply.body = request.body;
  reply.close = request.path == "/c";
  if (request.path != "/l") return exchange->respond(std::move(reply));
  exchange->post([exchange, reply] { exchange->respond(reply); });
}

HttpCallbacks callbacks_for(Answers& answers) {
  HttpCallbacks callbacks;
  callbacks.probe = [&answers](const HttpRequest& request) -> std::optional<HttpReply> {
    if (request.path != "/p") return std::nullopt;
    answers.add(request.method == "HEAD");
    return HttpReply();
  };
  callbacks.check = [&answers](const HttpRequest& request) -> std::optional<HttpReply> {
    if (request.path != "/k") return std::nullopt;
    answers.add(request.method == "HEAD");
    return error_reply(401, "no");
  };
  callbacks.handler = [&answers](const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
    answers.add(request.method == "HEAD");
    answer(exchange, request);
  };
  callbacks.refusal = [&answers](int status, const std::string& message) {
    answers.add(false);
    answers.last_may_be_head = true;
    return error_reply(status, message);
  };
  return callbacks;
}

class Server {
 public:
  // What the server sends when `bytes` come in pieces of up to `piece` bytes, their sizes drawn from `seed`.
  std::string replies_to(std::string_view bytes, size_t piece, uint32_t seed) {
    answers = Answers();
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    door_.enter(std::make_shared<HttpPeer>(shared_, ends[0]));
    std::string out;
    while (!bytes.empty()) {
      seed = seed * 1664525 + 1013904223;
      const size_t n = std::min(bytes.size(), 1 + (seed >> 8) % piece);
      (void)::send(ends[1], bytes.data(), n, MSG_NOSIGNAL);
      bytes.remove_prefix(n);
      turn(ends[1], out);
    }
    ::shutdown(ends[1], SHUT_WR);
    turn(ends[1], out);
    ::close(ends[1]);
    for (int i = 0; i < 1000 && shared_->open_connections > 0; ++i) loop_->context().poll();
    CHECK(shared_->open_connections == 0 && shared_->in_service == 0 && shared_->open_answers == 0);
    CHECK(shared_->bodies->used() == 0, "bytes of bodies that nobody holds");
    return out;
  }

  Answers answers;

 private:
  void turn(int fd, std::string& out) {
    while (loop_->context().poll() > 0) {
    }
    char bytes[4096];
    for (ssize_t n = 1; n > 0;) {
      n = ::recv(fd, bytes, sizeof bytes, 0);
      if (n > 0) out.append(bytes, static_cast<size_t>(n));
    }
  }

  const std::shared_ptr<HttpLoop> loop_ = std::make_shared<HttpLoop>();
  const std::shared_ptr<HttpShared> shared_ = std::make_shared<HttpShared>(small_config(), callbacks_for(answers));
  HttpDoor door_{loop_, {loop_}, shared_};
};

// Takes a body off the front of `text`.
void take_body(std::string_view head, std::string_view& text) {
  if (head.find("\r\nTransfer-Encoding: chunked\r\n") != std::string_view::npos) {
    for (size_t size = 1; size > 0;) {
      char* end = nullptr;
      const std::string line(text.substr(0, text.find("\r\n")));
      size = std::strtoul(line.c_str(), &end, 16);
      CHECK(!line.empty() && *end == 0, "a bad chunk");
      CHECK(text.size() >= line.size() + 2 + size + 2 && text.substr(line.size() + 2 + size, 2) == "\r\n");
      text.remove_prefix(line.size() + 2 + size + 2);
    }
    return;
  }
  const size_t field = head.find("\r\nContent-Length: ");
  if (field == std::string_view::npos) {  // to the end of the connection
    text = {};
    return;
  }
  const size_t length = std::strtoul(std::string(head.substr(field + 18, 20)).c_str(), nullptr, 10);
  CHECK(length <= text.size(), "a short body");
  text.remove_prefix(length);
}

void check_replies(std::string_view text, const Answers& answers) {
  int count = 0;
  bool closed = false;
  while (!text.empty()) {
    CHECK(!closed, "something past the last reply");
    const size_t end = text.find("\r\n\r\n");
    CHECK(end != std::string_view::npos && text.starts_with("HTTP/1.1 "), "no reply");
    const std::string_view head = text.substr(0, end + 4);
    text.remove_prefix(end + 4);
    if (head.starts_with("HTTP/1.1 100 ")) continue;
    closed = head.find("\r\nConnection: close\r\n") != std::string_view::npos;
    CHECK(count < answers.count, "more replies than requests");
    const bool head_only = answers.head_only[static_cast<size_t>(count++)];
    const bool no_body = head_only || (closed && text.empty() && answers.last_may_be_head);
    if (!no_body) take_body(head, text);
  }
  CHECK(count == answers.count, "an answer that was not sent");
}

}  // namespace
}  // namespace perigee

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const server = [] {
    perigee::set_log_level(perigee::LogLevel::kError);
    return new perigee::Server;
  }();
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string whole = server->replies_to(bytes, 1u << 20, 1);
  perigee::check_replies(whole, server->answers);
  const std::string pieces = server->replies_to(bytes, 1 + data[0] % 32, data[0]);
  perigee::check_replies(pieces, server->answers);
  CHECK(whole == pieces, "the pieces change the replies");
  return 0;
}

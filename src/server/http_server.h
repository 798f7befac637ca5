// HttpServer: HTTP/1.1 over TCP. Accepts, parses under caps, keeps connections alive, streams with back-pressure.
//
// It knows nothing of models or JSON: a handler answers through an Exchange (http_types.h). Caps are enforced while
// reading: an oversized head is 431, an oversized body 413, a slow one is closed at its deadline. Each of `threads`
// event loops owns the connections that were dealt to it; nothing of a connection crosses threads but post().
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "server/http_types.h"

namespace perigee {

struct HttpConfig {
  std::string host = "127.0.0.1";  // an address, not a name
  int port = 8000;                 // 0: any free one
  int threads = 1;
  size_t max_body_bytes = 32u << 20;
  size_t max_head_bytes = 64u << 10;
  size_t max_line_bytes = 16u << 10;
  size_t max_headers = 100;
  size_t max_connections = 4096;
  size_t max_connections_per_key = 512;  // connections whose newest request has one Authorization header
  size_t max_unsent_bytes = 8u << 20;    // queued for one reader; over it the reader counts as gone
  double head_timeout_s = 10;            // to receive a head once its first byte is there
  double idle_timeout_s = 300;           // between requests of one connection
  double body_timeout_s = 30;            // without a byte of the body
  double write_timeout_s = 60;           // without a byte taken by the client
  double sse_comment_s = 15;             // a silent stream says ": keep-alive"
};

class HttpServer {
 public:
  // Looks at a request whose head has arrived, before its body is read; a reply here ends it (wrong key, draining).
  using HeadCheck = std::function<std::optional<HttpReply>(const HttpRequest&)>;

  // Told the status of each reply that neither of the others gave: malformed, over a cap, too slow. Thread-safe.
  using RefusalCount = std::function<void(int status)>;

  // Binds and listens (backlog 4,096) and raises the limit of open files as far as allowed. Errors name address and
  // cause. Connections are accepted from here on.
  static Result<std::unique_ptr<HttpServer>> start(const HttpConfig& config, HeadCheck check, HttpHandler handler,
                                                   RefusalCount count_refusal);
  ~HttpServer();

  int port() const;
  size_t open_connections() const;
  size_t open_answers() const;  // requests whose answer is not yet written to its end

  // Calls `work` every `period_s` on the first event loop, until stop().
  void every(double period_s, std::function<void()> work);

  // Replies from here on carry `Connection: close`. Idle connections stay, so that a late request is told 503.
  void close_after_replies();

  // Closes everything and joins the threads. Disconnect callbacks of unfinished exchanges run first. Idempotent.
  void stop();

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee

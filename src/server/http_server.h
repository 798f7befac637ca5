// HttpServer: HTTP/1.1 over TCP. Accepts, parses under caps, keeps connections alive, streams with back-pressure.
//
// It knows nothing of models or JSON: a handler answers through an Exchange (http_types.h). Caps are enforced while
// reading: an oversized head is 431, an oversized body 413, a slow one is closed at its deadline. One loop, the door
// (http_door.h), reads heads and answers probes; `threads` others serve requests. A loop owns the connections that it
// has; nothing of a connection crosses threads but post().
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
  size_t max_bodies_bytes = 256u << 20;  // of all requests under way; over it the next is told 503
  size_t max_head_bytes = 32u << 10;
  size_t max_line_bytes = 16u << 10;
  size_t max_headers = 100;
  size_t max_connections = 4096;         // at most; fewer where the process may have fewer open files
  size_t reserved_connections = 64;      // besides them, for probes
  size_t max_connections_per_key = 512;  // connections whose newest request has one Authorization header; 0: any number
  size_t max_unsent_bytes = 8u << 20;    // queued for one reader; over it the reader counts as gone
  double head_timeout_s = 10;            // to receive a head: from the accept on, and from its first byte on later ones
  double idle_timeout_s = 120;           // between requests of one connection
  double body_timeout_s = 10;            // without progress of the body
  double body_s_per_mb = 10;             // that each MB of it may take beyond that
  double write_timeout_s = 60;           // without a byte taken by the client
  double sse_comment_s = 15;             // a silent stream says ": keep-alive"
};

// What the server asks its user. All are called from several threads.
struct HttpCallbacks {
  // Answers what must be answered at once whatever else goes on; called for every request without a body before
  // anything else looks at it. Must not wait for anything.
  std::function<std::optional<HttpReply>(const HttpRequest&)> probe;
  // Looks at a request whose head has arrived, before its body is read; a reply here ends it (wrong key, draining).
  std::function<std::optional<HttpReply>(const HttpRequest&)> check;
  HttpHandler handler;
  // The reply, counted, where none of the others gave one: malformed, over a cap, too slow.
  std::function<HttpReply(int status, const std::string& message)> refusal;
};

class HttpServer {
 public:
  // Binds and listens (backlog 4,096) and raises the limit of open files as far as allowed. Errors name address and
  // cause. Connections are accepted from here on.
  static Result<std::unique_ptr<HttpServer>> start(const HttpConfig& config, HttpCallbacks callbacks);
  ~HttpServer();

  int port() const;
  size_t open_connections() const;
  size_t open_answers() const;  // requests whose answer is not yet written to its end

  // Calls `work` every `period_s` on a serving loop, until stop().
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

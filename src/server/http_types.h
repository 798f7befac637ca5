// HTTP as the API sees it: a request, a whole reply, and the exchange that carries one answer.
//
// It knows nothing of sockets or of the library that reads them, so every route is tested without either. An Exchange
// belongs to one request and runs everything on one executor: the handler is called there, on_disconnect is called
// there, and post() is the one member that other threads may call.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace perigee {

class HttpLoop;

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;   // of the request target, before '?', not decoded; "" when the target is not in origin form
  std::string query;  // after '?'
  HttpHeaders headers;
  std::string body;
  std::shared_ptr<void> body_share;  // of the budget for bodies: given back with the last copy of the request

  // The first header of that name (case-insensitive), or nullptr.
  const std::string* header(std::string_view name) const;
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;
  bool close = false;  // end the connection after it
};

class Exchange {
 public:
  virtual ~Exchange() = default;

  // Exactly one of respond() and begin_stream() is called, once. Both may be called after the handler has returned.
  virtual void respond(HttpReply reply) = 0;

  // Sends the head of a streamed reply (text/event-stream); write() queues bytes of its body, finish() ends it.
  // finish(true) also closes the connection. While nothing else is sent, a comment line goes out every 15 s.
  virtual void begin_stream(HttpHeaders headers) = 0;
  virtual void write(std::string data) = 0;
  virtual void finish(bool close) = 0;

  // Called at most once, when the client goes away before the answer is complete, or reads so slowly that the bytes
  // waiting for it pass the cap.
  virtual void on_disconnect(std::function<void()> callback) = 0;

  // Runs `work` on this exchange's executor, in the order of the calls. Thread-safe; still safe after the connection
  // has gone, and after the server has stopped (then the work is dropped).
  virtual void post(std::function<void()> work) = 0;

  // The event loop that it runs on, for handlers that wait for sockets of their own; null where there is none.
  virtual std::shared_ptr<HttpLoop> loop() { return nullptr; }

  // For whoever has no memory for a post(): needs none itself. Some seconds later this ends as if the client had left.
  // Thread-safe.
  virtual void abandon() noexcept {}
};

using HttpHandler = std::function<void(std::shared_ptr<Exchange>, HttpRequest)>;

const char* http_reason(int status);

bool same_ignoring_case(std::string_view a, std::string_view b);   // ASCII
std::vector<std::string_view> elements_of(std::string_view list);  // separated by commas, trimmed

// --- The head of a request: bytes in, request line, headers and framing out. Pure. ---
//
// What proxies and servers read differently is refused rather than repaired, because a request that two of them frame
// differently lets one client speak in another's name (request smuggling): folded lines, bare CR or LF, control
// characters, blanks before the colon, repeated, listed or signed lengths, both length headers, and every transfer
// coding other than exactly `chunked`. Time is linear in the size of the head.

struct HeadLimits {
  size_t max_bytes = 64u << 10;
  size_t max_line_bytes = 16u << 10;
  size_t max_headers = 100;
  size_t max_body_bytes = 32u << 20;
};

struct HttpHead {
  HttpRequest request;  // without its body
  bool http11 = true;
  bool keep_alive = true;
  bool chunked = false;
  bool expects_continue = false;
  size_t content_length = 0;  // of the body, when not chunked

  bool has_body() const { return chunked || content_length > 0; }
};

struct HeadFault {
  int status = 0;  // 0: the head is fine
  const char* message = "";
};

// `text` is everything up to and including the blank line. `head` is meaningful when the status is 0. Faults are 400,
// 413, 415, 417, 431, 501 and 505; after any of them the connection must be closed.
HeadFault parse_head(std::string_view text, const HeadLimits& limits, HttpHead& head);

// The lines of the head of a request or a reply: `take_first` reads the first one, the others are headers. Faults are
// 400 and 431, and those of `take_first`.
HeadFault parse_lines(std::string_view text, const HeadLimits& limits,
                      const std::function<HeadFault(std::string_view)>& take_first, HttpHeaders& headers);

// Finds the end of a head in bytes that arrive in pieces: each byte is looked at once.
class HeadEnd {
 public:
  // The size of the head at the start of `text`, 0 while it is not complete. `text` is what the last call saw, and
  // more.
  size_t find(std::string_view text);

 private:
  size_t seen_ = 0;  // no head ends before here
};

}  // namespace perigee

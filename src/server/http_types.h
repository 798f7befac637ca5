// HTTP as the API sees it: a request, a whole reply, and the exchange that carries one answer.
//
// It knows nothing of sockets or of the library that reads them, so every route is tested without either. An Exchange
// belongs to one request and runs everything on one executor: the handler is called there, on_disconnect is called
// there, and post() is the one member that other threads may call.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace perigee {

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

  // For whoever has no memory for a post(): needs none itself. Some seconds later this ends as if the client had left.
  // Thread-safe.
  virtual void abandon() noexcept {}
};

using HttpHandler = std::function<void(std::shared_ptr<Exchange>, HttpRequest)>;

const char* http_reason(int status);

bool same_ignoring_case(std::string_view a, std::string_view b);  // ASCII

}  // namespace perigee

// A small blocking HTTP/1.1 client for the benchmarks: one connection, streamed replies.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace perigee {

struct HttpEndpoint {
  std::string host = "127.0.0.1";
  std::string port = "8000";
  std::string api_key;  // sent as a bearer token; empty: none
};

struct HttpReply {
  int status = 0;
  std::string body;  // of an event stream: empty, the events went to the callback
};

class HttpClient {
 public:
  explicit HttpClient(HttpEndpoint endpoint);
  ~HttpClient();

  Result<HttpReply> get(const std::string& path);
  // `on_data` receives the text of each "data: " event as it arrives, [DONE] included.
  Result<HttpReply> post(const std::string& path, const std::string& json,
                         const std::function<void(std::string_view)>& on_data = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace perigee

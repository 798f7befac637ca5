#include "main/http_client.h"

#include <fmt/format.h>

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace perigee {
namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using error_code = boost::system::error_code;

struct HttpClient::Impl {
  HttpEndpoint endpoint;
  asio::io_context io;
  beast::tcp_stream stream{io};
  beast::flat_buffer buffer;
  bool connected = false;

  Status connect();
  Result<HttpReply> exchange(http::request<http::string_body>& request,
                             const std::function<void(std::string_view)>& on_data);
  Result<HttpReply> read(const std::function<void(std::string_view)>& on_data);
  Error failed(const char* doing, const error_code& error);
};

namespace {

// Cuts a byte stream into the texts of its "data: " lines.
class EventLines {
 public:
  explicit EventLines(const std::function<void(std::string_view)>& on_data) : on_data_(on_data) {}
  void push(std::string_view bytes) {
    pending_.append(bytes);
    size_t begin = 0;
    for (size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string_view line(pending_.data() + begin, end - begin);
      if (line.substr(0, 6) == "data: ") on_data_(line.substr(6));
    }
    pending_.erase(0, begin);
  }

 private:
  const std::function<void(std::string_view)>& on_data_;
  std::string pending_;
};

}  // namespace

HttpClient::HttpClient(HttpEndpoint endpoint) : impl_(std::make_unique<Impl>()) {
  impl_->endpoint = std::move(endpoint);
}
HttpClient::~HttpClient() = default;

Error HttpClient::Impl::failed(const char* doing, const error_code& error) {
  connected = false;
  error_code ignored;
  stream.socket().close(ignored);
  buffer.clear();
  return Error(Code::kUnavailable,
               fmt::format("http://{}:{}: cannot {}: {}", endpoint.host, endpoint.port, doing, error.message()));
}

Status HttpClient::Impl::connect() {
  if (connected) return {};
  error_code error;
  asio::ip::tcp::resolver resolver(io);
  const auto found = resolver.resolve(endpoint.host, endpoint.port, error);
  if (error) return failed("resolve", error);
  asio::connect(stream.socket(), found, error);
  if (error) return failed("connect", error);
  stream.socket().set_option(asio::ip::tcp::no_delay(true), error);
  connected = true;
  return {};
}

Result<HttpReply> HttpClient::Impl::exchange(http::request<http::string_body>& request,
                                             const std::function<void(std::string_view)>& on_data) {
  RETURN_IF_ERROR(connect());
  request.set(http::field::host, endpoint.host + ":" + endpoint.port);
  if (!endpoint.api_key.empty()) request.set(http::field::authorization, "Bearer " + endpoint.api_key);
  request.prepare_payload();
  error_code error;
  http::write(stream, request, error);
  if (error) return failed("send", error);
  return read(on_data);
}

Result<HttpReply> HttpClient::Impl::read(const std::function<void(std::string_view)>& on_data) {
  error_code error;
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(boost::none);
  http::read_header(stream, buffer, parser, error);
  if (error) return failed("read the reply", error);
  HttpReply reply{.status = static_cast<int>(parser.get().result_int()), .body = ""};
  const bool events = on_data && parser.get()[http::field::content_type].starts_with("text/event-stream");
  EventLines lines(on_data);
  char chunk[8192];
  while (!parser.is_done()) {
    parser.get().body().data = chunk;
    parser.get().body().size = sizeof chunk;
    http::read_some(stream, buffer, parser, error);
    if (error == http::error::need_buffer) error = {};
    if (error) return failed("read the reply", error);
    const std::string_view got(chunk, sizeof chunk - parser.get().body().size);
    if (events)
      lines.push(got);
    else
      reply.body.append(got);
  }
  if (!parser.get().keep_alive()) {
    connected = false;
    stream.socket().close(error);
    buffer.clear();
  }
  return reply;
}

Result<HttpReply> HttpClient::get(const std::string& path) {
  http::request<http::string_body> request(http::verb::get, path, 11);
  return impl_->exchange(request, nullptr);
}

Result<HttpReply> HttpClient::post(const std::string& path, const std::string& json,
                                   const std::function<void(std::string_view)>& on_data) {
  http::request<http::string_body> request(http::verb::post, path, 11);
  request.set(http::field::content_type, "application/json");
  request.body() = json;
  return impl_->exchange(request, on_data);
}

}  // namespace perigee

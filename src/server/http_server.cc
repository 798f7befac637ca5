#include "server/http_server.h"

#include <fmt/core.h>
#include <sys/resource.h>

#include <boost/asio/post.hpp>
#include <chrono>
#include <thread>

#include "base/log.h"
#include "server/http_connection.h"
#include "server/http_door.h"

namespace perigee {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr int kListenBacklog = 4096;
constexpr auto kPause = std::chrono::milliseconds(50);  // before another try where something was missing

void raise_open_files_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) log_warning("cannot raise the limit of open files");
}

// As many as the limit of open files leaves beside the files of the process itself.
size_t connections_within_files(const HttpConfig& config) {
  constexpr size_t kOtherFiles = 128;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return config.max_connections;
  const size_t kept = kOtherFiles + config.reserved_connections;
  const size_t most = limit.rlim_cur > 2 * kept ? limit.rlim_cur - kept : kept;
  if (most < config.max_connections)
    log_warning("at most ", most, " connections instead of ", config.max_connections,
                ": the process may have no more than ", limit.rlim_cur, " open files (ulimit -n)");
  return std::min(most, config.max_connections);
}

}  // namespace

struct HttpServer::Impl {
  Impl(const HttpConfig& config, HttpCallbacks callbacks)
      : shared(std::make_shared<HttpShared>(config, std::move(callbacks))) {
    for (int i = 0; i < std::max(1, config.threads); ++i) serving.push_back(std::make_shared<HttpLoop>());
    door = std::make_unique<HttpDoor>(door_loop, serving, shared);
  }

  const std::shared_ptr<HttpShared> shared;
  const std::shared_ptr<HttpLoop> door_loop = std::make_shared<HttpLoop>();
  std::vector<std::shared_ptr<HttpLoop>> serving;
  std::unique_ptr<HttpDoor> door;
  std::unique_ptr<tcp::acceptor> acceptor;
  int port = 0;
  bool stopped = false;

  Status listen();
  Task<> accept_all();
};

Status HttpServer::Impl::listen() {
  const HttpConfig& config = shared->config;
  error_code ec;
  const auto address = asio::ip::make_address(config.host == "localhost" ? "127.0.0.1" : config.host, ec);
  if (ec)
    return bad_input(fmt::format("cannot listen on '{}': --host must be an IP address or localhost", config.host),
                     "host");
  if (config.port < 0 || config.port > 65535)
    return bad_input(fmt::format("port must be between 0 and 65535, got {}", config.port), "port");
  const tcp::endpoint endpoint(address, static_cast<uint16_t>(config.port));
  acceptor = std::make_unique<tcp::acceptor>(door_loop->context());
  acceptor->open(endpoint.protocol(), ec);
  if (!ec) acceptor->set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor->bind(endpoint, ec);
  if (!ec) acceptor->listen(kListenBacklog, ec);
  if (!ec) acceptor->non_blocking(true, ec);
  if (ec)
    return Error(Code::kUnavailable,
                 fmt::format("cannot listen on {}:{}: {}; choose another --port or --host", config.host, config.port,
                             ec.message()),
                 "port");
  port = acceptor->local_endpoint(ec).port();
  return {};
}

// Without memory, be it for a wait, it tries again after a pause.
Task<> HttpServer::Impl::accept_all() {
  asio::steady_timer pause(door_loop->context());
  while (acceptor->is_open()) {
    try {
      const error_code ec = co_await until_readable(*acceptor);
      const bool accepted = !ec && door->accept_from(acceptor->native_handle());
      if (accepted || !acceptor->is_open()) continue;
      pause.expires_after(kPause);
      co_await until_expired(pause);
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "no memory to accept a connection");
      std::this_thread::sleep_for(kPause);
    }
  }
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpConfig& config, HttpCallbacks callbacks) {
  auto impl = std::make_unique<Impl>(config, std::move(callbacks));
  RETURN_IF_ERROR(impl->listen());
  raise_open_files_limit();
  impl->shared->config.max_connections = connections_within_files(config);
  spawn(impl->accept_all());
  impl->door_loop->start();
  for (const auto& loop : impl->serving) loop->start();
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::~HttpServer() {
  stop();
}

int HttpServer::port() const {
  return impl_->port;
}
size_t HttpServer::open_connections() const {
  return impl_->shared->open_connections;
}
size_t HttpServer::open_answers() const {
  return impl_->shared->open_answers;
}
void HttpServer::close_after_replies() {
  impl_->shared->close_after_replies = true;
}

namespace {

Task<> repeat(std::shared_ptr<HttpLoop> loop, double period_s, std::function<void()> work) {
  asio::steady_timer timer(loop->context());
  loop->periodic.insert(&timer);
  while (!loop->closing) {
    try {
      timer.expires_after(
          std::chrono::duration_cast<asio::steady_timer::duration>(std::chrono::duration<double>(period_s)));
      const error_code ec = co_await until_expired(timer);
      if (!ec) work();
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "no memory for the server's periodic work");
      std::this_thread::sleep_for(kPause);
    }
  }
  loop->periodic.erase(&timer);
}

}  // namespace

void HttpServer::every(double period_s, std::function<void()> work) {
  const auto& loop = impl_->serving.front();
  loop->post([loop, period_s, work = std::move(work)] { spawn(repeat(loop, period_s, work)); });
}

void HttpServer::stop() {
  if (std::exchange(impl_->stopped, true)) return;
  asio::post(impl_->door_loop->context(), [&acceptor = *impl_->acceptor, loop = impl_->door_loop] {
    error_code ignored;
    acceptor.close(ignored);
    loop->close();
  });
  for (const auto& loop : impl_->serving) asio::post(loop->context(), [loop] { loop->close(); });
  impl_->door_loop->join();
  for (const auto& loop : impl_->serving) loop->join();
  // An exchange may outlive the server; what these own must not live that long.
  impl_->shared->callbacks = {};
}

}  // namespace perigee

#include "server/http_server.h"

#include <sys/resource.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <future>

#include "base/log.h"
#include "server/http_connection.h"

namespace perigee {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr int kListenBacklog = 4096;

void raise_open_files_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) log_warning("cannot raise the limit of open files");
}

// Says why connections are turned away, once in a while.
class TurnedAway {
 public:
  void say(const std::string& why) {
    const auto now = std::chrono::steady_clock::now();
    if (now < quiet_until_) return;
    quiet_until_ = now + std::chrono::seconds(10);
    log_warning("connections are turned away: ", why, " (said at most every 10 s)");
  }

 private:
  std::chrono::steady_clock::time_point quiet_until_;
};

}  // namespace

struct HttpServer::Impl {
  std::shared_ptr<HttpShared> shared = std::make_shared<HttpShared>();
  std::vector<std::shared_ptr<HttpLoop>> loops;
  std::unique_ptr<tcp::acceptor> acceptor;
  int port = 0;
  bool stopped = false;

  Status listen();
  asio::awaitable<void> accept_all();
};

Status HttpServer::Impl::listen() {
  const HttpConfig& config = shared->config;
  error_code ec;
  const auto address = asio::ip::make_address(config.host == "localhost" ? "127.0.0.1" : config.host, ec);
  if (ec)
    return bad_input(str_cat("cannot listen on '", config.host, "': --host must be an IP address or localhost"),
                     "host");
  if (config.port < 0 || config.port > 65535)
    return bad_input(str_cat("port must be between 0 and 65535, got ", config.port), "port");
  const tcp::endpoint endpoint(address, static_cast<uint16_t>(config.port));
  acceptor = std::make_unique<tcp::acceptor>(loops[0]->context());
  acceptor->open(endpoint.protocol(), ec);
  if (!ec) acceptor->set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor->bind(endpoint, ec);
  if (!ec) acceptor->listen(kListenBacklog, ec);
  if (ec)
    return Error(Code::kUnavailable,
                 str_cat("cannot listen on ", config.host, ":", config.port, ": ", ec.message(),
                         "; choose another --port or --host"),
                 "port");
  port = acceptor->local_endpoint(ec).port();
  return {};
}

asio::awaitable<void> HttpServer::Impl::accept_all() {
  asio::steady_timer pause(loops[0]->context());
  TurnedAway turned_away;
  for (size_t next = 0; acceptor->is_open(); next = (next + 1) % loops.size()) {
    error_code ec;
    const std::shared_ptr<HttpLoop> loop = loops[next];
    tcp::socket socket =
        co_await acceptor->async_accept(loop->context(), asio::redirect_error(asio::use_awaitable, ec));
    if (ec == asio::error::operation_aborted) co_return;
    if (ec) {  // out of descriptors or memory: others will close
      turned_away.say(ec.message());
      pause.expires_after(std::chrono::milliseconds(50));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ec));
      continue;
    }
    if (shared->open_connections >= shared->config.max_connections) {  // the socket closes here
      turned_away.say(str_cat(shared->config.max_connections, " are open, the most that are served"));
      continue;
    }
    ++shared->open_connections;
    socket.set_option(tcp::no_delay(true), ec);
    asio::co_spawn(loop->context(), serve_connection(loop, shared, std::move(socket)), asio::detached);
  }
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpConfig& config, HeadCheck check, HttpHandler handler,
                                                      RefusalCount count_refusal) {
  auto impl = std::make_unique<Impl>();
  impl->shared->config = config;
  impl->shared->check = std::move(check);
  impl->shared->handler = std::move(handler);
  impl->shared->count_refusal = std::move(count_refusal);
  for (int i = 0; i < std::max(1, config.threads); ++i) impl->loops.push_back(std::make_shared<HttpLoop>());
  RETURN_IF_ERROR(impl->listen());
  raise_open_files_limit();
  asio::co_spawn(impl->loops[0]->context(), impl->accept_all(), asio::detached);
  for (const auto& loop : impl->loops) loop->run();
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

asio::awaitable<void> repeat(std::shared_ptr<HttpLoop> loop, double period_s, std::function<void()> work) {
  asio::steady_timer timer(loop->context());
  loop->periodic.insert(&timer);
  while (!loop->closing) {
    timer.expires_after(
        std::chrono::duration_cast<asio::steady_timer::duration>(std::chrono::duration<double>(period_s)));
    error_code ec;
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ec));
    if (!ec) work();
  }
  loop->periodic.erase(&timer);
}

}  // namespace

void HttpServer::every(double period_s, std::function<void()> work) {
  asio::co_spawn(impl_->loops[0]->context(), repeat(impl_->loops[0], period_s, std::move(work)), asio::detached);
}

void HttpServer::stop() {
  if (std::exchange(impl_->stopped, true)) return;
  std::promise<void> closed;
  asio::post(impl_->loops[0]->context(), [&] {
    error_code ignored;
    impl_->acceptor->close(ignored);
    closed.set_value();
  });
  closed.get_future().wait();
  for (const auto& loop : impl_->loops) asio::post(loop->context(), [loop] { loop->close(); });
  for (const auto& loop : impl_->loops) loop->join();
  // An exchange may outlive the server; what these own must not live that long.
  impl_->shared->handler = nullptr;
  impl_->shared->check = nullptr;
  impl_->shared->count_refusal = nullptr;
}

}  // namespace perigee

// router_bench worker [PORT]: a worker that answers every request with a stream of one event, and holds it open for as
// many milliseconds as the query says (?5000). router_bench load URL RATE SECONDS: sends RATE requests a second to URL,
// each a streamed chat request with a prompt of 2 KB, and prints the time from a request's first byte sent to the first
// byte of its reply's body: median, p99, most. router_bench open URL COUNT MS: opens COUNT streams of MS milliseconds
// at once, and counts those that end whole.
//
// Requests go out at fixed times, whether or not earlier ones are answered: a slow answer delays no other request.
#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "router/forward.h"
#include "server/api_error.h"
#include "server/http_server.h"

namespace perigee {
namespace {

Task<> finish_later(std::shared_ptr<Exchange> exchange, int ms) {
  boost::asio::steady_timer timer(exchange->loop()->context());
  timer.expires_after(std::chrono::milliseconds(ms));
  co_await until_expired(timer);
  exchange->write("data: [DONE]\n\n");
  exchange->finish(false);
}

int run_worker(int port) {
  HttpConfig config;
  config.port = port;
  config.max_connections = 16384;
  config.sse_comment_s = 1e6;
  HttpCallbacks callbacks;
  callbacks.probe = [](const HttpRequest& request) -> std::optional<HttpReply> {
    return request.path == "/readyz" ? std::optional(HttpReply()) : std::nullopt;
  };
  callbacks.check = [](const HttpRequest&) { return std::nullopt; };
  callbacks.handler = [](const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
    exchange->begin_stream({});
    exchange->write("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n");
    spawn(finish_later(exchange, std::atoi(request.query.c_str())));
  };
  callbacks.refusal = [](int status, const std::string& message) { return error_reply(status, message); };
  const auto server = HttpServer::start(config, std::move(callbacks));
  if (!server.ok()) return std::fprintf(stderr, "%s\n", server.error().message.c_str()), 1;
  std::printf("worker on port %d\n", (*server)->port());
  std::fflush(stdout);
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

class Load {
 public:
  explicit Load(const std::string& url) : url_(*parse_worker_url(url)) {
    const boost::asio::ip::tcp::endpoint endpoint(boost::asio::ip::make_address(url_.host),
                                                  static_cast<uint16_t>(std::atoi(url_.port.c_str())));
    std::memcpy(&target_.address.storage, endpoint.data(), endpoint.size());
    target_.address.size = static_cast<socklen_t>(endpoint.size());
    body_ = R"({"model":"m","stream":true,"max_tokens":1,"messages":[{"role":"user","content":")" +
            std::string(2048, 'x') + "\"}]}";
  }

  // `count` requests, `per_s` a second; 0: all at once.
  void run(size_t count, double per_s, int hold_ms) {
    HttpRequest request;
    request.method = "POST";
    request.path = "/v1/chat/completions";
    request.query = std::to_string(hold_ms);
    request.headers = {{"Content-Type", "application/json"}};
    head_ = worker_head(request, url_, body_.size(), "bench");
    count_ = count;
    loop_->post([this, per_s] { spawn(send_all(per_s)); });
    loop_->start();
    done_.get_future().wait();
    boost::asio::post(loop_->context(), [this] { loop_->close(); });
    loop_->join();
  }
  std::vector<double> seconds;
  size_t whole = 0, failed = 0;

 private:
  Task<> send_all(double per_s) {
    boost::asio::steady_timer timer(loop_->context());
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < count_; ++i) {
      if (per_s > 0) {
        timer.expires_at(begin + std::chrono::nanoseconds(static_cast<int64_t>(1e9 * static_cast<double>(i) / per_s)));
        co_await until_expired(timer);
      }
      spawn(one());
    }
  }
  Task<> one() {
    const double begin_s = system_clock().now_s();
    UpstreamCall call(loop_, idle_, UpstreamTimes{.connect_s = 60});
    const bool begun = co_await call.begin(target_, head_, body_);
    std::string piece;
    if (begun) piece = co_await call.read();
    if (!piece.empty()) seconds.push_back(system_clock().now_s() - begin_s);
    const auto rest = co_await call.read_all(1u << 20);
    const bool ok = begun && call.head().status == 200 && rest && (piece + *rest).find("[DONE]") != std::string::npos;
    ++(ok ? whole : failed);
    if (whole + failed == count_) done_.set_value();
  }

  const WorkerUrl url_;
  const std::shared_ptr<HttpLoop> loop_ = std::make_shared<HttpLoop>();
  IdleSockets idle_;
  UpstreamTarget target_;
  std::string head_, body_;
  size_t count_ = 0;
  std::promise<void> done_;
};

int run_load(const std::string& url, size_t count, double per_s, int hold_ms) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  Load load(url);
  load.run(count, per_s, hold_ms);
  std::sort(load.seconds.begin(), load.seconds.end());
  const auto at = [&](double part) {
    return load.seconds.empty()
               ? 0
               : 1e6 * load.seconds[static_cast<size_t>(part * static_cast<double>(load.seconds.size() - 1))];
  };
  std::printf("%zu whole, %zu failed; first byte: median %.0f us, p99 %.0f us, most %.0f us\n", load.whole, load.failed,
              at(0.5), at(0.99), at(1));
  return load.failed > 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words[0] == "worker") return perigee::run_worker(words.size() > 1 ? std::atoi(argv[2]) : 0);
  if (words.size() == 4 && words[0] == "load") {
    const double rate = std::atof(argv[3]);
    return perigee::run_load(words[1], static_cast<size_t>(rate * std::atof(argv[4])), rate, 0);
  }
  if (words.size() == 4 && words[0] == "open")
    return perigee::run_load(words[1], static_cast<size_t>(std::atoi(argv[3])), 0, std::atoi(argv[4]));
  std::fprintf(stderr, "router_bench worker [PORT] | load URL RATE SECONDS | open URL COUNT MS\n");
  return 2;
}

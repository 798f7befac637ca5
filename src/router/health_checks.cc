#include "router/health_checks.h"

#include <fmt/core.h>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/log.h"

namespace perigee {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

HealthChecks::HealthChecks(const HealthConfig& config, std::shared_ptr<WorkerTable> table)
    : config_(config), table_(std::move(table)) {
  loop_->post([this] { spawn(tick()); });
  loop_->start();
}

HealthChecks::~HealthChecks() {
  asio::post(loop_->context(), [loop = loop_] { loop->close(); });
  loop_->join();
}

// New workers are asked at the next tick, the others when they are due.
void HealthChecks::begin_due() {
  const double now_s = system_clock().now_s();
  std::map<uint64_t, Due> due;
  for (const WorkerView& worker : table_->list()) {
    Due& each = due[worker.id] = due_[worker.id];
    if (each.under_way || now_s < each.at_s) continue;
    loop_->post([this, worker] { spawn(check(worker)); });
    each.at_s = now_s + config_.interval_s;
    each.under_way = true;
  }
  due_.swap(due);  // without the workers that are gone
}

Task<> HealthChecks::tick() {
  constexpr auto kTick = std::chrono::milliseconds(20);
  asio::steady_timer timer(loop_->context());
  loop_->periodic.insert(&timer);
  while (!loop_->closing) {
    try {
      begin_due();
      timer.expires_after(kTick);
      co_await until_expired(timer);
    } catch (const std::exception&) {
      log_line(LogLevel::kError, "no memory to ask whether workers are ready");
      std::this_thread::sleep_for(kTick);
    }
  }
  loop_->periodic.erase(&timer);
}

namespace {

SocketAddress address_of(const tcp::endpoint& endpoint) {
  SocketAddress address;
  std::memcpy(&address.storage, endpoint.data(), endpoint.size());
  address.size = static_cast<socklen_t>(endpoint.size());
  return address;
}

}  // namespace

Task<SocketAddress> HealthChecks::resolve(const WorkerView& worker) {
  error_code ec;
  const auto number = asio::ip::make_address(worker.url.host, ec);
  const auto port = static_cast<uint16_t>(std::strtoul(worker.url.port.c_str(), nullptr, 10));
  if (!ec) co_return address_of({number, port});
  tcp::resolver resolver(loop_->context());
  tcp::resolver::results_type found;
  ec = co_await Wait([&](auto callback) {
    resolver.async_resolve(worker.url.host, worker.url.port,
                           [&found, callback = std::move(callback)](error_code error, const auto& results) mutable {
                             found = results;
                             callback(error);
                           });
  });
  if (!ec && !found.empty()) co_return address_of(found.begin()->endpoint());
  log_warning("worker ", worker.url.text, ": its name has no address: ", ec.message());
  co_return SocketAddress();
}

Task<ProbeResult> HealthChecks::ask(const WorkerView& worker, const SocketAddress& address) {
  constexpr size_t kMaxReplyBytes = 64u << 10;
  const bool other = due_[worker.id].other_path;
  const std::string head = fmt::format("GET {}{} HTTP/1.1\r\nHost: {}\r\n\r\n", worker.url.path,
                                       other ? "/health" : config_.path, worker.url.authority);
  const UpstreamTimes times{
      .connect_s = config_.timeout_s, .silence_s = config_.timeout_s, .write_s = config_.timeout_s};
  UpstreamCall call(loop_, idle_, times);
  const bool begun = co_await call.begin({worker.id, address}, head, "");
  if (!begun) co_return ProbeResult::kNoAnswer;
  const auto body = co_await call.read_all(kMaxReplyBytes);
  if (!body) co_return ProbeResult::kNoAnswer;
  const int status = call.head().status;
  if (status == 404 && !other && config_.path == "/readyz") {
    due_[worker.id].other_path = true;
    due_[worker.id].at_s = 0;
  }
  co_return status == 200 ? ProbeResult::kReady : ProbeResult::kNotReady;
}

Task<> HealthChecks::check(WorkerView worker) {
  ProbeResult result = ProbeResult::kNoAnswer;
  try {
    const SocketAddress address = co_await resolve(worker);
    if (address.size > 0) {
      table_->set_address(worker.id, address);
      result = co_await ask(worker, address);
    }
  } catch (const std::exception&) {
    log_line(LogLevel::kError, "no memory to ask whether a worker is ready");
  }
  table_->report(worker.id, result);
  const auto due = due_.find(worker.id);
  if (due != due_.end()) due->second.under_way = false;
}

}  // namespace perigee

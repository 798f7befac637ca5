#include <netinet/in.h>

#include <cstring>
#include <utility>

#include "router/upstream.h"

namespace perigee {

UpstreamCall::UpstreamCall(std::shared_ptr<HttpLoop>, IdleSockets&, const UpstreamTimes& times) : times_(times) {}

// A wait that is too long ends the call.
UpstreamCall::Change UpstreamCall::change() {
  const int64_t silence = ++*silences_;
  sim::World::now().after(times_.silence_s, [call = call_, silences = silences_, silence] {
    if (*silences != silence || !call->waiting) return;
    sim::World::now().count("the router: a worker was silent");
    call->fault = "it was silent";
    call->hang_up();
  });
  return {*call_};
}

Task<bool> UpstreamCall::begin(UpstreamTarget target, std::string_view head, std::string_view body) {
  sockaddr_in address{};
  std::memcpy(&address, &target.address.storage, sizeof address);
  call_ = std::make_shared<sim::HttpCall>(ntohs(address.sin_port));
  constexpr std::string_view kId = "X-Request-Id: ";
  const size_t id = head.find(kId);
  if (id != std::string_view::npos) call_->id = head.substr(id + kId.size(), head.find("\r\n", id) - id - kId.size());
  call_->body = body;
  call_->ask();
  while (!call_->has_head && call_->fault.empty()) co_await change();
  if (!call_->has_head) co_return false;
  head_.status = call_->status;
  head_.headers = {{"Content-Type", call_->streams ? "text/event-stream" : "application/json"}};
  co_return true;
}

Task<std::string> UpstreamCall::read() {
  while (call_->pieces.empty() && !call_->whole && call_->fault.empty()) co_await change();
  if (call_->pieces.empty()) co_return "";
  std::string piece = std::move(call_->pieces.front());
  call_->pieces.pop_front();
  co_return piece;
}

Task<std::optional<std::string>> UpstreamCall::read_all(size_t) {
  std::string body;
  for (;;) {
    const std::string piece = co_await read();
    if (piece.empty()) break;
    body += piece;
  }
  if (!whole()) co_return std::nullopt;
  co_return body;
}

void UpstreamCall::end_within(double s) {
  sim::World::now().after(s, [call = call_, cancelled = cancelled_] {
    if (call->whole || !call->fault.empty()) return;
    sim::World::now().count("the router: a prefill is stopped, a moment after its decode was done");
    *cancelled = true;
    call->hang_up();
  });
}

void UpstreamCall::cancel() {
  ++*silences_;
  *cancelled_ = true;
  if (call_ && !call_->whole) call_->hang_up();
}

}  // namespace perigee

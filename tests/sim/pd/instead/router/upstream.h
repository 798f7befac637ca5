// In place of src/router/upstream.h, for the simulation's own build of the router's flow: the same words, over calls
// that the simulation carries.
#pragma once

#include <coroutine>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "router/http_response.h"
#include "router/worker_table.h"
#include "server/http_task.h"
#include "sim/pd/http.h"

namespace perigee {

class IdleSockets {};

struct UpstreamTimes {
  double connect_s = 5;
  double silence_s = 1800;
  double write_s = 60;
};

struct UpstreamTarget {
  uint64_t worker = 0;
  SocketAddress address;
};

class UpstreamCall {
 public:
  UpstreamCall(std::shared_ptr<HttpLoop> loop, IdleSockets& idle, const UpstreamTimes& times);
  UpstreamCall(const UpstreamCall&) = delete;
  UpstreamCall& operator=(const UpstreamCall&) = delete;
  ~UpstreamCall() { cancel(); }

  Task<bool> begin(UpstreamTarget target, std::string_view head, std::string_view body);
  const ResponseHead& head() const { return head_; }
  Task<std::string> read();
  Task<std::optional<std::string>> read_all(size_t max_bytes);
  bool whole() const { return call_ && call_->whole && call_->pieces.empty(); }
  const std::string& fault() const { return call_->fault; }
  void end_within(double s);
  void cancel();
  bool cancelled() const { return *cancelled_; }

 private:
  struct Change {  // until something of the call arrives
    sim::HttpCall& call;
    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> handle) const { call.waiting = handle; }
    void await_resume() const noexcept {}
  };
  Change change();

  const UpstreamTimes times_;
  std::shared_ptr<sim::HttpCall> call_;
  std::shared_ptr<int64_t> silences_ = std::make_shared<int64_t>(0);
  ResponseHead head_;
  std::shared_ptr<bool> cancelled_ = std::make_shared<bool>(false);
};

}  // namespace perigee

// Test only: a server on a free port. Answers "METHOD PATH BODYSIZE" to everything but
//   /probe   "alive", wherever probes are answered
//   /stream  a stream that stays open until the client goes, kept in held()
//   /block   "unblocked", after the serving loop stood still until unblock()
//   /ask     as usual; right after the answer the serving loop stands still until unblock()
//   /later   what answer_later() says, kept in held() until then
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/eventually.h"
#include "server/api_error.h"
#include "server/http_server.h"
#include "server/test_client.h"

namespace perigee {

class HttpTest : public testing::Test {
 protected:
  void start(HttpConfig config) {
    config.port = 0;
    HttpCallbacks callbacks;
    callbacks.probe = [](const HttpRequest& request) -> std::optional<HttpReply> {
      if (request.path != "/probe") return std::nullopt;
      HttpReply reply;
      reply.body = "alive";
      return reply;
    };
    callbacks.check = [](const HttpRequest&) { return std::nullopt; };
    callbacks.handler = [this](const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
      handle(exchange, request);
    };
    callbacks.refusal = [this](int status, const std::string& message) {
      const std::lock_guard lock(mutex_);
      refused_.push_back(status);
      return error_reply(status, message);
    };
    auto made = HttpServer::start(config, std::move(callbacks));
    ASSERT_TRUE(made.ok()) << made.error().message;
    server_ = std::move(*made);
    server_->every(0.05, [this] { ++ticks_; });
  }
  void handle(const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
    const std::lock_guard lock(mutex_);
    handled_.push_back(request.method + " " + request.path);
    if (request.path == "/stream" || request.path == "/later") {
      exchange->on_disconnect([this] { gone_at_tick_ = ticks_.load(); });
      if (request.path == "/stream") exchange->begin_stream({});
      exchange->write("data: 1\n\n");
      held_ = exchange;
      return;
    }
    HttpReply reply;
    reply.body = request.method + " " + request.path + " " + std::to_string(request.body.size());
    if (request.path == "/block") {
      stand_still();
      reply.body = "unblocked";
    }
    exchange->respond(std::move(reply));
    if (request.path == "/ask") exchange->post([this] { stand_still(); });
  }
  void stand_still() {
    blocked_ = true;
    unblocked_.get_future().wait();
  }
  void answer_later(const std::string& body) {
    const auto exchange = held();
    HttpReply reply;
    reply.body = body;
    exchange->post([exchange, reply] { exchange->respond(reply); });
  }
  std::shared_ptr<Exchange> held() {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  std::vector<std::string> handled() {
    const std::lock_guard lock(mutex_);
    return handled_;
  }
  std::vector<int> refused() {
    const std::lock_guard lock(mutex_);
    return refused_;
  }
  void unblock() { unblocked_.set_value(); }
  bool gone() const { return gone_at_tick_ >= 0; }
  // Within 100 ms of the event loop's time: by the second tick after it the client is gone, on a busy machine as well,
  // where ticks come late.
  void expect_gone_soon() {
    const int ticks = ticks_;
    ASSERT_TRUE(eventually([&] { return gone(); }));
    EXPECT_LE(gone_at_tick_ - ticks, 2);
  }
  void TearDown() override {
    if (server_) server_->stop();
    held_ = nullptr;
  }

  std::unique_ptr<HttpServer> server_;
  std::atomic<int> ticks_{0};  // of the event loop, one each 50 ms
  std::atomic<int> gone_at_tick_{-1};
  std::atomic<bool> blocked_{false};
  std::promise<void> unblocked_;
  std::mutex mutex_;  // guards what follows
  std::shared_ptr<Exchange> held_;
  std::vector<std::string> handled_;
  std::vector<int> refused_;
};

}  // namespace perigee

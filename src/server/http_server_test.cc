#include "server/http_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "base/eventually.h"
#include "server/http_head.h"
#include "server/test_client.h"

namespace perigee {
namespace {

// Answers "METHOD PATH BODYSIZE"; /stream keeps a stream open until the client goes.
class HttpTest : public testing::Test {
 protected:
  void start(HttpConfig config) {
    config.port = 0;
    auto made = HttpServer::start(
        config, [](const HttpRequest&) { return std::nullopt; },
        [this](const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) { handle(exchange, request); },
        [this](int status) {
          const std::lock_guard lock(refused_mutex_);
          refused_.push_back(status);
        });
    ASSERT_TRUE(made.ok()) << made.error().message;
    server_ = std::move(*made);
    server_->every(0.05, [this] { ++ticks_; });
  }
  void handle(const std::shared_ptr<Exchange>& exchange, const HttpRequest& request) {
    if (request.path != "/stream") {
      HttpReply reply;
      reply.body = request.method + " " + request.path + " " + std::to_string(request.body.size());
      return exchange->respond(std::move(reply));
    }
    exchange->on_disconnect([this] { gone_at_tick_ = ticks_.load(); });
    exchange->begin_stream({});
    exchange->write("data: 1\n\n");
    held_ = exchange;
  }
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
  std::shared_ptr<Exchange> held_;
  std::atomic<int> ticks_{0};  // of the event loop, one each 50 ms
  std::atomic<int> gone_at_tick_{-1};
  std::mutex refused_mutex_;
  std::vector<int> refused_;
};

TEST_F(HttpTest, KeepsAliveAndPipelines) {
  start({});
  TestClient client(server_->port());
  EXPECT_EQ(client.get("/a?q=1").body, "GET /a 0");
  EXPECT_EQ(client.post("/b", "xyz").body, "POST /b 3");
  client.send(
      "GET /1 HTTP/1.1\r\nHost: x\r\n\r\nPOST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhiGET /3 "
      "HTTP/1.1\r\nHost: "
      "x\r\n\r\n");
  EXPECT_EQ(client.read_reply().body, "GET /1 0");
  EXPECT_EQ(client.read_reply().body, "POST /2 2");
  EXPECT_EQ(client.read_reply().body, "GET /3 0");
}

TEST_F(HttpTest, HeadClosesAndOldVersions) {
  start({});
  TestClient client(server_->port());
  client.send("HEAD /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  client.read_to_end();
  EXPECT_TRUE(client.text().ends_with("\r\n\r\n"));
  EXPECT_NE(client.text().find("Connection: close"), std::string::npos);
  TestClient old(server_->port());
  old.send("GET /a HTTP/1.0\r\n\r\n");
  old.read_to_end();
  EXPECT_TRUE(old.text().ends_with("GET /a 0"));
}

TEST_F(HttpTest, RefusesMalformedHeads) {
  start({});
  const std::pair<const char*, int> heads[] = {
      {"GET /a HTTP/1.1\r\n\r\n", 400},
      {"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400},
      {"GET /a HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400},
      {"GET /a HTTP/1.1\r\nHost : x\r\n\r\n", 400},
      {"GET /a HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400},
      {"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400},
      {"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400},
      {"POST /a HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", 415},
      {"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400},
      {"nonsense\r\n\r\n", 400},
      {"GET /a HTTP/0.9\r\nHost: x\r\n\r\n", 400}};
  for (const auto& [head, status] : heads) {
    TestClient client(server_->port());
    client.send(head);
    EXPECT_EQ(client.read_reply().status, status) << head;
  }
}

TEST_F(HttpTest, CapsWhileReading) {
  HttpConfig config;
  config.max_body_bytes = 1000;
  start(config);
  const auto status_of = [&](const std::string& bytes) {
    TestClient client(server_->port());
    client.send(bytes);
    return client.read_reply().status;
  };
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: x\r\nA: " + std::string(17000, 'a') + "\r\n\r\n"), 431);
  std::string many = "GET / HTTP/1.1\r\nHost: x\r\n";
  for (int i = 0; i < 100; ++i) many += str_cat("A", i, ": b\r\n");
  EXPECT_EQ(status_of(many + "\r\n"), 431);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: x\r\n" + std::string(80000, 'a')), 431);
  // Refused before a byte of the body: none is sent.
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n"), 413);
  EXPECT_EQ(status_of("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + std::string(1000, 'b')), 200);
  std::string chunks = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 300; ++i) chunks += "4\r\nabcd\r\n";
  EXPECT_EQ(status_of(chunks), 413);
}

TEST_F(HttpTest, ABodyOverTheLimitIsToldTheLimitAndLogged) {
  HttpConfig config;
  config.max_body_bytes = 1000;
  start(config);
  testing::internal::CaptureStderr();
  TestClient client(server_->port());
  client.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");
  const auto reply = client.read_reply();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(reply.body.find("limit of 1000 bytes\""), std::string::npos) << reply.body;
  EXPECT_NE(log.find("a request refused with 413 Payload Too Large\n"), std::string::npos) << log;
}

TEST_F(HttpTest, RefusalsOfItsOwnAreCounted) {
  HttpConfig config;
  config.max_body_bytes = 1000;
  config.body_timeout_s = 0.1;
  config.max_connections_per_key = 1;
  start(config);
  TestClient first(server_->port());
  const std::string head = "POST / HTTP/1.1\r\nHost: x\r\n",
                    key = head + "Authorization: k\r\nContent-Length: 0\r\n\r\n";
  first.send(key);
  EXPECT_EQ(first.read_reply().status, 200);
  const std::pair<std::string, int> refused[] = {{head + "Content-Length: 1001\r\n\r\n", 413},
                                                 {head + "A: " + std::string(17000, 'a') + "\r\n\r\n", 431},
                                                 {head + "Content-Length: 100\r\n\r\na", 408},
                                                 {head + "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", 415},
                                                 {"nonsense\r\n\r\n", 400},
                                                 {key, 429}};
  std::vector<int> statuses;
  for (const auto& [bytes, status] : refused) {
    TestClient client(server_->port());
    client.send(bytes);
    EXPECT_EQ(client.read_reply().status, status == 408 ? 0 : status);  // a slow client's connection just ends
    statuses.push_back(status);
  }
  server_->stop();
  EXPECT_EQ(refused_, statuses);
}

TEST_F(HttpTest, ConnectionsOverTheMostAreClosedAndThatIsLoggedOnce) {
  HttpConfig config;
  config.max_connections = 1;
  start(config);
  testing::internal::CaptureStderr();
  TestClient served(server_->port());
  served.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(served.read_reply().status, 200);
  for (int i = 0; i < 2; ++i) {
    TestClient over(server_->port());
    over.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_EQ(over.read_reply().status, 0);
  }
  const std::string log = testing::internal::GetCapturedStderr();
  const size_t first = log.find("connections are turned away: 1 are open");
  EXPECT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("turned away", first + 20), std::string::npos) << log;
}

TEST_F(HttpTest, ChunkFloodIsJustABody) {
  start({});
  TestClient client(server_->port());
  client.send("POST /f HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  std::string block;
  for (int i = 0; i < 1000; ++i) block += "1\r\na\r\n";
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(client.send(block));
  client.send("0\r\n\r\n");
  EXPECT_EQ(client.read_reply().body, "POST /f 300000");
}

TEST_F(HttpTest, SlowClientsMeetTheirDeadline) {
  const auto config_with = [](double HttpConfig::*deadline) {
    HttpConfig config;
    config.head_timeout_s = config.body_timeout_s = config.idle_timeout_s = 3600;
    config.*deadline = 0.2;
    return config;
  };
  const std::pair<double HttpConfig::*, const char*> cases[] = {
      {&HttpConfig::idle_timeout_s, ""},
      {&HttpConfig::head_timeout_s, "GET / HT"},
      {&HttpConfig::body_timeout_s, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\nab"}};
  for (const auto& [deadline, bytes] : cases) {
    start(config_with(deadline));
    TestClient client(server_->port());
    client.send(bytes);
    const auto ended = [&client, begun = *bytes != 0] {  // a trickle does not move the deadline
      if (begun) client.send("a");
      client.read_some(10);
      return client.ended();
    };
    EXPECT_TRUE(eventually(ended)) << bytes;
    server_->stop();
  }
}

TEST_F(HttpTest, DisconnectIsSeenWithin100ms) {
  start({});
  TestClient client(server_->port());
  client.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(client.read_until("data: 1"));
  client.close();
  expect_gone_soon();
}

TEST_F(HttpTest, DisconnectIsSeenBehindAPipelinedRequest) {
  start({});
  TestClient client(server_->port());
  client.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(client.read_until("data: 1"));
  client.send("GET /next HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(TestClient(server_->port()).get("/other").status, 200);  // the loop has seen /next by then
  client.close();
  expect_gone_soon();
}

TEST_F(HttpTest, SilentStreamsCommentAndSlowReadersAreDropped) {
  HttpConfig config;
  config.sse_comment_s = 0.1;
  config.max_unsent_bytes = 1 << 20;
  start(config);
  TestClient client(server_->port());
  client.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(client.read_until(": keep-alive\n\n"));
  const auto dropped = [&] {
    held_->post([exchange = held_] { exchange->write(std::string(100000, 'x')); });
    return gone();
  };
  EXPECT_TRUE(eventually(dropped));
}

TEST_F(HttpTest, StopEndsOpenStreams) {
  start({});
  TestClient client(server_->port());
  client.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(client.read_until("data: 1"));
  server_->stop();
  EXPECT_TRUE(gone());
  held_->post([] { FAIL() << "work after the end must be dropped"; });
  client.read_to_end();
  EXPECT_EQ(server_->open_connections(), 0u);
}

TEST(HttpServerStart, BadAddressesAreErrors) {
  HttpConfig config;
  config.host = "not an address";
  const auto check = [](const HttpRequest&) { return std::nullopt; };
  EXPECT_FALSE(HttpServer::start(config, check, {}, {}).ok());
  config.host = "127.0.0.1";
  config.port = 0;
  auto first = HttpServer::start(config, check, {}, {});
  ASSERT_TRUE(first.ok());
  config.port = (*first)->port();
  const auto second = HttpServer::start(config, check, {}, {});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message.find("--port"), std::string::npos);
}

}  // namespace
}  // namespace perigee

#include "server/http_server.h"

#include <fmt/core.h>

#include "server/http_test.h"

namespace perigee {
namespace {

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
  for (int i = 0; i < 100; ++i) many += fmt::format("A{}: b\r\n", i);
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
  const std::pair<std::string, int> refusals[] = {{head + "Content-Length: 1001\r\n\r\n", 413},
                                                  {head + "A: " + std::string(17000, 'a') + "\r\n\r\n", 431},
                                                  {head + "Content-Length: 100\r\n\r\na", 408},
                                                  {head + "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", 415},
                                                  {"nonsense\r\n\r\n", 400},
                                                  {key, 429}};
  std::vector<int> statuses;
  for (const auto& [bytes, status] : refusals) {
    TestClient client(server_->port());
    client.send(bytes);
    EXPECT_EQ(client.read_reply().status, status);
    statuses.push_back(status);
  }
  server_->stop();
  EXPECT_EQ(refused(), statuses);
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

TEST_F(HttpTest, ARequestWhoseClientLeftIsNoticedBeforeItsAnswer) {
  start({});
  TestClient client(server_->port());
  client.send("GET /later HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return held() != nullptr; }));
  client.close();
  EXPECT_TRUE(eventually([&] { return gone(); }));
}

TEST_F(HttpTest, HalfClosedClientsAreAnsweredInFull) {
  start({});
  TestClient whole(server_->port());
  whole.send("GET /a HTTP/1.1\r\nHost: x\r\n\r\nPOST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi");
  whole.shut_down_sending();
  EXPECT_EQ(whole.read_reply().body, "GET /a 0");
  EXPECT_EQ(whole.read_reply().body, "POST /b 2");
  whole.read_to_end();
  EXPECT_TRUE(whole.ended() && whole.text().empty());

  TestClient stream(server_->port());
  stream.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  stream.shut_down_sending();
  ASSERT_TRUE(stream.read_until(": keep-alive"));  // it was asked whether it is there
  const int ticks = ticks_;
  ASSERT_TRUE(eventually([&] { return ticks_ > ticks + 5; }));
  EXPECT_FALSE(gone());
  held()->post([exchange = held()] {
    exchange->write("data: 2\n\n");
    exchange->finish(false);
  });
  EXPECT_TRUE(stream.read_until("data: 2\n\n\r\n0\r\n\r\n"));
}

TEST_F(HttpTest, AHalfClosedClientThatWaitsLongIsAskedInAWayThatClientsSkip) {
  start({});
  TestClient client(server_->port());
  client.send("GET /later HTTP/1.1\r\nHost: x\r\n\r\n");
  client.shut_down_sending();
  ASSERT_TRUE(client.read_until("HTTP/1.1 100 Continue\r\n\r\n"));
  client.text().clear();
  answer_later("at last");
  EXPECT_EQ(client.read_reply().body, "at last");
}

TEST_F(HttpTest, RefusalsOfHeadHaveNoBody) {
  HttpConfig config;
  config.max_body_bytes = 10;
  start(config);
  TestClient client(server_->port());
  client.send("HEAD / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n");
  client.read_to_end();
  EXPECT_TRUE(client.text().starts_with("HTTP/1.1 413 ")) << client.text();
  EXPECT_TRUE(client.text().ends_with("\r\n\r\n")) << client.text();
}

TEST_F(HttpTest, KeysHaveNoShareOfAServerThatAsksForNone) {
  HttpConfig config;
  config.max_connections_per_key = 0;
  start(config);
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    EXPECT_EQ(clients.back()->get("/a", "Authorization: Bearer none\r\n").status, 200);
  }
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
    held()->post([exchange = held()] { exchange->write(std::string(100000, 'x')); });
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
  held()->post([] { FAIL() << "work after the end must be dropped"; });
  client.read_to_end();
  EXPECT_EQ(server_->open_connections(), 0u);
}

TEST(HttpServerStart, BadAddressesAreErrors) {
  HttpConfig config;
  config.host = "not an address";
  EXPECT_FALSE(HttpServer::start(config, {}).ok());
  config.host = "127.0.0.1";
  config.port = 0;
  auto first = HttpServer::start(config, {});
  ASSERT_TRUE(first.ok());
  config.port = (*first)->port();
  const auto second = HttpServer::start(config, {});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message.find("--port"), std::string::npos);
}

}  // namespace
}  // namespace perigee

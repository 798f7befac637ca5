// What many or slow clients may hold: places, memory, time. And that probes are answered meanwhile.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <deque>

#include "server/http_test.h"

namespace perigee {
namespace {

std::string post_head(size_t length) {
  return "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(length) + "\r\n\r\n";
}

TEST_F(HttpTest, ProbesAreAnsweredWhileEveryServingLoopStandsStill) {
  start({});
  TestClient kept(server_->port());
  EXPECT_EQ(kept.get("/a").status, 200);
  TestClient blocker(server_->port());
  blocker.send("GET /block HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return blocked_.load(); }));
  EXPECT_EQ(TestClient(server_->port()).get("/probe").body, "alive");
  EXPECT_EQ(kept.get("/probe").body, "alive") << "on a connection that was served before";
  unblock();
  EXPECT_EQ(blocker.read_reply().body, "unblocked");
}

// Whoever has an answer is back at the door: what its serving loop does next delays it no more.
TEST_F(HttpTest, AnAnsweredConnectionDoesNotWaitForItsServingLoop) {
  start({});
  TestClient kept(server_->port());
  EXPECT_EQ(kept.get("/ask").status, 200);
  ASSERT_TRUE(eventually([&] { return blocked_.load(); }));
  EXPECT_EQ(kept.get("/probe").body, "alive");
  unblock();
}

TEST_F(HttpTest, SilentConnectionsNeverLockOthersOut) {
  constexpr int kSilent = 3000;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 2 * kSilent + 500) GTEST_SKIP() << "at most " << files.rlim_max << " open files";
  HttpConfig config;
  config.max_connections = 1000;
  config.head_timeout_s = 3600;
  start(config);  // raises the limit of open files
  TestClient busy(server_->port());
  busy.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(busy.read_until("data: 1"));
  std::deque<TestClient> silent;
  for (int i = 0; i < kSilent; ++i) silent.emplace_back(server_->port());
  EXPECT_EQ(TestClient(server_->port()).get("/probe").body, "alive");
  EXPECT_EQ(TestClient(server_->port()).get("/a").body, "GET /a 0");
  EXPECT_LE(server_->open_connections(), config.max_connections + config.reserved_connections + 100);
  EXPECT_FALSE(gone()) << "who is served stays";
  EXPECT_EQ(silent.back().get("/a").body, "GET /a 0") << "the last to come stays";
  silent.front().read_to_end();
  EXPECT_TRUE(silent.front().ended()) << "the longest silent made room";
}

TEST_F(HttpTest, PlacesAreReservedForProbesWhileAllOthersAreServed) {
  HttpConfig config;
  config.max_connections = 2;
  config.reserved_connections = 2;
  start(config);
  testing::internal::CaptureStderr();
  TestClient first(server_->port()), second(server_->port());
  for (TestClient* client : {&first, &second}) {
    client->send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
    ASSERT_TRUE(client->read_until("data: 1"));
  }
  EXPECT_EQ(TestClient(server_->port()).get("/probe").body, "alive");
  const auto refused = TestClient(server_->port()).get("/a");
  EXPECT_EQ(refused.status, 503);
  EXPECT_NE(refused.head.find("Retry-After: "), std::string::npos);
  EXPECT_NE(refused.body.find("2 connections"), std::string::npos) << refused.body;
  std::deque<TestClient> silent;
  for (int i = 0; i < 10; ++i) silent.emplace_back(server_->port());
  EXPECT_EQ(TestClient(server_->port()).get("/probe").body, "alive");
  const std::string log = testing::internal::GetCapturedStderr();
  const size_t said = log.find("connections are closed: ");
  EXPECT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("connections are closed: ", said + 1), std::string::npos) << "once in ten seconds: " << log;
}

TEST_F(HttpTest, BodiesShareABudgetAndAreToldToComeBack) {
  HttpConfig config;
  config.max_bodies_bytes = 8u << 20;
  start(config);
  constexpr size_t kBody = 4u << 20;
  const std::string half(kBody / 2, 'b');
  std::deque<TestClient> announced;  // what is announced takes nothing
  for (int i = 0; i < 20; ++i) {
    announced.emplace_back(server_->port());
    announced.back().send(post_head(kBody));
  }
  TestClient first(server_->port()), second(server_->port()), third(server_->port());
  for (TestClient* client : {&first, &second, &third}) client->send(post_head(kBody) + half);
  int refused_count = 0;
  for (TestClient* client : {&first, &second, &third}) {
    client->send(half);
    const auto reply = client->read_reply();
    refused_count += reply.status == 503;
    EXPECT_TRUE(reply.status == 200 || reply.status == 503) << reply.status;
    if (reply.status == 503) {
      EXPECT_NE(reply.head.find("Retry-After: "), std::string::npos);
    }
  }
  EXPECT_GE(refused_count, 1);
  EXPECT_EQ(TestClient(server_->port()).post("/a", std::string(kBody, 'c')).body, "POST /a 4194304") << "all is back";
}

TEST_F(HttpTest, ABodyThatComesSlowlyOrStopsIsTold408) {
  HttpConfig config;
  config.body_timeout_s = 0.2;
  config.body_s_per_mb = 0.2;
  start(config);
  TestClient stops(server_->port());  // what came fast earns no long silence
  stops.send(post_head(20u << 20) + std::string(10u << 20, 'b'));
  EXPECT_EQ(stops.read_reply().status, 408);
  TestClient trickles(server_->port());
  trickles.send(post_head(20u << 20));
  ASSERT_TRUE(eventually([&] {
    trickles.send("b");
    return trickles.read_some(10);
  }));
  EXPECT_EQ(trickles.read_reply().status, 408);
}

TEST_F(HttpTest, SlowClientsMeetTheirDeadline) {
  const auto config_with = [](double HttpConfig::*deadline) {
    HttpConfig config;
    config.head_timeout_s = config.body_timeout_s = config.idle_timeout_s = 3600;
    config.*deadline = 0.2;
    return config;
  };
  constexpr const char* kWhole = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
  struct Case {
    double HttpConfig::*deadline;
    const char* first;  // sent before, with its answer
    const char* begun;
  };
  const Case cases[] = {
      {&HttpConfig::head_timeout_s, "", ""},
      {&HttpConfig::head_timeout_s, "", "GET / HT"},
      {&HttpConfig::idle_timeout_s, kWhole, ""},
      {&HttpConfig::head_timeout_s, kWhole, "GET / HT"},
      {&HttpConfig::body_timeout_s, "", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\na"}};
  for (const auto& [deadline, first, begun] : cases) {
    start(config_with(deadline));
    TestClient client(server_->port());
    client.send(first);
    if (*first != 0) {
      EXPECT_EQ(client.read_reply().status, 200);
    }
    client.send(begun);
    const auto ended = [&client, trickles = *begun != 0] {  // a trickle does not move the deadline
      if (trickles) client.send("a");
      client.read_some(10);
      return client.ended();
    };
    EXPECT_TRUE(eventually(ended)) << first << begun;
    server_->stop();
  }
}

// Its every byte renews the time, so the whole may take many times as long.
TEST_F(HttpTest, ASteadySlowReaderIsNotCut) {
  HttpConfig config;
  config.write_timeout_s = 1;
  config.max_unsent_bytes = 64u << 20;
  start(config);
  TestClient client(server_->port());
  client.receive_little();
  client.send("GET /later HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return held() != nullptr; }));
  constexpr size_t kBytes = 12u << 20;
  answer_later(std::string(kBytes, 'z'));
  const auto begin = std::chrono::steady_clock::now();
  while (client.text().size() < kBytes && client.read_some(10000))
    if (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(2500))
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_GE(client.text().size(), kBytes);
}

TEST_F(HttpTest, AReaderThatTakesNothingIsCut) {
  HttpConfig config;
  config.write_timeout_s = 0.2;
  start(config);
  TestClient client(server_->port());
  client.receive_little();
  client.send("GET /later HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return held() != nullptr; }));
  answer_later(std::string(32u << 20, 'z'));
  EXPECT_TRUE(eventually([&] { return server_->open_connections() == 0; }));
}

}  // namespace
}  // namespace perigee

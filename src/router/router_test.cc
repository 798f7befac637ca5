// The router between a client and fake workers, over real sockets.
#include "router/router.h"

#include <future>

#include "base/clock.h"
#include "router/fake_worker.h"

namespace perigee {
namespace {

constexpr const char* kChat = "/v1/chat/completions";
const std::string kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

void reply_name(const std::shared_ptr<Exchange>& exchange, const std::string& name) {
  exchange->respond(HttpReply{.body = "\"" + name + "\""});
}

FakeWorker::Handler named(const std::string& name) {
  return [name](const auto& exchange, const auto&) { reply_name(exchange, name); };
}

FakeWorker::Handler refusing(int status) {
  return [status](const auto& exchange, const auto&) { exchange->respond(error_reply(status, "full")); };
}

class RouterTest : public testing::Test {
 protected:
  void start(std::vector<std::string> urls) {
    config_.workers = std::move(urls);
    start();
  }
  void start() {
    config_.http.port = 0;
    config_.health.interval_s = 0.05;
    if (config_.table.plain.kind == PolicyKind::kCacheAware) config_.table.plain.kind = PolicyKind::kRoundRobin;
    auto made = Router::start(config_);
    ASSERT_TRUE(made.ok()) << made.error().message;
    router_ = std::move(*made);
  }
  bool wait_ready() {
    return eventually([&] { return router_->ready(); });
  }
  // Until every worker has been asked.
  bool wait_all(size_t count) {
    return eventually([&] {
      return TestClient(router_->port()).get("/workers").json().find("workers") != nullptr && num_ready() == count;
    });
  }
  size_t num_ready() {
    size_t ready = 0;
    const Json json = TestClient(router_->port()).get("/workers").json();
    for (const Json& worker : json.find("workers")->as_array()) ready += worker.find("state")->as_string() == "ready";
    return ready;
  }
  TestClient::Reply post(const std::string& body = "{}", const std::string& headers = "") {
    return TestClient(router_->port()).post(kChat, body, headers);
  }
  std::string metrics() { return TestClient(router_->port()).get("/metrics").body; }

  RouterConfig config_;
  std::unique_ptr<Router> router_;
};

TEST_F(RouterTest, GoesRoundItsWorkersWithOneRequestId) {
  FakeWorker a(named("a")), b(named("b"));
  start({a.url(), b.url()});
  ASSERT_TRUE(wait_all(2));
  std::string seen;
  for (int i = 0; i < 4; ++i) seen += post().body[1];
  EXPECT_TRUE(seen == "abab" || seen == "baba") << seen;
  const auto reply = post("{\"x\":1}", "X-Request-Id: mine-1\r\nAuthorization: Bearer key\r\n");
  EXPECT_NE(reply.head.find("X-Request-Id: mine-1\r\n"), std::string::npos);
  auto requests = a.requests();
  if (requests.size() < 3) requests = b.requests();
  EXPECT_EQ(requests.back().body, "{\"x\":1}");
  EXPECT_EQ(*requests.back().header("X-Request-Id"), "mine-1");
  EXPECT_EQ(*requests.back().header("Authorization"), "Bearer key");
  EXPECT_EQ(requests[0].header("X-Request-Id")->size(), 32u);
}

TEST_F(RouterTest, AByteThatArrivesLeavesAtOnceAndAClientThatLeavesIsHeardOf) {
  std::mutex mutex;
  std::shared_ptr<Exchange> held;
  std::atomic<bool> gone{false};
  FakeWorker worker([&](const auto& exchange, const auto&) {
    exchange->on_disconnect([&] { gone = true; });
    exchange->begin_stream({});
    exchange->write("data: {\"a");
    const std::lock_guard lock(mutex);
    held = exchange;
  });
  start({worker.url()});
  ASSERT_TRUE(wait_ready());
  {
    TestClient client(router_->port());
    client.send_post(kChat, "{}");
    ASSERT_TRUE(client.read_until("data: {\"a"));
    held->post([&] { held->write("\":1}\n\n"); });
    ASSERT_TRUE(client.read_until("\":1}\n\n"));
    EXPECT_FALSE(gone);
  }
  EXPECT_TRUE(eventually([&] { return gone.load(); }));
  EXPECT_TRUE(eventually([&] {
    return metrics().find("perigee_router_client_disconnects_total 1\n") != std::string::npos &&
           metrics().find("worker_open_requests{worker=\"" + worker.url() + "\",role=\"plain\"} 0\n") !=
               std::string::npos;
  }));
}

TEST_F(RouterTest, AFullWorkerIsPassedOverAndTheLastRefusalIsPassedOn) {
  FakeWorker full(refusing(429)), down(refusing(503)), free(named("free"));
  start({full.url(), down.url(), free.url()});
  ASSERT_TRUE(wait_all(3));
  for (int i = 0; i < 6; ++i) EXPECT_EQ(post().body, "\"free\"");
  free.ready = false;
  ASSERT_TRUE(wait_all(2));
  const auto reply = post();
  EXPECT_TRUE(reply.status == 429 || reply.status == 503);
  EXPECT_NE(reply.head.find("Retry-After: "), std::string::npos);
  EXPECT_NE(reply.body.find("full"), std::string::npos);
}

TEST_F(RouterTest, RequestsThatRunOutOfTheirOwnTimeTakeNoWorkerOutOfUse) {
  FakeWorker slow(refusing(504));
  start({slow.url()});
  ASSERT_TRUE(wait_all(1));
  for (int i = 0; i < 12; ++i) EXPECT_EQ(post().status, 504);
  EXPECT_EQ(slow.requests().size(), 12u);
}

TEST_F(RouterTest, WithoutAWorkerItSaysSo) {
  start(std::vector<std::string>{});
  const auto reply = post();
  EXPECT_EQ(reply.status, 503);
  EXPECT_NE(reply.head.find("Retry-After: "), std::string::npos);
  EXPECT_EQ(TestClient(router_->port()).get("/readyz").status, 503);
  EXPECT_EQ(TestClient(router_->port()).get("/livez").status, 200);
}

TEST_F(RouterTest, AnEarlyFailureIsTriedByAnotherWorker) {
  FakeWorker good(named("good"));
  const std::vector<std::string> lies = {"",
                                         "HTTP/1.1 2",
                                         "nonsense\r\n\r\n",
                                         std::string(200000, 'x'),
                                         "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
                                         kStreamHead,
                                         "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"};
  for (const bool reset : {false, true})
    for (const std::string& lie : lies) {
      LyingWorker liar(lie, reset);
      start({liar.url(), good.url()});
      ASSERT_TRUE(wait_all(2));
      for (int i = 0; i < 2; ++i) EXPECT_EQ(post().body, "\"good\"") << lie.substr(0, 100);
      EXPECT_EQ(liar.count(), 2);  // each time it is its turn
      EXPECT_NE(metrics().find("perigee_router_retries_total 2\n"), std::string::npos);
      router_ = nullptr;
    }
}

TEST_F(RouterTest, AWorkerThatTakesNoMoreOfARequestIsLeftInTime) {
  FakeWorker good(named("good"));
  LyingWorker liar("", false, true);
  config_.forward.times.write_s = 0.2;
  start({liar.url(), good.url()});
  ASSERT_TRUE(wait_all(2));
  const std::string long_body = "{\"prompt\":\"" + std::string(16u << 20, 'x') + "\"}";
  const double begin_s = system_clock().now_s();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(post(long_body).body, "\"good\"");
  EXPECT_LT(system_clock().now_s() - begin_s, 15) << "sooner than the system gives the connection up";
  EXPECT_GE(liar.count(), 1);
}

TEST_F(RouterTest, AStreamThatBreaksOffEndsWithAnError) {
  const std::string to_end = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n";
  const std::string whole_event = kStreamHead + "9\r\ndata: 1\n\n\r\n", half = kStreamHead + "5\r\ndata:\r\n";
  for (const bool reset : {false, true})
    for (const std::string& lie : {whole_event, half, whole_event + "zz\r\n", to_end}) {
      LyingWorker liar(lie, reset);
      start({liar.url()});
      ASSERT_TRUE(wait_ready());
      const auto reply = post();
      EXPECT_EQ(reply.status, 200);
      EXPECT_EQ(liar.count(), 1);
      const size_t error = reply.body.find("\n\ndata: {\"error\":");
      EXPECT_NE(error, std::string::npos) << reply.body;
      EXPECT_TRUE(reply.body.ends_with("\n\n"));
      EXPECT_NE(metrics().find("perigee_router_cut_streams_total 1\n"), std::string::npos);
      router_ = nullptr;
    }
  LyingWorker honest(to_end + "data: [DONE]\n\n", false);
  start({honest.url()});
  ASSERT_TRUE(wait_ready());
  EXPECT_EQ(post().body, "data: 1\n\ndata: [DONE]\n\n");
}

TEST_F(RouterTest, AWholeReplyThatBreaksOffIs502) {
  LyingWorker liar("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{\"choices\"", false);
  start({liar.url()});
  ASSERT_TRUE(wait_ready());
  const auto reply = post();
  EXPECT_EQ(reply.status, 502);
  EXPECT_NE(reply.json().find("error"), nullptr);
  EXPECT_EQ(liar.count(), 1);
}

TEST_F(RouterTest, AClosedIdleConnectionIsReplacedUnheard) {
  auto worker = std::make_unique<FakeWorker>(
      [](const auto& exchange, const auto&) { exchange->respond(HttpReply{.body = "1", .close = false}); });
  start({worker->url()});
  ASSERT_TRUE(wait_ready());
  TestClient client(router_->port());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(client.post(kChat, "{}").status, 200);
  EXPECT_NE(metrics().find("perigee_router_retries_total 0\n"), std::string::npos);
  const std::string failures = "worker_failures_total{worker=\"" + worker->url() + "\",role=\"plain\"} 0\n";
  EXPECT_NE(metrics().find(failures), std::string::npos);
}

TEST_F(RouterTest, WorkersComeAndGoWhileItRuns) {
  FakeWorker a(named("a")), b(named("b"));
  start({a.url()});
  ASSERT_TRUE(wait_ready());
  TestClient client(router_->port());
  EXPECT_EQ(client.post("/workers", "{\"url\":\"" + b.url() + "\"}").status, 200);
  ASSERT_TRUE(wait_all(2));
  EXPECT_EQ(client.post("/workers/remove", "{\"url\":\"" + a.url() + "\"}").status, 200);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(post().body, "\"b\"");
  EXPECT_EQ(client.post("/workers/remove", "{\"url\":\"" + a.url() + "\"}").status, 404);
  EXPECT_EQ(client.post("/workers", "{\"url\":\"https://x\"}").status, 400);
  EXPECT_EQ(client.post("/workers", "{\"url\":\"http://x\",\"role\":\"decode\"}").status, 400);
  EXPECT_EQ(client.post("/workers/drain", "{\"url\":\"" + b.url() + "\"}").status, 200);
  EXPECT_EQ(post().status, 503);
}

TEST_F(RouterTest, KeysGuardRequestsAndWorkers) {
  FakeWorker a(named("a"));
  config_.api_keys = {"client"};
  config_.admin_key = "admin";
  start({a.url()});
  ASSERT_TRUE(wait_ready());
  EXPECT_EQ(post().status, 401);
  EXPECT_EQ(post("{}", "Authorization: Bearer client\r\n").status, 200);
  EXPECT_EQ(TestClient(router_->port()).get("/workers", "Authorization: Bearer client\r\n").status, 401);
  TestClient client(router_->port());
  EXPECT_EQ(client.get("/workers", "Authorization: Bearer admin\r\n").status, 200);
  EXPECT_EQ(client.get("/metrics").status, 401);
  EXPECT_EQ(TestClient(router_->port()).get("/nothing", "Authorization: Bearer client\r\n").status, 404);
  EXPECT_EQ(TestClient(router_->port()).get("/v1/../x", "Authorization: Bearer client\r\n").status, 404);
}

TEST_F(RouterTest, WorkersAreShutWhereOthersReachItAndNoKeyIsSet) {
  config_.http.host = "0.0.0.0";
  start(std::vector<std::string>{});
  EXPECT_EQ(TestClient(router_->port()).get("/workers").status, 401);
}

TEST_F(RouterTest, DrainsBeforeItEnds) {
  std::mutex mutex;
  std::shared_ptr<Exchange> held;
  FakeWorker worker([&](const auto& exchange, const auto&) {
    const std::lock_guard lock(mutex);
    held = exchange;
  });
  start({worker.url()});
  ASSERT_TRUE(wait_ready());
  TestClient client(router_->port()), late(router_->port());
  client.send_post(kChat, "{}");
  ASSERT_TRUE(eventually([&] { return !worker.requests().empty(); }));
  std::thread drain([&] { router_->drain_and_stop(); });
  EXPECT_TRUE(eventually([&] { return !router_->ready(); }));
  EXPECT_EQ(late.post(kChat, "{}").status, 503);
  held->post([&] { held->respond(HttpReply{.body = "done"}); });
  EXPECT_EQ(client.read_reply().body, "done");
  drain.join();
}

constexpr const char* kTransfer = R"("kv_transfer_params":{"remote_block_ids":[[3]]})";
const std::string kAnnouncement = str_cat("data: {", kTransfer, "}\n\n");

// A prefill worker that has begun to compute the prompt.
void announce(const std::shared_ptr<Exchange>& exchange) {
  exchange->begin_stream({});
  exchange->write(kAnnouncement);
}

// A worker whose request fails before its first output.
void fail_stream(const std::shared_ptr<Exchange>& exchange, const std::string& why) {
  exchange->write("data: " + dump_json(error_json(500, why)) + "\n\n");
  exchange->finish(true);
}

class SplitRouterTest : public RouterTest {
 protected:
  void start_split(const std::vector<std::string>& prefill, const std::vector<std::string>& decode) {
    config_.forward.split = true;
    config_.prefill = prefill;
    config_.decode = decode;
    config_.table.prefill.kind = config_.table.decode.kind = PolicyKind::kRoundRobin;
    start();
    ASSERT_TRUE(wait_all(prefill.size() + decode.size()));
  }
  static FakeWorker::Handler transferring() {
    return [](const auto& exchange, const auto&) {
      exchange->respond(HttpReply{.body = str_cat(R"({"id":"p",)", kTransfer, "}")});
    };
  }
};

TEST_F(SplitRouterTest, PrefillThenDecodeWithOneId) {
  FakeWorker prefill(transferring()), decode([](const auto&exchange, const auto&) {
    exchange->begin_stream({});
    exchange->write("data: [DONE]\n\n");
    exchange->finish(false);
  });
  start_split({prefill.url()}, {decode.url()});
  EXPECT_EQ(post(R"({"messages":[],"max_tokens":9,"stream":true})").body, "data: [DONE]\n\n");
  const HttpRequest first = prefill.requests().at(0), second = decode.requests().at(0);
  EXPECT_EQ(first.body, *prefill_body(R"({"messages":[],"max_tokens":9})"));
  EXPECT_EQ(second.body, str_cat(R"({"messages":[],"max_tokens":9,"stream":true,)", kTransfer, "}"));
  EXPECT_EQ(*first.header("X-Request-Id"), *second.header("X-Request-Id"));
  TestClient(router_->port()).get("/v1/models");
  EXPECT_EQ(decode.requests().size(), 2u);
  EXPECT_EQ(post("[]").status, 400);
}

TEST_F(SplitRouterTest, ADecodeWorkerIsAskedWhileThePromptIsComputed) {
  std::promise<std::shared_ptr<Exchange>> announced;
  FakeWorker prefill([&](const auto& exchange, const auto&) {
    announce(exchange);
    announced.set_value(exchange);
  });
  // The prompt is computed once this one has been asked; its end is sent before the reply.
  FakeWorker decode([&](const auto& exchange, const auto&) {
    const auto held = announced.get_future().get();
    std::promise<void> computed;
    held->post([&] {
      held->write("data: {}\n\ndata: [DONE]\n\n");
      held->finish(false);
      computed.set_value();
    });
    computed.get_future().wait();
    reply_name(exchange, "decode");
  });
  start_split({prefill.url()}, {decode.url()});
  ASSERT_EQ(post().body, "\"decode\"");
  EXPECT_NE(decode.requests().at(0).body.find(kTransfer), std::string::npos);
  EXPECT_TRUE(
      eventually([&] { return metrics().find("perigee_router_prefill_seconds_count 1") != std::string::npos; }));
}

// The decode worker can only fail then. The client has no byte yet, so another prefill worker is asked.
TEST_F(SplitRouterTest, APrefillWorkerThatFailsAfterItsAnnouncementIsReplaced) {
  for (const bool streams : {false, true}) {
    std::atomic<int> num_asked{0};
    FakeWorker prefill([](const auto& exchange, const auto&) {
      announce(exchange);
      fail_stream(exchange, "lost");
    });
    FakeWorker other(transferring());
    FakeWorker decode([&](const auto& exchange, const auto&) {
      if (num_asked++ > 0) return reply_name(exchange, "good");
      if (!streams) return exchange->respond(error_reply(500, "did not arrive"));
      exchange->begin_stream({});
      fail_stream(exchange, "did not arrive");
    });
    start_split({prefill.url(), other.url()}, {decode.url()});
    EXPECT_EQ(post().body, "\"good\"") << streams;
    EXPECT_EQ(prefill.requests().size(), 1u);
    EXPECT_EQ(other.requests().size(), 1u);
    router_.reset();
  }
}

// A decode worker that waits long for its pages says so; the client need not hear of it.
TEST_F(SplitRouterTest, CommentsAreNoFirstByteWhileThePromptIsComputed) {
  std::promise<std::shared_ptr<Exchange>> computes, waits;
  std::atomic<int> num_asked{0};
  FakeWorker prefill([&](const auto& exchange, const auto&) {
    exchange->begin_stream({});
    exchange->write(": here\n\n" + kAnnouncement);
    computes.set_value(exchange);
  });
  FakeWorker other(transferring());
  FakeWorker decode([&](const auto& exchange, const auto&) {
    if (num_asked++ > 0) return reply_name(exchange, "good");
    exchange->begin_stream({});
    exchange->write(": here\n\n");
    waits.set_value(exchange);
  });
  start_split({prefill.url(), other.url()}, {decode.url()});
  std::thread asks([&] { EXPECT_EQ(post().body, "\"good\""); });
  const auto computing = computes.get_future().get(), waiting = waits.get_future().get();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // as a rule the comment arrives by itself
  computing->post([computing] { fail_stream(computing, "lost"); });
  waiting->post([waiting] {
    waiting->write(": still here\n\n");
    fail_stream(waiting, "did not arrive");
  });
  asks.join();
  EXPECT_EQ(other.requests().size(), 1u);
}

// A healthy prefill worker is blamed for nothing, and does not go on for nobody.
TEST_F(SplitRouterTest, AFaultOfTheDecodeWorkerIsTheAnswerAndStopsThePrefill) {
  for (const int status : {500, 400, 200}) {
    std::atomic<int> num_prefills{0}, num_left{0};
    const auto computes = [&](const auto& exchange, const auto&) {
      ++num_prefills;
      exchange->on_disconnect([&num_left] { ++num_left; });
      announce(exchange);
    };
    FakeWorker prefill(computes), other(computes);
    FakeWorker decode([&](const auto& exchange, const auto&) {
      if (status != 200) return exchange->respond(error_reply(status, "its own fault"));
      exchange->begin_stream({});
      fail_stream(exchange, "its own fault");
    });
    start_split({prefill.url(), other.url()}, {decode.url()});
    const auto reply = post();
    EXPECT_EQ(reply.status, status);
    EXPECT_NE(reply.body.find("its own fault"), std::string::npos);
    EXPECT_EQ(num_prefills, 1);
    EXPECT_EQ(decode.requests().size(), 1u);
    EXPECT_TRUE(eventually([&] { return num_left == 1; }));
    router_.reset();
  }
}

TEST_F(SplitRouterTest, APrefillThatNobodyCanFetchIsStopped) {
  for (const bool names_it : {false, true}) {
    std::atomic<int> num_left{0};
    std::promise<std::shared_ptr<Exchange>> asked;
    FakeWorker prefill([&](const auto& exchange, const auto&) {
      exchange->on_disconnect([&num_left] { ++num_left; });
      exchange->begin_stream({});
      asked.set_value(exchange);
    });
    FakeWorker decode(named("decode"));
    start_split({prefill.url()}, {decode.url()});
    std::thread asks([&] { EXPECT_EQ(post().status, names_it ? 503 : 502); });
    const auto held = asked.get_future().get();
    decode.ready = !names_it;
    EXPECT_TRUE(wait_all(names_it ? 1 : 2));
    held->post([held, names_it] { held->write(names_it ? kAnnouncement : "data: {}\n\n"); });
    asks.join();
    EXPECT_TRUE(eventually([&] { return num_left == 1; }));
    EXPECT_TRUE(decode.requests().empty());
    router_.reset();
  }
}

// Else it counts as busy for as long as it may be silent.
TEST_F(SplitRouterTest, APrefillThatIsSilentAfterItsDecodeIsDoneIsStopped) {
  std::atomic<int> num_left{0};
  FakeWorker prefill([&](const auto& exchange, const auto&) {
    exchange->on_disconnect([&num_left] { ++num_left; });
    announce(exchange);
  });
  FakeWorker decode(named("decode"));
  start_split({prefill.url()}, {decode.url()});
  EXPECT_EQ(post().body, "\"decode\"");
  EXPECT_TRUE(eventually([&] { return num_left == 1; }));
}

// The end of its stream, which the router may read later, does not matter: neither where the decode worker has answered
// nor where another is to be asked.
TEST_F(SplitRouterTest, APrefillOnTrialLetsTheNextRequestThroughOnceItsDecodeIsDone) {
  for (const bool refuses : {false, true}) {
    std::atomic<int> num_prefills{0}, num_decodes{0};
    FakeWorker prefill([&](const auto& exchange, const auto&) {
      if (num_prefills++ == 0) return exchange->respond(error_reply(502, "opens the breaker"));
      announce(exchange);
    });
    const auto decodes = [&](const auto& exchange, const auto&) {
      if (num_decodes++ == 0 && refuses) return exchange->respond(error_reply(503, "full"));
      reply_name(exchange, "decode");
    };
    FakeWorker decode(decodes), other(decodes);
    config_.table.breaker = {.failures = 1, .successes = 3, .open_s = 0};
    start_split({prefill.url()}, {decode.url(), other.url()});
    EXPECT_EQ(post().status, 502);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(post().body, "\"decode\"") << refuses << i;
    EXPECT_EQ(TestClient(router_->port()).get("/workers").body.find("half_open"), std::string::npos);
    router_.reset();
  }
}

TEST_F(SplitRouterTest, ARefusalOfThePrefillWorkerIsTheAnswer) {
  FakeWorker prefill([](const auto& exchange, const auto&) { exchange->respond(error_reply(400, "too long")); });
  FakeWorker decode(named("decode"));
  start_split({prefill.url()}, {decode.url()});
  const auto reply = post();
  EXPECT_EQ(reply.status, 400);
  EXPECT_NE(reply.body.find("too long"), std::string::npos);
  EXPECT_TRUE(decode.requests().empty());
}

TEST_F(SplitRouterTest, APrefillWorkerWithoutATransferIs502) {
  FakeWorker prefill(named("no transfer")), decode(named("decode"));
  start_split({prefill.url()}, {decode.url()});
  EXPECT_EQ(post().status, 502);
  EXPECT_TRUE(decode.requests().empty());
}

TEST_F(SplitRouterTest, AnOddFirstEventOfAPrefillWorkerIsNamed) {
  const std::pair<std::string, const char*> odd[] = {{"event: x\n\n", "not data"},
                                                     {std::string((1 << 20) + 1, 'x'), "over 1 MiB"},
                                                     {"data: {", "before its first event"}};
  for (const auto& [bytes, why] : odd) {
    FakeWorker prefill([&event = bytes](const auto& exchange, const auto&) {
      exchange->begin_stream({});
      exchange->write(std::string(event));
      exchange->finish(false);
    });
    FakeWorker decode(named("decode"));
    start_split({prefill.url()}, {decode.url()});
    const auto reply = post();
    EXPECT_EQ(reply.status, 502);
    EXPECT_NE(reply.body.find(why), std::string::npos) << reply.body;
    EXPECT_TRUE(decode.requests().empty());
    router_.reset();
  }
}

TEST_F(SplitRouterTest, AFailedDecodeWorkerIsReplacedFromThePrefillOn) {
  FakeWorker prefill(transferring()), decode(named("decode"));
  LyingWorker liar("", true);
  start_split({prefill.url()}, {liar.url(), decode.url()});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(post().body, "\"decode\"");
  EXPECT_EQ(liar.count(), 2);  // each time it is its turn
  EXPECT_EQ(prefill.requests().size(), 4u);
}

}  // namespace
}  // namespace perigee

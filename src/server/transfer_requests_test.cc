// Requests and replies between prefill and decode servers, over a scripted backend.
#include <thread>

#include "base/eventually.h"
#include "server/api_fixture.h"
#include "server/remote_lease.h"
#include "server/test_stream.h"
#include "server/transfer_params.h"

namespace perigee {
namespace {

constexpr const char* kCompletions = "/v1/completions";
constexpr const char* kChat = "/v1/chat/completions";
constexpr const char* kLease = R"("kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false})";

class TransferRequests : public ApiTest {
 protected:
  std::string refused_because_of(const std::string& path, const std::string& members) {
    const auto reply = post(path, "{" + members + "}");
    EXPECT_EQ(reply.status, 400) << reply.body;
    return reply.json().find("error")->find("param")->as_string();
  }
};

TEST_F(TransferRequests, WhatOneServerRepliesTheOtherOnesEngineIsTold) {
  start(ids_of("ab"));
  for (const auto& [path, prompt] : {std::pair(kCompletions, R"("prompt":"x")"),
                                     std::pair(kChat, R"("messages":[{"role":"user","content":"x"}])")}) {
    const Json plain = post(path, str_cat("{", prompt, "}")).json();
    EXPECT_EQ(plain.find("kv_transfer_params"), nullptr);
    const Json prefilled = post(path, str_cat("{", prompt, R"(,"max_tokens":1,)", kLease, "}")).json();
    ASSERT_NE(prefilled.find("kv_transfer_params"), nullptr) << path;
    EXPECT_EQ(backend_->submitted.back().lease, LeaseWish::kAtEnd);
    const std::string params = dump_json(*prefilled.find("kv_transfer_params"));
    EXPECT_EQ(post(path, str_cat("{", prompt, R"(,"kv_transfer_params":)", params, "}")).status, 200);
    const EngineRequest& told = backend_->submitted.back();
    EXPECT_EQ(told.lease, LeaseWish::kNone);
    ASSERT_TRUE(told.remote.has_value());
    EXPECT_EQ(told.remote->peer, "10.0.0.1:5600");
    EXPECT_EQ(told.remote->num_blocks, 2);
  }
}

// The engine's error says why it cannot take them. Else prompts would be computed twice, and nobody would notice the
// wrong launch line.
TEST_F(TransferRequests, AServerThatTakesNoLeasesStillTellsItsEngineOfThem) {
  start(ids_of("ab"));
  const std::string lease = str_cat(R"("kv_transfer_params":)", dump_json(transfer_params_json(fake_lease())));
  EXPECT_EQ(post(kCompletions, str_cat(R"({"prompt":"x",)", lease, "}")).status, 200);
  EXPECT_EQ(backend_->submitted.back().remote, fake_lease());
}

TEST_F(TransferRequests, ALeaseThatTheEngineHasKeepsNoBackendAlive) {
  start(ids_of("ab"));
  const std::weak_ptr<FakeBackend> watched = backend_;
  RemoteLease lease(backend_, fake_lease());
  const auto before = watched.use_count();
  lease.handed_over();
  EXPECT_EQ(watched.use_count(), before - 1);
  lease = RemoteLease();
  EXPECT_EQ(backend_->num_released, 0u);
}

constexpr const char* kEarly = R"("max_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"announce_early":true})";

// So that the other server can fetch what there is while the rest is computed.
TEST_F(TransferRequests, ALeaseMayBeAnnouncedBeforeItIsWhole) {
  start(ids_of("ab"));
  const auto reply = post(kCompletions, str_cat(R"({"prompt":"x",)", kEarly, "}"));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(backend_->submitted.back().lease, LeaseWish::kFromStart);
  const auto [events, done] = events_of(reply.body);
  ASSERT_EQ(events.size(), 2u) << reply.body;
  EXPECT_EQ(events[0].find("choices"), nullptr);
  EXPECT_EQ(events[1].find("choices")->as_array().size(), 1u);
  for (const Json& event : events)
    EXPECT_EQ(event.find("kv_transfer_params")->find("remote_num_tokens")->as_int(), 128);
  EXPECT_TRUE(done);
}

TEST_F(TransferRequests, APrefillThatFailsAfterItsAnnouncementSaysSo) {
  options_.fail_after = 1;
  start(ids_of("ab"));
  const auto reply = post(kCompletions, str_cat(R"({"prompt":"x",)", kEarly, "}"));
  const auto [events, done] = events_of(reply.body);
  ASSERT_EQ(events.size(), 2u) << reply.body;
  EXPECT_NE(events[1].find("error"), nullptr);
  EXPECT_FALSE(done);
}

TEST_F(TransferRequests, WhatIsNotOfOneWholePromptIsRefused) {
  start(ids_of("ab"));
  EXPECT_EQ(refused_because_of(kCompletions, str_cat(R"("prompt":"x","stream":true,)", kLease)), "stream");
  EXPECT_EQ(refused_because_of(kCompletions, str_cat(R"("prompt":["x","y"],)", kLease)), "kv_transfer_params");
  EXPECT_EQ(refused_because_of(kCompletions, R"("prompt":"x","kv_transfer_params":{"do_remote_prefill":true})"),
            "kv_transfer_params.remote_num_tokens");
}

// The one token of a prefill is read by nobody, and has no room for any form.
TEST_F(TransferRequests, APrefillIsHeldToNoForm) {
  start(ids_of("ab"));
  const std::string form = R"("prompt":"x","max_tokens":1,"structured_outputs":{"choice":["yes","no"]})";
  EXPECT_EQ(post(kCompletions, str_cat("{", form, ",", kLease, "}")).status, 200);
  EXPECT_EQ(backend_->submitted.back().constraint, nullptr);
  EXPECT_EQ(refused_because_of(kCompletions, form), "max_tokens");
  const std::string longer = R"("prompt":"x","max_tokens":20,"structured_outputs":{"choice":["yes","no"]})";
  EXPECT_EQ(post(kCompletions, str_cat("{", longer, ",", kLease, "}")).status, 200);
  EXPECT_NE(backend_->submitted.back().constraint, nullptr) << "these tokens somebody may read";
}

// The other server's pages are free at once, and not when the lease has run out.
TEST_F(TransferRequests, ARequestThatIsRefusedBeforeTheEngineLetsItsLeaseGo) {
  options_.max_choices = 4;
  options_.takes_leases = true;
  start(ids_of("ab"));
  const std::string prefilled = str_cat(R"({"prompt":"x","max_tokens":1,)", kLease, "}");
  const Json reply = post(kCompletions, prefilled).json();
  const std::string lease = str_cat(R"("kv_transfer_params":)", dump_json(*reply.find("kv_transfer_params")));
  const size_t num_submitted = backend_->submitted.size();
  size_t num_released = 0;
  for (const char* bad : {R"("prompt":"x","temperature":-1)", R"("prompt":["x","y"])", R"("prompt":"x","n":5)",
                          R"("prompt":"x","model":"other")", R"("prompt":"x","max_tokens":1000)",
                          R"("prompt":"x","max_tokens":1,"structured_outputs":{"choice":["yes","no"]})"}) {
    EXPECT_GE(post(kCompletions, str_cat("{", bad, ",", lease, "}")).status, 400) << bad;
    ++num_released;
    EXPECT_TRUE(eventually([&] { return backend_->num_released == num_released; })) << bad;
  }
  EXPECT_EQ(backend_->submitted.size(), num_submitted);
  EXPECT_EQ(backend_->released.back().peer, "10.0.0.1:5600");
  EXPECT_EQ(post(kCompletions, str_cat(R"({"prompt":"x",)", lease, "}")).status, 200);
  EXPECT_EQ(backend_->num_released, num_released) << "of one that the engine has, the engine lets go";
}

TEST_F(TransferRequests, AFullServerLetsLeasesGo) {
  options_.takes_leases = true;
  options_.max_choices = 1;
  options_.hold_after = 1;
  start(ids_of("ab"));
  const Json params = transfer_params_json(
      RemotePrefix{.peer = "10.0.0.1:5600", .lease = {1, 2}, .num_blocks = 2, .tag = std::string(64, 'a')});
  std::thread first([&] { post(kCompletions, R"({"prompt":"x"})"); });
  EXPECT_TRUE(eventually([&] { return backend_->running() == 1; }));
  const std::string body = str_cat(R"({"prompt":"x","kv_transfer_params":)", dump_json(params), "}");
  EXPECT_EQ(post(kCompletions, body).status, 429);
  EXPECT_TRUE(eventually([&] { return backend_->num_released == 1; }));
  backend_->release();
  first.join();
}

TEST_F(TransferRequests, MetricsCountThem) {
  start(ids_of("ab"));
  const std::string text = TestClient(server_->port()).get("/metrics").body;
  for (const char* line : {"perigee:kv_leases{", "vllm:nixl_num_kv_expired_reqs_total{",
                           "vllm:nixl_num_failed_transfers_total{", "perigee:kv_transfer_seconds_total{"})
    EXPECT_NE(text.find(line), std::string::npos) << line;
}

}  // namespace
}  // namespace perigee

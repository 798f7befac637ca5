// Requests on their way through the pool: who leaves is not begun, a drain waits, no memory is a 503, and what a
// hostile body costs is bounded.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstring>
#include <ctime>
#include <future>
#include <new>

#include "server/app.h"
#include "server/direct_exchange.h"
#include "server/fake_backend.h"
#include "server/hostile_requests.h"
#include "server/test_stream.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

constexpr const char* kChat = "/v1/chat/completions";
constexpr const char* kHello = R"({"messages":[{"role":"user","content":"hello"}]})";

class AppPoolTest : public testing::Test {
 protected:
  AppPoolTest() {
    options_.reply = [](const std::vector<int32_t>&) { return std::vector<int32_t>(40, 'a'); };
  }
  void start() {
    const ModelText::ChatEncoder chat = [this](const Json&, const Json&, const Json&, PromptEnd,
                                               size_t) -> Result<std::vector<int32_t>> {
      ++num_rendered_;
      if (render_) render_();
      return std::vector<int32_t>{'x', 'y'};
    };
    config_.served_names = {"tiny"};
    backend_ = std::make_shared<FakeBackend>(options_);
    app_ = std::make_unique<App>(config_, ModelText::make(test_tokenizer(), chat, true, {}));
    app_->set_ready(backend_);
  }
  std::shared_ptr<DirectExchange> send(const char* path, std::string body, HttpHeaders headers = {}) {
    auto exchange = std::make_shared<DirectExchange>();
    app_->handle(exchange, post_request(path, std::move(body), std::move(headers)));
    return exchange;
  }
  HttpReply answer(const char* path, std::string body, HttpHeaders headers = {}) {
    const auto exchange = send(path, std::move(body), std::move(headers));
    EXPECT_TRUE(exchange->run_until_answered());
    return exchange->reply.value_or(HttpReply{.status = 0});
  }

  AppConfig config_;
  FakeOptions options_;
  std::function<void()> render_;
  std::atomic<int> num_rendered_{0};
  std::shared_ptr<FakeBackend> backend_;
  std::unique_ptr<App> app_;
};

TEST_F(AppPoolTest, TheExecutorIsFreeWhileARequestIsRead) {
  std::promise<void> gate;
  render_ = [open = gate.get_future().share()] { open.wait(); };
  start();
  const auto slow = send(kChat, kHello);  // returned: the executor was not held
  EXPECT_TRUE(eventually([&] { return num_rendered_ == 1; }));
  EXPECT_EQ(app_->live().count(), 1u) << "a drain must wait for it";
  gate.set_value();
  ASSERT_TRUE(slow->run_until_answered());
  EXPECT_EQ(slow->reply->status, 200);
  EXPECT_TRUE(eventually([&] { return app_->live().count() == 0; }));
}

TEST_F(AppPoolTest, AClientThatLeavesMeanwhileIsNotSubmitted) {
  std::promise<void> gate;
  render_ = [open = gate.get_future().share()] { open.wait(); };
  start();
  std::vector<std::shared_ptr<DirectExchange>> leavers;  // one for each thread of the pool
  for (int i = 0; i < WorkPool::default_threads(); ++i) leavers.push_back(send(kChat, kHello));
  ASSERT_TRUE(eventually([&] { return num_rendered_ == WorkPool::default_threads(); }));
  const auto never_read = send(kChat, kHello);  // queued after them
  never_read->disconnect();
  for (const auto& leaver : leavers) leaver->disconnect();
  gate.set_value();
  for (const auto& leaver : leavers) EXPECT_TRUE(leaver->run_until([&] { return leaver->num_run == 1; }));
  EXPECT_TRUE(eventually([&] { return app_->live().count() == 0; }));
  EXPECT_EQ(num_rendered_, WorkPool::default_threads()) << "what nobody waits for is not read";
  EXPECT_TRUE(backend_->submitted.empty());
}

TEST_F(AppPoolTest, WhatTheDrainDidNotWaitForIsNotBegun) {
  std::promise<void> gate;
  render_ = [open = gate.get_future().share()] { open.wait(); };
  start();
  const auto late = send(kChat, kHello);
  ASSERT_TRUE(eventually([&] { return num_rendered_ == 1; }));
  app_->begin_drain();
  app_->end_all("the server is shutting down");
  gate.set_value();
  ASSERT_TRUE(late->run_until_answered());
  EXPECT_EQ(late->reply->status, 503);
  EXPECT_TRUE(backend_->submitted.empty());
}

TEST_F(AppPoolTest, NoMemoryForOneRequestIsA503ForThatOne) {
  render_ = [] { throw std::bad_alloc(); };
  start();
  const HttpReply refused = answer(kChat, kHello);
  EXPECT_EQ(refused.status, 503);
  EXPECT_NE(refused.body.find("no memory for this request"), std::string::npos) << refused.body;
  render_ = nullptr;
  EXPECT_EQ(answer(kChat, kHello).status, 200);
}

// Memory runs out where the pool or the engine's thread hands something over: neither may end.
class ForgetfulExchange : public DirectExchange {
 public:
  explicit ForgetfulExchange(int first, int count = 1) : first_(first), count_(count) {}
  void post(std::function<void()> work) override {
    const int index = num_posts_++;
    if (index >= first_ && index < first_ + count_) throw std::bad_alloc();
    DirectExchange::post(std::move(work));
  }

 private:
  const int first_, count_;
  std::atomic<int> num_posts_{0};
};

TEST_F(AppPoolTest, NoMemoryForAHandOverIsA503) {
  for (const int tokens_per_chunk : {1, 64})
    for (const int fail_at : {0, 1, 2}) {
      if (tokens_per_chunk == 64 && fail_at == 2) continue;  // there is one chunk only
      options_.tokens_per_chunk = tokens_per_chunk;
      start();
      const auto exchange = std::make_shared<ForgetfulExchange>(fail_at);
      app_->handle(exchange, post_request("/v1/completions", R"({"prompt":"x","max_tokens":30})"));
      ASSERT_TRUE(exchange->run_until_answered());
      EXPECT_EQ(exchange->reply->status, 503) << fail_at;
      EXPECT_TRUE(eventually([&] { return backend_->running() == 0; }));
      EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x"})").status, 200);
      app_.reset();
      exchange->drop();
    }
}

// The first chunk is lost, and so is the word of that: the next chunk ends the request.
TEST_F(AppPoolTest, NoMemoryForAFailureIsA503Later) {
  start();
  const auto exchange = std::make_shared<ForgetfulExchange>(1, 2);
  app_->handle(exchange, post_request("/v1/completions", R"({"prompt":"x","max_tokens":30})"));
  ASSERT_TRUE(exchange->run_until_answered());
  EXPECT_EQ(exchange->reply->status, 503);
  EXPECT_TRUE(eventually([&] { return backend_->running() == 0; }));
  app_.reset();
  exchange->drop();
}

TEST_F(AppPoolTest, AFullQueueRefusesBeforeItReads) {
  options_.max_choices = 3;
  options_.hold_after = 1;
  start();
  const auto holding = send("/v1/completions", R"({"prompt":"x","n":3,"max_tokens":20})");
  ASSERT_TRUE(holding->run_until([&] { return backend_->running() == 3; }));
  EXPECT_EQ(answer(kChat, kHello).status, 429);
  EXPECT_EQ(answer(kChat, "no JSON").status, 429);
  EXPECT_EQ(num_rendered_, 0);
  backend_->release();
  ASSERT_TRUE(holding->run_until_answered());
  EXPECT_EQ(holding->reply->status, 200);
}

// Written in the pool or at once, whole or streamed: the same.
TEST_F(AppPoolTest, LargeRepliesAreThoseOfSmallPieces) {
  options_.max_model_len = 9000;
  options_.reply = [](const std::vector<int32_t>& prompt) { return std::vector<int32_t>(prompt.size(), 'b'); };
  start();
  for (const size_t length : {100, 4000}) {
    const std::string members = fmt::format("{}{}{}", R"("prompt":")", std::string(length, 'a'),
                                            R"(","max_tokens":4500,"echo":true,"logprobs":1)");
    const HttpReply reply = answer("/v1/completions", "{" + members + "}");
    ASSERT_EQ(reply.status, 200) << reply.body;
    const auto whole = parse_json(reply.body);
    ASSERT_TRUE(whole.ok());
    const Json& choice = whole->find("choices")->as_array()[0];
    EXPECT_EQ(choice.find("text")->as_string(), std::string(length, 'a') + std::string(length, 'b'));
    EXPECT_EQ(choice.find("logprobs")->find("tokens")->as_array().size(), 2 * length + 1);
    const auto streaming = send("/v1/completions", "{" + members + R"(,"stream":true})");
    ASSERT_TRUE(streaming->run_until_answered());
    const Streamed streamed = read_stream(streaming->streamed);
    EXPECT_TRUE(streamed.done);
    EXPECT_EQ(streamed.text, choice.find("text")->as_string());
    EXPECT_EQ(streamed.tokens.size(), 2 * length + 1);
    EXPECT_EQ(streamed.finish, "stop");
  }
}

TEST_F(AppPoolTest, KeysDoNotShareThePrefixCache) {
  config_.api_keys = {"alpha", "beta"};
  start();
  const auto salt = [&](const char* key, const std::string& own) {
    const std::string body = own.empty() ? R"({"prompt":"x"})" : R"({"prompt":"x","cache_salt":")" + own + "\"}";
    EXPECT_EQ(answer("/v1/completions", body, {{"Authorization", fmt::format("Bearer {}", key)}}).status, 200);
    return backend_->submitted.back().cache_salt;
  };
  EXPECT_EQ(salt("alpha", ""), salt("alpha", ""));
  EXPECT_NE(salt("alpha", ""), salt("beta", ""));
  EXPECT_NE(salt("alpha", ""), "");
  EXPECT_EQ(salt("alpha", "s"), salt("alpha", "s"));
  EXPECT_NE(salt("alpha", "s"), salt("alpha", ""));
  EXPECT_NE(salt("alpha", "s"), salt("beta", "s"));
  EXPECT_EQ(salt("alpha", "s").find("alpha"), std::string::npos);
}

TEST_F(AppPoolTest, WithoutKeysTheSaltIsTheRequests) {
  start();
  EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x"})", {{"Authorization", "Bearer whatever"}}).status, 200);
  EXPECT_EQ(backend_->submitted.back().cache_salt, "");
  EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x","cache_salt":"mine"})").status, 200);
  EXPECT_EQ(backend_->submitted.back().cache_salt, "mine");
}

TEST_F(AppPoolTest, PriorityCountsUnlessItIsIgnored) {
  for (const bool ignored : {false, true}) {
    config_.ignore_priority = ignored;
    start();
    EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x","priority":-7})").status, 200);
    EXPECT_EQ(backend_->submitted.back().priority, ignored ? 0 : -7);
    app_.reset();
  }
}

TEST_F(AppPoolTest, ALengthThatCanBeNoPromptIsRefusedUnread) {
  options_.max_model_len = 1000;
  start();
  const auto check = [&](const char* path, size_t length) {
    const auto reply = app_->check_head(post_request(path, "", {{"Content-Length", std::to_string(length)}}));
    return reply ? reply->status : 0;
  };
  const size_t chat = (4u << 20) + 6 * 1000 * test_tokenizer()->longest_token_bytes();
  EXPECT_EQ(check(kChat, chat), 0);
  EXPECT_EQ(check(kChat, chat + 1), 413);
  EXPECT_EQ(check("/v1/completions", chat + 1), 0) << "several prompts";
  EXPECT_EQ(check("/v1/completions", 32u << 20), 413);
}

// 2^20 entries are the limit: as many prompt tokens as there are, times 1 + prompt_logprobs, times n.
TEST_F(AppPoolTest, ScoresOfPromptTokensAreBoundedOverAllChoices) {
  options_.max_model_len = 1 << 16;
  options_.accepts = 0;  // what passes the check is a 429
  start();
  const auto ids = [](int count) {
    std::string list = "[1";
    for (int i = 1; i < count; ++i) list += ",1";
    return list + "]";
  };
  const auto status = [&](const std::string& prompt, int n) {
    return answer("/v1/completions",
                  fmt::format("{}{}{}{}}}", R"({"prompt":)", prompt, R"(,"prompt_logprobs":3,"n":)", n))
        .status;
  };
  EXPECT_EQ(status(ids(1 << 15), 8), 429);
  EXPECT_EQ(status(ids((1 << 15) + 1), 8), 400);
  EXPECT_EQ(status(ids((1 << 15) + 1), 7), 429);
  EXPECT_EQ(status(fmt::format("[{},{}]", ids(1 << 15), ids(1 << 15)), 4), 429);
  EXPECT_EQ(status(fmt::format("[{},{}]", ids(1 << 15), ids((1 << 15) + 1)), 4), 400);
}

// What overload looks like to an autoscaler: a refused request has no latency and does not count as a success.
TEST_F(AppPoolTest, RefusalsAreNotSuccessesAndStayOutOfLatencies) {
  options_.accepts = 0;
  start();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x"})").status, 429);
  const auto exchange = std::make_shared<DirectExchange>();
  HttpRequest request;
  request.method = "GET";
  request.path = "/metrics";
  app_->handle(exchange, request);
  ASSERT_TRUE(exchange->reply.has_value());
  const std::string& metrics = exchange->reply->body;
  const std::string labels = R"({engine="0",model_name="tiny")";
  for (const std::string& text : {
           fmt::format("vllm:requests_refused_total{},status=\"429\"}} 3\n", labels),
           fmt::format("vllm:e2e_request_latency_seconds_count{}}} 0\n", labels),
           fmt::format("vllm:request_prompt_tokens_count{}}} 0\n", labels),
           std::string(R"(vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 0)"),
           fmt::format("vllm:corrupted_requests_total{}}} 0\n", labels),
           std::string("\nperigee_build_info{version=\""),
       })
    EXPECT_NE(metrics.find(text), std::string::npos) << text;
  for (const char* name : {"process_cpu_seconds_total ", "process_resident_memory_bytes ", "process_open_fds ",
                           "process_start_time_seconds ", "process_threads ", "process_max_fds "}) {
    const size_t at = metrics.find(fmt::format("\n{}", name));
    ASSERT_NE(at, std::string::npos) << name;
    const double least = name == std::string_view("process_resident_memory_bytes ") ? 1 << 20 : 0;
    EXPECT_GT(std::strtod(metrics.c_str() + at + 1 + std::strlen(name), nullptr), least) << name;
  }
}

TEST_F(AppPoolTest, MetricsOfDraftsAreThoseOfVllmWhereThereIsSpeculation) {
  const auto metrics = [this] {
    start();
    const auto exchange = std::make_shared<DirectExchange>();
    HttpRequest request;
    request.method = "GET";
    request.path = "/metrics";
    app_->handle(exchange, request);
    return exchange->reply.value_or(HttpReply{.status = 0}).body;
  };
  EXPECT_EQ(metrics().find("spec_decode"), std::string::npos);
  options_.num_drafts = 3;
  const std::string text = metrics();
  for (const char* line : {R"(vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 10)",
                           R"(vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 19)",
                           R"(vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 8)"})
    EXPECT_NE(text.find(line), std::string::npos) << line;
  for (const auto& [position, value] : {std::pair{0, 6}, {1, 2}, {2, 0}})
    EXPECT_NE(
        text.find(fmt::format("vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",model_name=\"tiny\","
                              "position=\"{}\"}} {}\n",
                              position, value)),
        std::string::npos)
        << position;
  EXPECT_EQ(text.find("position=\"3\""), std::string::npos);
}

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

// bench/edge_bench.cc has the figures, 10 ms at most; ten times that is for slow machines.
TEST_F(AppPoolTest, HostileRequestsAreRefusedCheaply) {
  options_.max_model_len = 4096;
  start();
  for (const HostileRequest& hostile : hostile_requests(8u << 20)) {
    std::string body = hostile.body();
    const double begin_ms = cpu_ms();
    const HttpReply reply = answer(hostile.path, std::move(body));
    const double spent_ms = cpu_ms() - begin_ms;
    EXPECT_EQ(reply.status, hostile.path == std::string("/v1/completions") && reply.status == 404 ? 404 : 400)
        << hostile.name << ": " << reply.body;
#ifdef NDEBUG
    EXPECT_LT(spent_ms, 100) << hostile.name;
#else
    EXPECT_GT(spent_ms, 0);
#endif
    EXPECT_EQ(answer("/v1/completions", R"({"prompt":"x"})").status, 200) << "after " << hostile.name;
  }
  EXPECT_EQ(num_rendered_, 0);
}

}  // namespace
}  // namespace perigee

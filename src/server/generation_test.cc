// One request between a backend that is played by hand and an exchange that keeps what it is told.
#include "server/generation.h"

#include <gtest/gtest.h>

#include <future>

#include "base/clock.h"
#include "server/direct_exchange.h"
#include "server/test_stream.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

class HandBackend : public Backend {
 public:
  Result<RequestId> submit(EngineRequest request, OutputSink sink) override {
    if (std::ssize(requests) == refuse_from) return Error(Code::kExhausted, "the queue is full");
    requests.push_back(std::move(request));
    sinks.push_back(std::move(sink));
    return RequestId(std::ssize(requests) - 1);
  }
  void cancel(RequestId request, int32_t choice, FinishReason) override { cancels.emplace_back(request.value, choice); }
  void release(const RemotePrefix&) override {}
  EngineStats stats() const override { return {}; }
  BackendInfo info() const override { return {}; }

  int64_t refuse_from = INT64_MAX;
  std::vector<EngineRequest> requests;
  std::vector<OutputSink> sinks;
  std::vector<std::pair<int64_t, int32_t>> cancels;  // request, choice
};

class KeptExchange : public Exchange {
 public:
  void respond(HttpReply given) override { reply = std::move(given); }
  void begin_stream(HttpHeaders) override { streaming = true; }
  void write(std::string data) override { written += data; }
  void finish(bool) override { finished = true; }
  void on_disconnect(std::function<void()> callback) override { leave = std::move(callback); }
  void post(std::function<void()> work) override { work(); }

  std::optional<HttpReply> reply;
  bool streaming = false, finished = false;
  std::string written;
  std::function<void()> leave;
};

class GenerationTest : public testing::Test {
 protected:
  GenerationTest() {
    request_.fields.max_tokens = 10;
    request_.fields.seed = 1;
  }
  // A sink holds its generation, which holds the backend: a test may end before its reply does.
  ~GenerationTest() override {
    backend_->sinks.clear();
    exchange_->leave = nullptr;
  }
  // Starts request_ with these prompts on a context of 20 tokens.
  void start(const std::vector<std::vector<int32_t>>& prompts) { start(prompts, exchange_); }
  void start(const std::vector<std::vector<int32_t>>& prompts, const std::shared_ptr<Exchange>& exchange,
             WorkPool* pool = nullptr) {
    GenerationSpec spec;
    spec.backend = backend_;
    spec.metrics = metrics_;
    spec.live = live_;
    spec.pool = pool;
    for (const std::vector<int32_t>& prompt : prompts)
      spec.prompts.push_back(std::make_shared<const std::vector<int32_t>>(prompt));
    spec.fields = request_.fields;
    spec.model = "tiny";
    spec.id = "1";
    spec.max_model_len = 20;
    spec.arrival_s = system_clock().now_s();
    const ReplyContext context{
        .text = ModelText::make(test_tokenizer(), nullptr, false, {}), .eos_ids = {258}, .reasoning_field = "both"};
    spec.format = make_completion_format(context, request_, spec.prompts);
    Generation::start(std::move(spec), exchange);
  }
  void give(size_t request, int32_t choice, std::vector<int32_t> ids, std::optional<FinishReason> finish = {}) {
    OutputChunk chunk;
    chunk.choice = choice;
    chunk.ids = std::move(ids);
    chunk.finish = finish;
    backend_->sinks[request](std::move(chunk));
  }
  Json reply() const {
    CHECK(exchange_->reply.has_value(), "no reply yet");
    const Result<Json> json = parse_json(exchange_->reply->body);
    CHECK(json.ok(), exchange_->reply->body);
    return *json;
  }
  // The value of a metric that has no labels but the model's.
  double metric(const std::string& name) const {
    const std::string text = metrics_->render({});
    const size_t line = text.find("\nvllm:" + name + "{");
    CHECK(line != std::string::npos, name);
    return std::stod(text.substr(text.find("} ", line) + 2));
  }

  std::shared_ptr<HandBackend> backend_ = std::make_shared<HandBackend>();
  std::shared_ptr<KeptExchange> exchange_ = std::make_shared<KeptExchange>();
  std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>("tiny");
  std::shared_ptr<LiveGenerations> live_ = std::make_shared<LiveGenerations>();
  CompletionRequest request_;
};

TEST_F(GenerationTest, TheEngineGetsWhatTheClientAsked) {
  request_.fields.n = 3;
  request_.fields.priority = -4;
  request_.fields.timeout_s = 12.5;
  request_.fields.cache_salt = "mine";
  request_.fields.speculation_max_context = 900;
  request_.fields.seed = 77;
  start({{1, 2}});
  ASSERT_EQ(backend_->requests.size(), 1u);
  const EngineRequest& request = backend_->requests[0];
  EXPECT_EQ(request.n, 3);
  EXPECT_EQ(request.priority, -4);
  EXPECT_EQ(request.timeout_s, 12.5);
  EXPECT_EQ(request.cache_salt, "mine");
  EXPECT_EQ(request.speculation_max_context, 900);
  EXPECT_EQ(request.sampling.seed, 77u);
  EXPECT_EQ(request.sampling.max_tokens, 10);
}

TEST_F(GenerationTest, MaxTokensIsCutToTheRoomThatEachPromptLeaves) {
  start({{1, 2}, std::vector<int32_t>(15, 3), std::vector<int32_t>(19, 3)});
  ASSERT_EQ(backend_->requests.size(), 3u);
  EXPECT_EQ(backend_->requests[0].sampling.max_tokens, 10);
  EXPECT_EQ(backend_->requests[1].sampling.max_tokens, 5);
  EXPECT_EQ(backend_->requests[2].sampling.max_tokens, 1);
}

TEST_F(GenerationTest, ARefusedPromptEndsThoseBeforeIt) {
  backend_->refuse_from = 2;
  start({{1}, {2}, {3}});
  EXPECT_EQ(exchange_->reply->status, 429);
  EXPECT_EQ(backend_->cancels, (std::vector<std::pair<int64_t, int32_t>>{{0, -1}, {1, -1}}));
  EXPECT_EQ(live_->count(), 0u);
}

TEST_F(GenerationTest, AFailedChoiceEndsTheOthers) {
  request_.fields.n = 2;
  start({{1}, {2}});
  give(0, 0, {'a'});
  EXPECT_TRUE(backend_->cancels.empty());
  give(0, 1, {}, FinishReason::kError);
  EXPECT_EQ(exchange_->reply->status, 500);
  EXPECT_EQ(backend_->cancels, (std::vector<std::pair<int64_t, int32_t>>{{0, -1}, {1, -1}}));
  EXPECT_EQ(live_->count(), 0u);
}

TEST_F(GenerationTest, AClientThatLeavesEndsAllChoices) {
  request_.fields.stream = true;
  start({{1}, {2}});
  give(1, 0, {'a'});
  ASSERT_TRUE(exchange_->leave);
  exchange_->leave();
  EXPECT_EQ(backend_->cancels, (std::vector<std::pair<int64_t, int32_t>>{{0, -1}, {1, -1}}));
  EXPECT_EQ(live_->count(), 0u);
}

// Echo with max_tokens 0 takes one token, which nobody sees, and neither does anyone see how it ended.
TEST_F(GenerationTest, EchoOfNothingEndsByLength) {
  request_.echo = true;
  request_.fields.max_tokens = 0;
  start({{'a', 'b'}});
  EXPECT_EQ(backend_->requests[0].sampling.max_tokens, 1);
  give(0, 0, {258}, FinishReason::kStop);
  const Json choice = reply().find("choices")->as_array()[0];
  EXPECT_EQ(*choice.find("text"), Json("ab"));
  EXPECT_EQ(*choice.find("finish_reason"), Json("length"));
}

TEST_F(GenerationTest, AChunkWaitsWhileThePoolWritesTheOneBefore) {
  std::promise<void> gate;
  WorkPool pool(2, 10);
  pool.submit(WorkPool::Lane::kLong, [open = gate.get_future().share()] { open.wait(); });
  const auto exchange = std::make_shared<DirectExchange>();
  request_.fields.stream = true;
  start({{1}}, exchange, &pool);
  give(0, 0, std::vector<int32_t>(3000, 'a'));  // more than is written at once
  give(0, 0, {'b'}, FinishReason::kLength);
  ASSERT_TRUE(exchange->run_until([&] { return exchange->num_run == 2; }));
  EXPECT_EQ(exchange->streamed, "");
  gate.set_value();
  ASSERT_TRUE(exchange->run_until_answered());
  EXPECT_EQ(read_stream(exchange->streamed).text, std::string(3000, 'a') + "b");
}

TEST_F(GenerationTest, FirstTokensAreNoGapsBetweenTokens) {
  request_.fields.n = 2;
  start({{1}});
  give(0, 0, {'a'});
  give(0, 1, {'b'});
  EXPECT_EQ(metric("inter_token_latency_seconds_count"), 0);
  give(0, 1, {'c'});
  EXPECT_EQ(metric("inter_token_latency_seconds_count"), 1);
}

TEST_F(GenerationTest, TimesOfARequestAreTakenFromItsOwnStages) {
  RequestRecord record;
  record.n = 2;
  record.completion_tokens = 6;
  record.submitted_s = 1;
  record.scheduled_s = 3;
  record.first_token_s = 4;
  record.last_token_s = 8;
  record.end_s = 9;
  metrics_->request_done(record);
  EXPECT_EQ(metric("request_queue_time_seconds_sum"), 2);
  EXPECT_EQ(metric("request_prefill_time_seconds_sum"), 1);
  EXPECT_EQ(metric("request_decode_time_seconds_sum"), 4);
  EXPECT_EQ(metric("request_inference_time_seconds_sum"), 5);
  EXPECT_EQ(metric("e2e_request_latency_seconds_sum"), 9);
  EXPECT_EQ(metric("request_time_per_output_token_seconds_sum"), 2) << "2 choices, each with 2 tokens after its first";
}

}  // namespace
}  // namespace perigee

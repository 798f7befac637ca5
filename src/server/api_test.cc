// The API over loopback with a scripted backend: shapes, streams, errors, keys, drain.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "base/eventually.h"
#include "server/api_fixture.h"
#include "server/test_stream.h"

namespace perigee {
namespace {

TEST_F(ApiTest, CompletionWholeAndStreamedAreTheSame) {
  start(ids_of("Hello, w\xC3\xB6rld"));
  for (const int32_t per_chunk : {1, 2, 5, 64}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start(ids_of("Hello, w\xC3\xB6rld"));
    const std::string members = R"("prompt":"ab","max_tokens":50,"logprobs":2)";
    const auto reply = post("/v1/completions", "{" + members + "}");
    ASSERT_EQ(reply.status, 200) << reply.body;
    const Json whole = reply.json();
    EXPECT_EQ(*whole.find("object"), Json("text_completion"));
    EXPECT_EQ(*whole.find("model"), Json("tiny"));
    const Json& first = whole.find("choices")->as_array()[0];
    EXPECT_EQ(*first.find("text"), Json("Hello, w\xC3\xB6rld"));
    EXPECT_EQ(*first.find("finish_reason"), Json("stop"));
    EXPECT_TRUE(first.find("stop_reason")->is_null());
    EXPECT_EQ(*whole.find("usage")->find("prompt_tokens"), Json(2));
    EXPECT_EQ(*whole.find("usage")->find("completion_tokens"), Json(14));  // 13 bytes and the end
    const Streamed streamed = read_stream(
        post("/v1/completions", "{" + members + R"(,"stream":true,"stream_options":{"include_usage":true}})").body);
    EXPECT_TRUE(streamed.done);
    EXPECT_EQ(streamed.text, first.find("text")->as_string());
    EXPECT_EQ(streamed.finish, "stop");
    EXPECT_EQ(streamed.num_usages, 1);
    EXPECT_EQ(streamed.usage, *whole.find("usage"));
    EXPECT_EQ(Json(Json::Array(streamed.tokens.begin(), streamed.tokens.end())),
              *first.find("logprobs")->find("tokens"));
    EXPECT_EQ(Json(Json::Array(streamed.top_logprobs)), *first.find("logprobs")->find("top_logprobs"));
  }
}

TEST_F(ApiTest, EchoWithLogprobsAsLmEvalReadsIt) {
  start(ids_of("Z"));
  const Json first = choice(
      "/v1/completions", R"({"prompt":[65,66,67],"temperature":0,"max_tokens":1,"logprobs":1,"seed":1,"echo":true})");
  EXPECT_EQ(*first.find("text"), Json("ABCZ"));
  const Json& logprobs = *first.find("logprobs");
  EXPECT_EQ(dump_json(*logprobs.find("tokens")), R"(["A","B","C","Z"])");
  EXPECT_EQ(dump_json(*logprobs.find("text_offset")), "[0,1,2,3]");
  const auto& scores = logprobs.find("token_logprobs")->as_array();
  ASSERT_EQ(scores.size(), 4u);
  EXPECT_TRUE(scores[0].is_null());
  EXPECT_NEAR(scores[1].as_double(), -0.66, 1e-6);
  EXPECT_NEAR(scores[3].as_double(), -0.90, 1e-6);
  const auto& top = logprobs.find("top_logprobs")->as_array();
  EXPECT_TRUE(top[0].is_null());
  EXPECT_EQ(top[1].as_object().size(), 2u);  // the sampled token and one more
  EXPECT_NE(top[1].find("B"), nullptr);
  EXPECT_EQ(*first.find("finish_reason"), Json("length"));
}

TEST_F(ApiTest, EchoAloneReturnsThePromptOnly) {
  start(ids_of("Z"));
  const auto reply = post("/v1/completions", R"({"prompt":"ABC","max_tokens":0,"logprobs":0,"echo":true})");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  const Json& first = json.find("choices")->as_array()[0];
  EXPECT_EQ(*first.find("text"), Json("ABC"));
  EXPECT_EQ(first.find("logprobs")->find("tokens")->as_array().size(), 3u);
  EXPECT_EQ(*json.find("usage")->find("completion_tokens"), Json(0));
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ABC","max_tokens":0})").status, 400);
}

TEST_F(ApiTest, ListsOfPromptsAndSeveralChoices) {
  options_.reply = [](const std::vector<int32_t>& prompt) { return prompt; };
  start();
  const auto reply = post("/v1/completions", R"({"prompt":["ab",[99,100]],"n":2,"return_token_ids":true})");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  const auto& choices = json.find("choices")->as_array();
  ASSERT_EQ(choices.size(), 4u);
  const char* texts[] = {"ab", "ab", "cd", "cd"};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(*choices[i].find("index"), Json(i));
    EXPECT_EQ(*choices[i].find("text"), Json(texts[i]));
  }
  EXPECT_EQ(dump_json(*choices[2].find("token_ids")), "[99,100,258]");
  EXPECT_EQ(dump_json(*choices[2].find("prompt_token_ids")), "[99,100]");
  EXPECT_EQ(*json.find("usage")->find("prompt_tokens"), Json(4));
}

TEST_F(ApiTest, StopStringEndsTheChoiceInTheEngine) {
  options_.tick_s = 0.001;
  start(ids_of("one two three four five six seven eight nine ten"));
  for (const bool stream : {false, true}) {
    const std::string body = std::string(R"({"prompt":"x","max_tokens":200,"stop":["zzz","three"],"stream":)") +
                             (stream ? "true}" : "false}");
    const auto reply = post("/v1/completions", body);
    const Streamed streamed = stream ? read_stream(reply.body) : Streamed();
    const Json whole = stream ? Json() : reply.json().find("choices")->as_array()[0];
    EXPECT_EQ(stream ? streamed.text : whole.find("text")->as_string(), "one two ");
    EXPECT_EQ(stream ? streamed.finish : whole.find("finish_reason")->as_string(), "stop");
    EXPECT_EQ(stream ? streamed.stop_reason : *whole.find("stop_reason"), Json("three"));
  }
  EXPECT_EQ(backend_->num_cancels(FinishReason::kStop), 2);
  EXPECT_EQ(
      *choice("/v1/completions", R"({"prompt":"x","max_tokens":200,"stop":"two","include_stop_str_in_output":true})")
           .find("text"),
      Json("one two"));
}

TEST_F(ApiTest, StopIdsAreHiddenAndNamed) {
  start(ids_of("abc"));
  const Json first = choice("/v1/completions", R"({"prompt":"x","stop_token_ids":[98]})");
  EXPECT_EQ(*first.find("text"), Json("a"));
  EXPECT_EQ(*first.find("stop_reason"), Json(98));
  const Json rest = choice("/v1/completions", R"({"prompt":"x","max_tokens":6,"ignore_eos":true})");
  EXPECT_EQ(*rest.find("text"), Json("abc"));
  EXPECT_EQ(*rest.find("finish_reason"), Json("length"));
}

TEST_F(ApiTest, ChatReasoningContentAndTools) {
  const std::vector<int32_t> reply = joined({ids_of("hmm"),
                                             {kEndThink},
                                             ids_of("Sure."),
                                             {kSectionBegin, kCallBegin},
                                             ids_of("functions.add:0"),
                                             {kArgumentBegin},
                                             ids_of(R"({"a": 1})"),
                                             {kCallEnd, kSectionEnd}});
  for (const int32_t per_chunk : {1, 3, 100}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start(reply);
    const std::string members =
        R"("messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"add"}}])";
    const auto whole_reply = post("/v1/chat/completions", "{" + members + "}");
    ASSERT_EQ(whole_reply.status, 200) << whole_reply.body;
    const Json whole = whole_reply.json().find("choices")->as_array()[0];
    const Json& message = *whole.find("message");
    EXPECT_EQ(*message.find("reasoning"), Json("hmm"));
    EXPECT_EQ(*message.find("reasoning_content"), Json("hmm"));
    EXPECT_EQ(*message.find("content"), Json("Sure."));
    EXPECT_EQ(*whole.find("finish_reason"), Json("tool_calls"));
    const Json& call = message.find("tool_calls")->as_array()[0];
    EXPECT_EQ(*call.find("id"), Json("functions.add:0"));
    EXPECT_EQ(dump_json(*call.find("function")), R"({"name":"add","arguments":"{\"a\": 1}"})");
    const Streamed streamed = read_stream(post("/v1/chat/completions", "{" + members + R"(,"stream":true})").body);
    EXPECT_EQ(streamed.num_roles, 1);
    EXPECT_EQ(streamed.reasoning, "hmm");
    EXPECT_EQ(streamed.content, "Sure.");
    EXPECT_EQ(streamed.call_id, "functions.add:0");
    EXPECT_EQ(streamed.name, "add");
    EXPECT_EQ(streamed.arguments, R"({"a": 1})");
    EXPECT_EQ(streamed.finish, "tool_calls");
    EXPECT_TRUE(streamed.done);
  }
}

TEST_F(ApiTest, ChatWithoutThinkingAndLogprobs) {
  start(ids_of("Hi"));
  const Json first = choice("/v1/chat/completions",
                            R"({"messages":[{"role":"user","content":"x"}],"thinking":{"type":"disabled"},
                                "logprobs":true,"top_logprobs":2})");
  EXPECT_EQ(dump_json(*first.find("message")), R"({"role":"assistant","content":"Hi"})");
  const auto& content = first.find("logprobs")->find("content")->as_array();
  ASSERT_EQ(content.size(), 3u);
  EXPECT_EQ(*content[0].find("token"), Json("H"));
  EXPECT_EQ(dump_json(*content[0].find("bytes")), "[72]");
  EXPECT_EQ(content[0].find("top_logprobs")->as_array().size(), 2u);
}

TEST_F(ApiTest, ContinuousUsageCountsEveryToken) {
  start(ids_of("abcdef"));
  const Streamed streamed = read_stream(
      post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":6,"stream":true,
            "stream_options":{"include_usage":true,"continuous_usage_stats":true}})")
          .body);
  EXPECT_EQ(streamed.num_usages, streamed.num_chunks);
  EXPECT_EQ(*streamed.usage.find("completion_tokens"), Json(6));
}

TEST_F(ApiTest, FailuresAreErrorsWholeAndStreamed) {
  options_.fail_after = 3;
  start(ids_of("abcdef"));
  const auto whole = post("/v1/completions", R"({"prompt":"x"})");
  EXPECT_EQ(whole.status, 500);
  EXPECT_EQ(*whole.json().find("error")->find("code"), Json(500));
  TestClient client(server_->port());
  client.send_post("/v1/completions", R"({"prompt":"x","stream":true})");
  const Streamed streamed = read_stream(client.read_reply().body);
  EXPECT_EQ(streamed.text, "ab");
  EXPECT_FALSE(streamed.done);
  EXPECT_EQ(*streamed.error.find("message"), Json("planted failure"));
  EXPECT_FALSE(client.read_some());
  EXPECT_TRUE(client.ended());
}

TEST_F(ApiTest, ErrorsHaveTheEnvelope) {
  start(ids_of("a"));
  const auto unknown = post("/v1/completions", R"({"prompt":"x","model":"gpt-9"})");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_NE(unknown.body.find("'tiny', 'alias'"), std::string::npos) << unknown.body;
  EXPECT_EQ(*post("/v1/completions", R"({"prompt":"x","model":"alias"})").json().find("model"), Json("alias"));
  const auto bad = post("/v1/completions", R"({"prompt":"x","temperature":-1,"stream":true})");
  EXPECT_EQ(bad.status, 400);
  const Json error = *bad.json().find("error");
  EXPECT_EQ(*error.find("param"), Json("temperature"));
  EXPECT_EQ(*error.find("type"), Json("BadRequestError"));
  EXPECT_EQ(post("/v1/completions", R"({"prompt":)").status, 400);
  EXPECT_EQ(post("/v1/completions", "[]").status, 400);
  EXPECT_EQ(post("/nothing", "{}").status, 404);
  EXPECT_NE(post("/v1/embeddings", "{}").body.find("there are /v1/completions, /v1/chat/completions, /v1/models"),
            std::string::npos);
  TestClient client(server_->port());
  EXPECT_EQ(client.get("/v1/completions").status, 405);
  client.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}");
  EXPECT_EQ(client.read_reply().status, 400);
  const auto too_long = post("/v1/completions", R"({"prompt":")" + std::string(250, 'a') + R"(","max_tokens":10})");
  EXPECT_EQ(too_long.status, 400);
  EXPECT_EQ(*too_long.json().find("error")->find("param"), Json("input_tokens"));
  const auto too_many = post("/v1/completions", R"({"prompt":"ab","max_tokens":10,"min_tokens":11})");
  EXPECT_EQ(*too_many.json().find("error")->find("param"), Json("min_tokens"));
}

TEST_F(ApiTest, RefusalsAreCountedAndTheLogNamesTheFieldNotItsValue) {
  start(ids_of("a"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x","temperature":-17.25})").status, 400);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x" )").status, 400);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("POST /v1/completions 400, because of temperature\n"), std::string::npos) << log;
  EXPECT_NE(log.find("POST /v1/completions 400\n"), std::string::npos) << log;
  EXPECT_EQ(log.find("17.25"), std::string::npos) << log;
  for (const int n : {8, 17000}) EXPECT_EQ(post("/" + std::string(n, 'a'), "{}").status, n == 8 ? 404 : 431);
  const std::string metrics = TestClient(server_->port()).get("/metrics").body;
  for (const char* text : {"status=\"400\"} 2", "status=\"404\"} 1", "status=\"431\"} 1"})
    EXPECT_NE(
        metrics.find(fmt::format("{}{}", R"(perigee:requests_refused_total{engine="0",model_name="tiny",)", text)),
        std::string::npos);
}

TEST_F(ApiTest, FullQueueIs429) {
  options_.accepts = 0;
  start(ids_of("a"));
  const auto reply = post("/v1/completions", R"({"prompt":"x","stream":true})");
  EXPECT_EQ(reply.status, 429);
  EXPECT_NE(reply.head.find("Retry-After: "), std::string::npos);
}

TEST_F(ApiTest, MoreChoicesThanTheQueueCanEverHoldAre400) {
  options_.max_choices = 5;
  start(ids_of("abc"));
  EXPECT_EQ(post("/v1/completions", R"({"prompt":["a","b","c","d","e"]})").status, 200);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"a","n":5})").status, 200);
  for (const auto& [path, body, field, text] : std::vector<std::array<std::string, 4>>{
           {"/v1/completions", R"({"prompt":["a","b","c"],"n":2})", "prompt", "3 prompts with n 2 are 6 sequences"},
           {"/v1/completions", R"({"prompt":"a","n":6})", "n", "at most 5: lower n"},
           {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"n":6})", "n",
            "--max-waiting-seqs"}}) {
    const auto reply = post(path, body);
    EXPECT_EQ(reply.status, 400) << body;
    EXPECT_EQ(*reply.json().find("error")->find("param"), Json(field)) << body;
    EXPECT_NE(reply.body.find(text), std::string::npos) << reply.body;
  }
}

TEST_F(ApiTest, EveryRouteButProbesNeedsTheKey) {
  config_.api_keys = {"first", "second"};
  start(ids_of("a"));
  const auto status_of = [&](const std::string& method, const std::string& path, const std::string& headers) {
    TestClient client(server_->port());
    client.send(method + " " + path + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + headers + "\r\n");
    return client.read_reply().status;
  };
  for (const char* path : {"/v1/models", "/version", "/load", "/tokenizer_info", "/tokenize", "/v1/completions",
                           "/ping", "/nothing", "//v1/models", "/%2e%2e/health", "/health;x", "/livez/"})
    for (const char* key : {"", "Authorization: Bearer firs\r\n", "Authorization: Bearer firstt\r\n",
                            "Authorization: first\r\n", "Authorization: Bearer \r\n"})
      for (const char* method : {"GET", "POST"}) EXPECT_EQ(status_of(method, path, key), 401) << path << key;
  EXPECT_EQ(status_of("GET", "/v1/models", "Authorization: Bearer second\r\n"), 200);
  for (const char* path : {"/health", "/livez", "/readyz", "/metrics"})
    EXPECT_EQ(status_of("GET", path, ""), 200) << path;
  EXPECT_EQ(status_of("GET", "http://x/health", ""), 401);
}

TEST_F(ApiTest, AKeyHasItsShareOfConnections) {
  config_.api_keys = {"one", "two"};
  config_.http.max_connections_per_key = 2;
  start(ids_of("ab"));
  const auto status = [](TestClient& client, const std::string& key) {
    client.send("GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + "\r\n\r\n");
    return client.read_reply().status;
  };
  const int port = server_->port();
  TestClient first(port), third(port), other(port), wrong(port);
  auto second = std::make_unique<TestClient>(port);
  EXPECT_EQ(status(first, "one"), 200);
  EXPECT_EQ(status(*second, "one"), 200);
  EXPECT_EQ(status(*second, "one"), 200) << "a connection counts once";
  EXPECT_EQ(status(third, "one"), 429);
  EXPECT_EQ(status(other, "two"), 200);
  EXPECT_EQ(status(wrong, "none"), 401);
  EXPECT_EQ(status(*second, "two"), 200) << "a connection counts for its newest key";
  TestClient fourth(port);
  EXPECT_EQ(status(fourth, "one"), 200);
  second.reset();
  const auto has_room = [&] {
    TestClient again(port);
    return status(again, "two") == 200;
  };
  EXPECT_TRUE(eventually(has_room)) << "a closed connection leaves its place";
}

TEST_F(ApiTest, AStuckEngineIsFirstNotReadyThenNotAlive) {
  config_.stall_s = 60;
  start(ids_of("ab"));
  TestClient client(server_->port());
  backend_->stalled_s = 9;
  EXPECT_EQ(client.get("/readyz").status, 200);
  backend_->stalled_s = 30;
  const auto stalled = client.get("/readyz");
  EXPECT_EQ(stalled.status, 503);
  EXPECT_NE(stalled.body.find("no step for 30 s"), std::string::npos) << stalled.body;
  EXPECT_EQ(client.get("/livez").status, 200);
  backend_->stalled_s = 61;
  EXPECT_EQ(client.get("/livez").status, 503);
  backend_->stalled_s = 0;
  EXPECT_EQ(client.get("/livez").status, 200);
  EXPECT_EQ(client.get("/readyz").status, 200);
}

TEST_F(ApiTest, AServerWithALostDeviceIsNotReady) {
  start(ids_of("ab"));
  TestClient client(server_->port());
  backend_->lost = true;
  const auto lost = client.get("/readyz");
  EXPECT_EQ(lost.status, 503);
  EXPECT_NE(lost.body.find("a device has failed"), std::string::npos) << lost.body;
}

TEST_F(ApiTest, HistogramsOfQueueStepsAndSizes) {
  start(ids_of("abc"));
  TestClient client(server_->port());
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"wxyz","n":2})").status, 200);
  client.get("/metrics");
  const std::string metrics = client.get("/metrics").body;  // the second scrape counts no step again
  const std::string labels = R"({engine="0",model_name="tiny")";
  for (const char* prefix : {"vllm:", "perigee:"})
    for (const std::string& text :
         {std::string("iteration_tokens_total_bucket") + labels + R"(,le="1"} 0)",
          std::string("iteration_tokens_total_bucket") + labels + R"(,le="8"} 3)",
          std::string("iteration_tokens_total_sum") + labels + "} 12",
          std::string("cache_pages") + R"({engine="0",model_name="tiny",owner="checkpoint"} 9)",
          std::string("state_checkpoints") + labels + "} 3",
          std::string("state_checkpoint_hits_total") + labels + "} 5",
          std::string("request_queue_time_seconds_count") + labels + "} 1",
          std::string("request_prefill_time_seconds_count") + labels + "} 1",
          std::string("request_decode_time_seconds_count") + labels + "} 1",
          std::string("request_inference_time_seconds_count") + labels + "} 1",
          std::string("e2e_request_latency_seconds_count") + labels + "} 1",
          std::string("time_to_first_token_seconds_count") + labels + "} 1",
          std::string("request_time_per_output_token_seconds_count") + labels + "} 1",
          std::string("inter_token_latency_seconds_bucket") + labels,
          std::string("request_max_num_generation_tokens_sum") + labels + "} 4",  // the stop id counts
          std::string("request_prefill_kv_computed_tokens_sum") + labels + "} 3"})
      EXPECT_NE(metrics.find(prefix + text), std::string::npos) << prefix << text;
}

// As vLLM counts: a prompt once in `usage`, for each choice in the counters, whose sources add up to the total.
TEST_F(ApiTest, PromptTokensOfSeveralChoices) {
  start(ids_of("abc"));
  const Json usage = *post("/v1/completions", R"({"prompt":"wxyz","n":3})").json().find("usage");
  EXPECT_EQ(*usage.find("prompt_tokens"), Json(4));
  EXPECT_EQ(*usage.find("prompt_tokens_details")->find("cached_tokens"), Json(1)) << "not what its choices share";
  const std::string metrics = TestClient(server_->port()).get("/metrics").body;
  const std::string labels = R"({engine="0",model_name="tiny")";
  for (const char* prefix : {"vllm:", "perigee:"})
    for (const std::string& text :
         {fmt::format("prompt_tokens_total{}}} 12\n", labels),
          fmt::format("prompt_tokens_cached_total{}}} 7\n", labels),
          fmt::format("prompt_tokens_by_source_total{},source=\"local_compute\"}} 5\n", labels),
          fmt::format("prompt_tokens_by_source_total{},source=\"local_cache_hit\"}} 7\n", labels)})
      EXPECT_NE(metrics.find(prefix + text), std::string::npos) << prefix << text;
}

TEST_F(ApiTest, LoadingThenReadyThenDraining) {
  ready_ = false;
  options_.hold_after = 1;
  start(ids_of("abcdefghij"));
  server_->set_progress("reading weights", 42);
  TestClient client(server_->port());
  EXPECT_EQ(client.get("/health").status, 503);
  EXPECT_EQ(client.get("/livez").status, 200);
  const auto loading = client.get("/readyz");
  EXPECT_EQ(loading.status, 503);
  EXPECT_NE(loading.body.find("reading weights, 42 %"), std::string::npos);
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x"})").status, 503);
  server_->set_ready(backend_);
  EXPECT_EQ(client.get("/health").status, 200);
  EXPECT_EQ(client.get("/health").body, "");
  TestClient busy(server_->port());
  busy.send_post("/v1/completions", R"({"prompt":"x","stream":true})");
  ASSERT_TRUE(busy.read_until("data: "));
  std::thread drain([&] { server_->drain_and_stop(); });
  // Each time anew, as probes do: a 200 from before may be the last reply of its connection.
  EXPECT_TRUE(eventually([&] { return TestClient(server_->port()).get("/readyz").status == 503; }));
  const auto refused = post("/v1/completions", R"({"prompt":"x"})");
  EXPECT_EQ(refused.status, 503);
  EXPECT_NE(refused.head.find("Retry-After"), std::string::npos);
  backend_->release();
  const Streamed streamed = read_stream(busy.read_reply().body);  // what was accepted is finished
  EXPECT_TRUE(streamed.done);
  EXPECT_EQ(streamed.text, "abcdefghij");
  drain.join();
  EXPECT_FALSE(TestClient(server_->port()).connected());
}

TEST_F(ApiTest, DrainLimitEndsWhatIsLeftWithAnError) {
  options_.hold_after = 1;
  config_.drain_s = 0.1;
  start(ids_of(std::string(100, 'a')));
  TestClient busy(server_->port());
  busy.send_post("/v1/completions", R"({"prompt":"x","stream":true,"max_tokens":100})");
  ASSERT_TRUE(busy.read_until("data: "));
  server_->drain_and_stop();
  const Streamed streamed = read_stream(busy.read_reply().body);
  EXPECT_FALSE(streamed.done);
  EXPECT_EQ(*streamed.error.find("code"), Json(503));
}

// Within 100 ms of the event loop's time: it looks at the backend every 50 ms, on a busy machine later, and by the
// second look the cancel has come.
TEST_F(ApiTest, DisconnectCancelsAtOnce) {
  options_.hold_after = 1;
  config_.stats_period_s = 0.05;
  start(ids_of(std::string(200, 'a')));
  for (const char* body : {R"({"prompt":"x","max_tokens":200,"stream":true})", R"({"prompt":"x","max_tokens":200})"}) {
    TestClient client(server_->port());
    client.send_post("/v1/completions", body);
    ASSERT_TRUE(eventually([&] { return backend_->running() > 0; }));
    client.close();
    const int looks = backend_->looks;
    ASSERT_TRUE(eventually([&] { return backend_->running() == 0; })) << body;
    EXPECT_LE(backend_->looks_before_cancel - looks, 2) << body;
  }
  EXPECT_EQ(backend_->num_cancels(FinishReason::kCancelled), 2);
}

TEST_F(ApiTest, ManyParallelStreams) {
  constexpr int kStreams = 256;
  options_.tick_s = 0.002;
  config_.http.threads = 2;
  start(ids_of("The quick brown fox."));
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    ASSERT_TRUE(clients.back()->connected());
    ASSERT_TRUE(clients.back()->send_post("/v1/completions", R"({"prompt":"x","max_tokens":50,"stream":true})"));
  }
  for (int i = 0; i < kStreams; i += 5) clients[i]->close();  // a fifth leaves
  for (int i = 0; i < kStreams; ++i) {
    if (i % 5 == 0) continue;
    const Streamed streamed = read_stream(clients[i]->read_reply().body);
    EXPECT_EQ(streamed.text, "The quick brown fox.");
    EXPECT_TRUE(streamed.done);
  }
  EXPECT_TRUE(eventually([&] { return backend_->running() == 0; }));
}

TEST_F(ApiTest, WithoutTokenizerIdsOnly) {
  with_tokenizer_ = false;
  start({7, 8});
  const Json first =
      choice("/v1/completions", R"({"prompt":[1,2],"logprobs":1,"max_tokens":2,"return_token_ids":true})");
  EXPECT_EQ(*first.find("text"), Json(""));
  EXPECT_EQ(dump_json(*first.find("logprobs")->find("tokens")), R"(["token_id:7","token_id:8"])");
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x"})").status, 400);
  EXPECT_EQ(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})").status, 400);
  EXPECT_EQ(post("/tokenize", R"({"prompt":"x"})").status, 400);
}

TEST_F(ApiTest, ModelsMetricsAndTokenizer) {
  config_.served_names = {"tiny", "org/alias"};
  start(ids_of("ab"));
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x"})").status, 200);
  TestClient client(server_->port());
  const Json models = client.get("/v1/models").json();
  ASSERT_EQ(models.find("data")->as_array().size(), 2u);
  EXPECT_EQ(*models.find("data")->as_array()[1].find("id"), Json("org/alias"));
  EXPECT_EQ(*models.find("data")->as_array()[0].find("max_model_len"), Json(256));
  EXPECT_EQ(client.get("/v1/models/org%2Falias").json(), models.find("data")->as_array()[1]);
  EXPECT_EQ(client.get("/v1/models/org/alias").status, 200);
  EXPECT_EQ(client.get("/v1/models/other").status, 404);
  EXPECT_EQ(client.get("/v1/models/").status, 404);
  const std::string metrics = client.get("/metrics").body;
  for (const char* text : {"vllm:num_requests_running{", "perigee:num_requests_running{",
                           "vllm:generation_tokens_total{", "vllm:time_to_first_token_seconds_bucket{",
                           "num_gpu_blocks=\"77\"", "block_size=\"64\"", "dcp_world_size=\"1\"",
                           "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"tiny\"} 1"})
    EXPECT_NE(metrics.find(text), std::string::npos) << text;
  EXPECT_EQ(dump_json(*post("/tokenize", R"({"prompt":"ab"})").json().find("tokens")), "[97,98]");
  EXPECT_EQ(*post("/detokenize", R"({"tokens":[97,98]})").json().find("prompt"), Json("ab"));
  EXPECT_EQ(post("/detokenize", R"({"tokens":[9999]})").status, 400);
  EXPECT_TRUE(client.get("/tokenizer_info").json().is_object());
  EXPECT_EQ(*client.get("/load").json().find("server_load"), Json(0));
  EXPECT_NE(client.get("/version").json().find("version"), nullptr);
}

}  // namespace
}  // namespace perigee

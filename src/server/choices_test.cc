// Requests with several prompts, choices, stops and calls: whose tokens are whose, and what ends what.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/eventually.h"
#include "server/api_fixture.h"

namespace perigee {
namespace {

constexpr const char* kChat = "/v1/chat/completions";
constexpr const char* kCompletions = "/v1/completions";

class ChoicesTest : public ApiTest {
 protected:
  // The data of a stream's events; fails unless the last one is [DONE].
  std::vector<Json> events(const char* path, const std::string& members) {
    const auto reply = post(path, "{" + members + R"(,"stream":true})");
    EXPECT_EQ(reply.status, 200) << reply.body;
    std::vector<Json> out;
    std::string_view rest = reply.body;
    bool done = false;
    while (!rest.empty()) {
      const size_t end = rest.find("\n\n");
      const std::string_view data = rest.substr(6, end - 6);
      rest.remove_prefix(end + 2);
      EXPECT_FALSE(done);
      done = data == "[DONE]";
      if (!done) out.push_back(*parse_json(data));
    }
    EXPECT_TRUE(done) << reply.body;
    return out;
  }
  Json whole(const char* path, const std::string& members) {
    const auto reply = post(path, "{" + members + "}");
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.json();
  }
};

const Json& only_choice(const Json& reply) {
  EXPECT_EQ(reply.find("choices")->as_array().size(), 1u);
  return reply.find("choices")->as_array()[0];
}

std::vector<int32_t> a_call(const std::string& id, const std::string& arguments) {
  return joined({{kCallBegin}, ids_of(id), {kArgumentBegin}, ids_of(arguments), {kCallEnd}});
}

const std::string kAsk = R"("messages":[{"role":"user","content":"hi"}],"thinking":{"type":"disabled"},)"
                         R"("tools":[{"type":"function","function":{"name":"add"}}])";

TEST_F(ChoicesTest, ARefusedPromptEndsThoseBeforeIt) {
  options_.accepts = 2;
  options_.hold_after = 1;
  start(ids_of("abcdef"));
  EXPECT_EQ(post(kCompletions, R"({"prompt":["a","b","c"],"n":2})").status, 429);
  EXPECT_TRUE(eventually([&] { return backend_->running() == 0; }));
  EXPECT_EQ(backend_->num_cancels(FinishReason::kCancelled), 2);
}

TEST_F(ChoicesTest, APromptMayFillTheContextToTheLastToken) {
  start(ids_of(std::string(300, 'z')));
  const auto status = [&](size_t prompt, const std::string& members) {
    return post(kCompletions, "{\"prompt\":\"" + std::string(prompt, 'a') + "\"" + members + "}").status;
  };
  EXPECT_EQ(status(250, R"(,"max_tokens":6)"), 200);
  EXPECT_EQ(status(250, R"(,"max_tokens":7)"), 400);
  EXPECT_EQ(status(255, ""), 200);
  EXPECT_EQ(backend_->submitted.back().sampling.max_tokens, 1) << "as many as fit";
  EXPECT_EQ(status(256, ""), 400);
  EXPECT_EQ(status(240, R"(,"max_tokens":5,"min_tokens":5)"), 200);
  EXPECT_EQ(status(240, R"(,"max_tokens":5,"min_tokens":6)"), 400);
  EXPECT_EQ(status(200, ""), 200);
  EXPECT_EQ(backend_->submitted.back().sampling.max_tokens, 16) << "the API's default";
  // The fixture's template adds two tokens.
  const auto chat = [&](size_t prompt) {
    return post(kChat, R"({"messages":[{"role":"user","content":")" + std::string(prompt, 'a') + "\"}]}").status;
  };
  EXPECT_EQ(chat(100), 200);
  EXPECT_EQ(backend_->submitted.back().sampling.max_tokens, 154) << "all the room there is";
  EXPECT_EQ(chat(253), 200);
  EXPECT_EQ(chat(254), 400);
}

TEST_F(ChoicesTest, SeedsAreTheClientsOrDiffer) {
  start(ids_of("a"));
  std::set<uint64_t> seeds;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(post(kCompletions, R"({"prompt":"x"})").status, 200);
    seeds.insert(backend_->submitted.back().sampling.seed);
  }
  EXPECT_EQ(seeds.size(), 4u);
  for (const char* seed : {"7", "0", "-1"}) {
    EXPECT_EQ(post(kCompletions, fmt::format("{}{}}}", R"({"prompt":"x","seed":)", seed)).status, 200);
    EXPECT_EQ(static_cast<int64_t>(backend_->submitted.back().sampling.seed), std::atoll(seed));
  }
}

TEST_F(ChoicesTest, EveryFieldReachesTheEngineAsItself) {
  start(ids_of("abc"));
  EXPECT_EQ(post(kCompletions, R"({"prompt":"xy","temperature":0.5,"top_p":0.25,"top_k":7,"min_p":0.125,
      "presence_penalty":0.75,"frequency_penalty":-0.5,"repetition_penalty":1.5,"min_tokens":2,"max_tokens":9,"seed":77,
      "priority":3,"timeout":5.5,"logprobs":4,"prompt_logprobs":2,"logit_bias":{"5":-1.5},"stop_token_ids":[9],"n":3})")
                .status,
            200);
  const EngineRequest& request = backend_->submitted.back();
  const SamplingParams& sampling = request.sampling;
  EXPECT_EQ(sampling.temperature, 0.5f);
  EXPECT_EQ(sampling.top_p, 0.25f);
  EXPECT_EQ(sampling.top_k, 7);
  EXPECT_EQ(sampling.min_p, 0.125f);
  EXPECT_EQ(sampling.presence_penalty, 0.75f);
  EXPECT_EQ(sampling.frequency_penalty, -0.5f);
  EXPECT_EQ(sampling.repetition_penalty, 1.5f);
  EXPECT_EQ(sampling.min_tokens, 2);
  EXPECT_EQ(sampling.max_tokens, 9);
  EXPECT_EQ(sampling.seed, 77u);
  EXPECT_EQ(sampling.logprobs, 4);
  EXPECT_EQ(sampling.prompt_logprobs, 2);
  EXPECT_EQ(sampling.stop_ids, (std::vector<int32_t>{258, 9}));
  ASSERT_EQ(sampling.logit_bias.size(), 1u);
  EXPECT_EQ(sampling.logit_bias[0], (std::pair<int32_t, float>{5, -1.5f}));
  EXPECT_EQ(request.n, 3);
  EXPECT_EQ(request.priority, 3);
  EXPECT_EQ(request.timeout_s, 5.5);
  EXPECT_EQ(*request.prompt, ids_of("xy"));
}

TEST_F(ChoicesTest, AStopEndsItsOwnChoiceOnly) {
  options_.tick_s = 0.001;
  options_.reply = [](const std::vector<int32_t>& prompt) {
    return ids_of(prompt == ids_of("a") ? "one STOP two three" : "four five six seven");
  };
  for (const int32_t per_chunk : {1, 2, 3, 7}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start();
    const std::string members = R"("prompt":["b","a","b"],"max_tokens":19,"stop":["STOP"])";
    const Json reply = whole(kCompletions, members);
    const auto& choices = reply.find("choices")->as_array();
    ASSERT_EQ(choices.size(), 3u);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(*choices[i].find("index"), Json(i));
      EXPECT_EQ(*choices[i].find("text"), Json(i == 1 ? "one " : "four five six seven"));
      EXPECT_EQ(*choices[i].find("finish_reason"), Json(i == 1 ? "stop" : "length"));
      EXPECT_EQ(*choices[i].find("stop_reason"), i == 1 ? Json("STOP") : Json());
    }
    EXPECT_EQ(*reply.find("usage")->find("completion_tokens"), Json(19 + 8 + 19));
    std::map<int64_t, std::string> texts, finishes;
    for (const Json& event : events(kCompletions, members))
      for (const Json& choice : event.find("choices")->as_array()) {
        const int64_t index = choice.find("index")->as_int();
        texts[index] += choice.find("text")->as_string();
        if (choice.find("finish_reason")->is_string()) finishes[index] += choice.find("finish_reason")->as_string();
      }
    EXPECT_EQ(texts,
              (std::map<int64_t, std::string>{{0, "four five six seven"}, {1, "one "}, {2, "four five six seven"}}));
    EXPECT_EQ(finishes, (std::map<int64_t, std::string>{{0, "length"}, {1, "stop"}, {2, "length"}}));
  }
}

TEST_F(ChoicesTest, AnEndAsTheLastAllowedTokenIsAStop) {
  start(ids_of("abc"));
  for (const auto& [max_tokens, finish] : std::map<int, const char*>{{3, "length"}, {4, "stop"}, {5, "stop"}}) {
    const Json reply = whole(kCompletions, fmt::format("{}{}", R"("prompt":"x","max_tokens":)", max_tokens));
    EXPECT_EQ(*only_choice(reply).find("finish_reason"), Json(finish)) << max_tokens;
    EXPECT_EQ(*reply.find("usage")->find("completion_tokens"), Json(std::min(max_tokens, 4)));
  }
}

TEST_F(ChoicesTest, TwoCallsKeepTheirArguments) {
  const std::vector<int32_t> reply = joined({{kSectionBegin},
                                             a_call("functions.add:0", R"({"a": 1})"),
                                             a_call("functions.add:1", R"({"b": 22})"),
                                             {kSectionEnd}});
  for (const int32_t per_chunk : {1, 4, 20, 200}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start(reply);
    const auto expect = [&](const std::map<int64_t, std::string>& ids,
                            const std::map<int64_t, std::string>& arguments) {
      EXPECT_EQ(ids, (std::map<int64_t, std::string>{{0, "functions.add:0"}, {1, "functions.add:1"}})) << per_chunk;
      EXPECT_EQ(arguments, (std::map<int64_t, std::string>{{0, R"({"a": 1})"}, {1, R"({"b": 22})"}})) << per_chunk;
    };
    std::map<int64_t, std::string> ids, arguments;
    for (const Json& event : events(kChat, kAsk))
      for (const Json& choice : event.find("choices")->as_array())
        if (const Json* calls = choice.find("delta")->find("tool_calls"))
          for (const Json& call : calls->as_array()) {
            const int64_t index = call.find("index")->as_int();
            if (const Json* id = call.find("id")) ids[index] += id->as_string();
            arguments[index] += call.find("function")->find("arguments")->as_string();
          }
    expect(ids, arguments);
    std::map<int64_t, std::string> whole_ids, whole_arguments;
    const Json answer = whole(kChat, kAsk);
    const Json& message = *only_choice(answer).find("message");
    for (const Json& call : message.find("tool_calls")->as_array()) {
      const auto index = static_cast<int64_t>(whole_ids.size());
      whole_ids[index] = call.find("id")->as_string();
      whole_arguments[index] = call.find("function")->find("arguments")->as_string();
    }
    expect(whole_ids, whole_arguments);
  }
}

TEST_F(ChoicesTest, WithoutParallelCallsTheFirstOneEndsTheReply) {
  const std::vector<int32_t> first = a_call("functions.add:0", R"({"a": 1})");
  const std::vector<int32_t> reply =
      joined({{kSectionBegin}, first, a_call("functions.add:1", "{}"), {kSectionEnd}, ids_of(std::string(100, 'x'))});
  options_.tick_s = 0.001;
  for (const int32_t per_chunk : {1, 200}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start(reply);
    const std::string members = kAsk + R"(,"parallel_tool_calls":false)";
    const Json answer = whole(kChat, members);
    EXPECT_EQ(only_choice(answer).find("message")->find("tool_calls")->as_array().size(), 1u);
    EXPECT_EQ(*only_choice(answer).find("finish_reason"), Json("tool_calls"));
    EXPECT_TRUE(only_choice(answer).find("stop_reason")->is_null());
    EXPECT_EQ(*answer.find("usage")->find("completion_tokens"), Json(std::ssize(first) + 1));
    size_t num_calls = 0;
    std::string finish;
    for (const Json& event : events(kChat, members))
      for (const Json& choice : event.find("choices")->as_array()) {
        if (const Json* calls = choice.find("delta")->find("tool_calls"))
          for (const Json& call : calls->as_array()) num_calls += call.find("id") != nullptr;
        if (choice.find("finish_reason")->is_string()) finish += choice.find("finish_reason")->as_string();
      }
    EXPECT_EQ(num_calls, 1u);
    EXPECT_EQ(finish, "tool_calls");
    EXPECT_EQ(backend_->num_cancels(FinishReason::kStop), per_chunk == 1 ? 2 : 0) << "the engine stops, too";
    const Json both = whole(kChat, kAsk + R"(,"parallel_tool_calls":true)");
    EXPECT_EQ(only_choice(both).find("message")->find("tool_calls")->as_array().size(), 2u);
  }
}

TEST_F(ChoicesTest, UsageComesOnceInAChunkOfItsOwnOrInEach) {
  start(ids_of("abc"));
  for (const char* path : {kCompletions, kChat}) {
    const std::string members =
        path == kChat ? R"("messages":[{"role":"user","content":"xy"}],"n":2)" : R"("prompt":"xyzw","n":2)";
    for (const Json& event : events(path, members)) EXPECT_EQ(event.find("usage"), nullptr);
    const auto with_usage = events(path, members + R"(,"stream_options":{"include_usage":true})");
    for (size_t i = 0; i < with_usage.size(); ++i) {
      const bool last = i + 1 == with_usage.size();
      EXPECT_EQ(with_usage[i].find("usage") != nullptr, last);
      EXPECT_EQ(with_usage[i].find("choices")->as_array().size(), last ? 0u : 1u);
    }
    const Json& usage = *with_usage.back().find("usage");
    EXPECT_EQ(*usage.find("prompt_tokens"), Json(4));  // of "xy", two more from the fixture's template
    EXPECT_EQ(*usage.find("completion_tokens"), Json(8));
    EXPECT_EQ(*usage.find("total_tokens"), Json(12));
    EXPECT_EQ(usage, *whole(path, members).find("usage"));
    const auto continuous =
        events(path, members + R"(,"stream_options":{"include_usage":true,"continuous_usage_stats":true})");
    for (const Json& event : continuous) EXPECT_NE(event.find("usage"), nullptr);
  }
}

TEST_F(ChoicesTest, LogprobsAndIdsOfAChunkBelongTogether) {
  for (const int32_t per_chunk : {1, 2, 64}) {
    TearDown();
    options_.tokens_per_chunk = per_chunk;
    start(ids_of("Hello, w\xC3\xB6rld"));
    const std::string members = R"("prompt":"ab","logprobs":1,"echo":true,"return_token_ids":true,"max_tokens":50)";
    Json::Array offsets, scores, ids;
    int num_prompts = 0;
    for (const Json& event : events(kCompletions, members)) {
      const Json& choice = only_choice(event);
      const auto& token_ids = choice.find("token_ids")->as_array();
      const bool first = choice.find("prompt_token_ids") != nullptr;
      num_prompts += first;
      EXPECT_EQ(choice.find("logprobs")->find("tokens")->as_array().size(), token_ids.size() + (first ? 2 : 0));
      for (const Json& id : token_ids) ids.push_back(id);
      for (const Json& at : choice.find("logprobs")->find("text_offset")->as_array()) offsets.push_back(at);
      for (const Json& score : choice.find("logprobs")->find("token_logprobs")->as_array()) scores.push_back(score);
    }
    EXPECT_EQ(num_prompts, 1);
    const Json reply = whole(kCompletions, members);
    const Json& choice = only_choice(reply);
    EXPECT_EQ(Json(offsets), *choice.find("logprobs")->find("text_offset"));
    EXPECT_EQ(Json(scores), *choice.find("logprobs")->find("token_logprobs"));
    EXPECT_EQ(Json(ids), *choice.find("token_ids"));
    const std::string chat =
        R"("messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":2,"return_token_ids":true)";
    for (const Json& event : events(kChat, chat)) {
      const Json* token_ids = only_choice(event).find("token_ids");
      if (token_ids == nullptr) continue;  // the chunk that opens
      const auto& content = only_choice(event).find("logprobs")->find("content")->as_array();
      ASSERT_EQ(content.size(), token_ids->as_array().size());
      for (size_t i = 0; i < content.size(); ++i) {
        const double score = -static_cast<double>(token_ids->as_array()[i].as_int()) / 100;
        EXPECT_NEAR(content[i].find("logprob")->as_double(), score, 1e-6);
        EXPECT_EQ(content[i].find("top_logprobs")->as_array().size(), 2u);
      }
    }
  }
}

TEST_F(ChoicesTest, IdsAndNamesOfReplies) {
  start(ids_of("ab"));
  std::set<std::string> seen;
  for (const auto& [path, members, prefix, object] : std::vector<std::array<std::string, 4>>{
           {kCompletions, R"("prompt":"x","model":"alias")", "cmpl-", "text_completion"},
           {kChat, R"("messages":[{"role":"user","content":"x"}],"model":"alias")", "chatcmpl-", "chat.completion"}}) {
    const auto reply = post(path, "{" + members + "}");
    const Json json = reply.json();
    const std::string id = json.find("id")->as_string();
    EXPECT_TRUE(id.starts_with(prefix));
    EXPECT_NE(reply.head.find("X-Request-Id: " + id.substr(prefix.size()) + "\r\n"), std::string::npos) << reply.head;
    EXPECT_EQ(*json.find("object"), Json(object));
    seen.insert(id);
    std::set<std::string> of_stream;
    for (const Json& event : events(path.c_str(), members)) {
      of_stream.insert(event.find("id")->as_string());
      EXPECT_EQ(*event.find("object"), Json(path == kChat ? object + ".chunk" : object));
      EXPECT_EQ(*event.find("model"), Json("alias"));
    }
    EXPECT_EQ(of_stream.size(), 1u);
    seen.insert(of_stream.begin(), of_stream.end());
  }
  EXPECT_EQ(seen.size(), 4u);
}

TEST_F(ChoicesTest, AClientsRequestIdIsTheRepliesId) {
  start(ids_of("ab"));
  const auto id_for = [&](const std::string& given) {
    return post(kCompletions, R"({"prompt":"x"})", "X-Request-Id: " + given + "\r\n").json().find("id")->as_string();
  };
  EXPECT_EQ(id_for("Mine_1.2-3"), "cmpl-Mine_1.2-3");
  EXPECT_EQ(id_for(std::string(128, 'a')), "cmpl-" + std::string(128, 'a'));
  for (const std::string& other : {std::string("a b"), std::string("a\"b"), std::string(129, 'a'), std::string()})
    EXPECT_EQ(id_for(other).size(), 5u + 32u) << other;
}

}  // namespace
}  // namespace perigee

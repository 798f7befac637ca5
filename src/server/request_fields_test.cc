#include "server/request_fields.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>

#include "server/chat_request.h"
#include "server/completion_request.h"

namespace perigee {
namespace {

RequestContext test_context() {
  RequestContext context;
  context.vocab = 512;
  context.max_model_len = 256;
  context.eos_ids = {258};
  context.defaults.temperature = 0.6;
  return context;
}

// Parses {"prompt": "x", MEMBERS}; the error's field, or "" when accepted.
std::string completion_fault(const std::string& members) {
  const RequestContext context = test_context();
  const auto body = parse_body(R"({"prompt":"x",)" + members + "}", context.caps);
  if (!body.ok()) return "json";
  const auto request = parse_completion_request(*body, context);
  if (request.ok()) return "";
  EXPECT_EQ(request.error().code, Code::kBadInput);
  EXPECT_NE(request.error().message.find(request.error().field), std::string::npos) << request.error().message;
  return request.error().field;
}

std::string chat_fault(const std::string& members) {
  const RequestContext context = test_context();
  const auto body = parse_body("{" + members + "}", context.caps);
  if (!body.ok()) return "json";
  const auto request = parse_chat_request(*body, context);
  return request.ok() ? "" : request.error().field;
}

struct NumberField {
  const char* name;
  double low, high;
  bool integer;
  double open_low = NAN;  // this value is refused although it is the bound
};

const NumberField kNumbers[] = {
    {"temperature", 0, 100, false},
    {"top_p", 0, 1, false, 0},
    {"min_p", 0, 1, false},
    {"presence_penalty", -2, 2, false},
    {"frequency_penalty", -2, 2, false},
    {"repetition_penalty", 0.01, 100, false},
    {"timeout", 0, 86400, false},
    {"top_k", -1, 2147483647, true},
    {"min_tokens", 0, 2147483647, true},
    {"n", 1, 8, true},
    {"logprobs", 0, 20, true},
    {"prompt_logprobs", 0, 20, true},
    {"max_tokens", 1, 256, true},
    {"priority", -2147483648.0, 2147483647, true},
    {"seed", -9.3e18, 9.2233720368547e18, true},
};

TEST(RequestNumbers, EveryFieldTimesEveryOddValue) {
  const std::pair<const char*, double> values[] = {{"-0.0", 0},
                                                   {"-1", -1},
                                                   {"0", 0},
                                                   {"1", 1},
                                                   {"1e308", 1e308},
                                                   {"2147483648", 2147483648.0},
                                                   {"9007199254740993", 9007199254740993.0},
                                                   {"1.5", 1.5},
                                                   {"256", 256},
                                                   {"257", 257},
                                                   {"-2", -2},
                                                   {"21", 21},
                                                   {"8", 8},
                                                   {"9", 9},
                                                   {"0.5", 0.5}};
  for (const NumberField& field : kNumbers)
    for (const auto& [text, value] : values) {
      // A double beyond 2^53 is not taken for an integer, nor is a fraction.
      const bool whole = value == std::floor(value) && !(std::string(text) == "1e308");
      const bool fits = value >= field.low && value <= field.high && value != field.open_low;
      const std::string fault = completion_fault(std::string("\"") + field.name + "\":" + text);
      EXPECT_EQ(fault, fits && (whole || !field.integer) ? "" : field.name) << field.name << " = " << text;
    }
}

TEST(RequestNumbers, WrongTypesAndNonFinite) {
  for (const NumberField& field : kNumbers) {
    for (const char* text : {"\"1\"", "true", "[]", "{}"})
      EXPECT_EQ(completion_fault(std::string("\"") + field.name + "\":" + text), field.name) << text;
    for (const char* text : {"NaN", "Infinity", "-Infinity"})
      EXPECT_EQ(completion_fault(std::string("\"") + field.name + "\":" + text), "json");
    const std::string huge = completion_fault(std::string("\"") + field.name + "\":1e999");
    EXPECT_TRUE(huge == field.name || huge == "json") << huge;
    EXPECT_EQ(completion_fault(std::string("\"") + field.name + "\":null"), "") << field.name;
  }
}

TEST(RequestFields, Caps) {
  EXPECT_EQ(completion_fault(R"("stop":["1","2","3","4","5","6","7","8","9"])"), "stop");
  EXPECT_EQ(completion_fault(R"("stop":")" + std::string(257, 'a') + "\""), "stop");
  EXPECT_EQ(completion_fault(R"("stop":[""])"), "stop");
  EXPECT_EQ(completion_fault(R"("stop":[1])"), "stop");
  EXPECT_EQ(completion_fault(R"("stop":")" + std::string(256, 'a') + "\""), "");
  EXPECT_EQ(completion_fault(R"("cache_salt":")" + std::string(257, 'a') + "\""), "cache_salt");
  EXPECT_EQ(completion_fault(R"("stop_token_ids":[512])"), "stop_token_ids");
  EXPECT_EQ(completion_fault(R"("stop_token_ids":[-1])"), "stop_token_ids");
  EXPECT_EQ(completion_fault(R"("logit_bias":{"512":1})"), "logit_bias");
  EXPECT_EQ(completion_fault(R"("logit_bias":{"5x":1})"), "logit_bias");
  EXPECT_EQ(completion_fault(R"("logit_bias":{"5":101})"), "logit_bias");
  EXPECT_EQ(completion_fault(R"("logit_bias":{"5":-100})"), "");
  EXPECT_EQ(completion_fault(R"("stream_options":{"include_usage":true})"), "stream_options");
  EXPECT_EQ(completion_fault(R"("stream":true,"prompt_logprobs":1)"), "prompt_logprobs");
}

TEST(RequestFields, DangerousAndUnsupportedAreRefusedUnknownAreNot) {
  for (const char* name : {"prompt_embeds", "multi_modal_data", "structured_outputs", "grammar", "kv_transfer_params",
                           "chat_template", "allowed_token_ids", "suffix", "best_of", "use_beam_search"})
    EXPECT_EQ(completion_fault(std::string("\"") + name + "\":\"x\""), name);
  EXPECT_EQ(completion_fault(R"("response_format":{"type":"text"},"use_beam_search":false,"suffix":null)"), "");
  const RequestContext context = test_context();
  const auto body = parse_body(R"({"prompt":"x","made_up":1,"temperature":0})", context.caps);
  const auto request = parse_completion_request(*body, context);
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->fields.unknown, std::vector<std::string>{"made_up"});
}

TEST(RequestFields, DefaultsAndGreedy) {
  const RequestContext context = test_context();
  const auto parse = [&](const char* text) {
    return parse_completion_request(*parse_body(text, context.caps), context)->fields.sampling;
  };
  EXPECT_FLOAT_EQ(parse(R"({"prompt":"x"})").temperature, 0.6f);
  EXPECT_EQ(parse(R"({"prompt":"x","temperature":0.000001})").temperature, 0.0f);
  EXPECT_FLOAT_EQ(parse(R"({"prompt":"x","temperature":0.001})").temperature, 0.01f);
  EXPECT_EQ(parse(R"({"prompt":"x"})").stop_ids, std::vector<int32_t>{258});
  EXPECT_TRUE(parse(R"({"prompt":"x","ignore_eos":true})").stop_ids.empty());
  EXPECT_EQ(parse(R"({"prompt":"x","ignore_eos":true,"stop_token_ids":[7]})").stop_ids, std::vector<int32_t>{7});
}

TEST(CompletionPrompt, ShapesAndDegenerateOnes) {
  const RequestContext context = test_context();
  const auto count = [&](const std::string& prompt) {
    const auto request = parse_completion_request(*parse_body("{\"prompt\":" + prompt + "}", context.caps), context);
    return request.ok() ? static_cast<int>(request->prompts.size()) : -1;
  };
  EXPECT_EQ(count(R"("abc")"), 1);
  EXPECT_EQ(count(R"(["abc","d"])"), 2);
  EXPECT_EQ(count("[1,2,3]"), 1);
  EXPECT_EQ(count("[[1,2],[3]]"), 2);
  EXPECT_EQ(count(R"(["abc",[3]])"), 2);
  for (const char* bad : {"\"\"", "[]", "[\"\"]", "[[]]", "[512]", "[-1]", "[1.5]", "[1,\"a\"]", "{}", "7", "[[[1]]]"})
    EXPECT_EQ(count(bad), -1) << bad;
  EXPECT_EQ(count("null"), -1);
}

TEST(CompletionPrompt, WithoutTokenizerOnlyIds) {
  RequestContext context = test_context();
  context.has_tokenizer = false;
  EXPECT_FALSE(parse_completion_request(*parse_body(R"({"prompt":"x"})", context.caps), context).ok());
  const auto ids = parse_completion_request(*parse_body(R"({"prompt":[1]})", context.caps), context);
  ASSERT_TRUE(ids.ok());
  EXPECT_TRUE(ids->fields.tokens_as_ids);
}

TEST(ChatRequest, Faults) {
  const std::string user = R"("messages":[{"role":"user","content":"hi"}])";
  EXPECT_EQ(chat_fault(user), "");
  EXPECT_EQ(chat_fault(R"("messages":[])"), "messages");
  EXPECT_EQ(chat_fault(R"("messages":[{"role":"robot","content":"hi"}])"), "messages[0].role");
  EXPECT_EQ(chat_fault(R"("messages":[{"role":"user"}])"), "messages[0].content");
  EXPECT_EQ(chat_fault(R"("messages":[{"role":"tool","content":"hi"}])"), "messages[0].tool_call_id");
  EXPECT_EQ(chat_fault(R"("messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}])"),
            "messages[0].content");
  EXPECT_EQ(chat_fault(user + R"(,"tools":[])"), "tools");
  const std::string tools = R"(,"tools":[{"type":"function","function":{"name":"f","parameters":{}}}])";
  EXPECT_EQ(chat_fault(user + tools), "");
  EXPECT_EQ(chat_fault(user + R"(,"tools":[{"type":"function","function":{"name":"a b"}}])"), "tools");
  EXPECT_EQ(chat_fault(user + tools + R"(,"tool_choice":"required")"), "");
  EXPECT_EQ(chat_fault(user + tools + R"(,"tool_choice":"bogus")"), "tool_choice");
  EXPECT_EQ(chat_fault(user + R"(,"tool_choice":"required")"), "tool_choice");
  EXPECT_EQ(chat_fault(user + R"(,"tool_choice":"auto")"), "");
  EXPECT_EQ(chat_fault(user + R"(,"top_logprobs":3)"), "top_logprobs");
  EXPECT_EQ(chat_fault(user + R"(,"thinking":{"type":"maybe"})"), "thinking.type");
  EXPECT_EQ(chat_fault(user + R"(,"chat_template_kwargs":{"messages":[]})"), "chat_template_kwargs.messages");
  EXPECT_EQ(chat_fault(user + R"(,"chat_template_kwargs":{"thinking":1})"), "chat_template_kwargs.thinking");
  EXPECT_EQ(chat_fault(user + R"(,"continue_final_message":true)"), "continue_final_message");
}

TEST(ChatRequest, MessagesInTheTemplatesShape) {
  const RequestContext context = test_context();
  const auto body = parse_body(R"({"messages":[
      {"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
      {"role":"assistant","content":null,"reasoning":"r",
      "tool_calls":[{"id":"functions.f:0","function":{"name":"f"}}]}],
      "tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none","thinking":{"type":"disabled"},
      "max_tokens":5,"max_completion_tokens":5})",
                               context.caps);
  const auto request = parse_chat_request(*body, context);
  ASSERT_TRUE(request.ok()) << request.error().message;
  const auto& messages = request->conversation.messages.as_array();
  EXPECT_EQ(*messages[0].find("role"), Json("system"));
  EXPECT_EQ(*messages[0].find("content"), Json("ab"));
  EXPECT_EQ(*messages[1].find("reasoning_content"), Json("r"));
  EXPECT_EQ(messages[1].find("content"), nullptr);
  EXPECT_TRUE(request->conversation.tools.is_null());
  EXPECT_EQ(*request->template_kwargs.find("thinking"), Json(false));
  EXPECT_EQ(request->fields.max_tokens, 5);
}

// What the grammar's compiler is asked for.
TEST(ChatRequest, ToolsAndTheirChoiceGiveTheReplyItsForm) {
  using Calls = GrammarSpec::Calls;
  const RequestContext context = test_context();
  const auto format = [&](const std::string& members) {
    const auto body =
        parse_body(R"({"messages":[{"role":"system","tools":[{"type":"function","function":{"name":"g"}}]},
        {"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"a":1}}}])" +
                       members + "}",
                   context.caps);
    const auto request = parse_chat_request(*body, context);
    CHECK(request.ok(), request.error().message);
    return request->format;
  };
  const auto any = format("");
  ASSERT_TRUE(any.has_value());
  EXPECT_EQ(any->spec.kind, GrammarSpec::Kind::kToolCalls);
  EXPECT_EQ(any->spec.calls, Calls::kAuto);
  EXPECT_EQ(any->spec.tools, (std::vector<GrammarSpec::Tool>{{"f", R"({"a":1,"type":"object"})"}, {"g", ""}}));
  EXPECT_EQ(any->tools[0].field, "tools[0]");
  EXPECT_EQ(any->tools[1].field, "messages[0].tools[0]");
  EXPECT_TRUE(any->may_lapse());
  EXPECT_EQ(format(R"(,"parallel_tool_calls":false)")->spec.calls, Calls::kAutoOne);
  const auto required = format(R"(,"tool_choice":"required")");
  EXPECT_EQ(required->spec.calls, Calls::kRequired);
  EXPECT_FALSE(required->may_lapse());
  EXPECT_EQ(format(R"(,"tool_choice":"required","parallel_tool_calls":false)")->spec.calls, Calls::kExactlyOne);
  const auto named = format(R"(,"tool_choice":{"type":"function","function":{"name":"g"}})");
  EXPECT_EQ(named->spec.calls, Calls::kExactlyOne);
  EXPECT_EQ(named->spec.tools, (std::vector<GrammarSpec::Tool>{{"g", ""}}));
  ASSERT_EQ(named->tools.size(), 1u);
  EXPECT_EQ(named->tools[0].field, "messages[0].tools[0]");
  EXPECT_FALSE(format(R"(,"tool_choice":"none")").has_value());
  EXPECT_FALSE(format(R"(,"ignore_eos":true)").has_value());
  EXPECT_EQ(format(R"(,"tool_choice":"none","guided_choice":["a"])")->spec.choices, std::vector<std::string>{"a"});
}

TEST(OutputFormat, FaultsOfItsCompilerAreToldByTheFieldsOfTheRequest) {
  const OutputFormat schema{.field = "response_format.json_schema.schema"};
  const Error inside = fault_of(schema, bad_input("/properties/a: no"));
  EXPECT_EQ(inside.message, "response_format.json_schema.schema/properties/a: no");
  EXPECT_EQ(inside.field, "response_format.json_schema.schema");
  EXPECT_EQ(fault_of(schema, bad_input("no")).message, "response_format.json_schema.schema: no");
  const OutputFormat tools{.field = "tool_choice", .tools = {{"tools[3]", false}, {"messages[1].tools[0]", true}}};
  const Error tool = fault_of(tools, bad_input("tools[1]/parameters/type: no"));
  EXPECT_EQ(tool.message, "messages[1].tools[0].function/parameters/type: no");
  EXPECT_EQ(tool.field, "messages[1].tools[0].function");
  EXPECT_EQ(fault_of(tools, bad_input("tools[2]/x: no")).field, "tool_choice");
  EXPECT_EQ(fault_of(tools, bad_input("no markers")).message, "tool_choice: no markers");
}

// An agent's odd tool does not cost it the others; what is strict or forced is refused instead.
TEST(OutputFormat, SchemasOfCallsThatNobodyForcesMayBeLetGo) {
  const std::string good = R"({"type":"object"})", bad = R"({"type":"strnig"})";
  OutputFormat format{.spec = {.kind = GrammarSpec::Kind::kToolCalls, .tools = {{"f", good}, {"g", bad}, {"h", bad}}},
                      .field = "tools",
                      .tools = {{"tools[0]", false}, {"tools[1]", false}, {"tools[2]", true}},
                      .wanted = false};
  EXPECT_TRUE(relax(format, std::chrono::seconds(-1)).empty()) << "looking took too long";
  const std::vector<std::string> reasons = relax(format);
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_TRUE(reasons[0].starts_with("arguments of g are not held to its schema: ")) << reasons[0];
  EXPECT_EQ(format.spec.tools, (std::vector<GrammarSpec::Tool>{{"f", good}, {"g", ""}, {"h", bad}}));
  EXPECT_TRUE(relax(format).empty());
  EXPECT_FALSE(format.may_lapse());
  format.tools[2].strict = false;
  EXPECT_TRUE(format.may_lapse());
  format.wanted = true;
  EXPECT_TRUE(relax(format).empty());
  EXPECT_FALSE(format.may_lapse());
}

// Long lists and strings of the sizes that a model of this length can use pass; anything longer is refused while it is
// parsed, and so are more members than any request has.
TEST(ParseBody, CapsFollowTheModelsLength) {
  const RequestCaps caps = caps_for({}, 200'000, 128);
  const auto list = [](size_t n) {
    std::string text = R"({"prompt":[0)";
    for (size_t i = 1; i < n; ++i) text += ",0";
    return text + "]}";
  };
  EXPECT_TRUE(parse_body(list(200'000), caps).ok());
  EXPECT_FALSE(parse_body(list(200'001), caps).ok());
  EXPECT_TRUE(parse_body(list(65'536), caps_for({}, 4096, 128)).ok());
  EXPECT_FALSE(parse_body(list(65'537), caps_for({}, 4096, 128)).ok());
  const auto text = [](size_t n) { return R"({"prompt":")" + std::string(n, 'x') + "\"}"; };
  EXPECT_TRUE(parse_body(text(200'000 * 128), caps).ok());
  EXPECT_FALSE(parse_body(text(200'000 * 128 + 1), caps).ok());
  std::string members;
  for (int i = 0; i < 257; ++i) members += fmt::format("{}\"m{}\":0", i > 0 ? "," : "", i);
  const auto many = parse_body("{" + members + "}", caps);
  ASSERT_FALSE(many.ok());
  EXPECT_EQ(many.error().message, "the body must have at most 256 members, got 257");
}

}  // namespace
}  // namespace perigee

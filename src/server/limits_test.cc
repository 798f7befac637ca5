// Every cap of a request admits exactly its number and refuses one more.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "server/chat_request.h"
#include "server/completion_request.h"

namespace perigee {
namespace {

RequestContext test_context() {
  RequestContext context;
  context.vocab = 512;
  context.max_model_len = 256;
  context.eos_ids = {258};
  return context;
}

std::string completion_fault(const std::string& members) {
  const RequestContext context = test_context();
  const auto body = parse_body(fmt::format("{{{}}}", members), context.caps);
  if (!body.ok()) return body.error().message;
  const auto request = parse_completion_request(*body, context);
  return request.ok() ? "" : request.error().field;
}
std::string chat_fault(const std::string& members) {
  const RequestContext context = test_context();
  const auto body = parse_body(fmt::format("{{{}}}", members), context.caps);
  if (!body.ok()) return body.error().message;
  const auto request = parse_chat_request(*body, context);
  return request.ok() ? "" : request.error().field;
}

// `count` entries made by `entry`, joined with commas.
std::string list(size_t count, std::string (*entry)(size_t)) {
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    out += entry(i);
  }
  return out;
}
std::string text(size_t) {
  return R"("x")";
}
std::string number(size_t i) {
  return std::to_string(i % 512);
}
std::string user(size_t) {
  return R"({"role":"user","content":"x"})";
}
std::string part(size_t) {
  return R"({"type":"text","text":"x"})";
}
std::string tool(size_t i) {
  return fmt::format("{}{}\"}}}}", R"({"function":{"name":"f)", i);
}
std::string variable(size_t i) {
  return fmt::format("\"k{}\":0", i);
}
std::string letters(size_t count) {
  return std::string(count, 'a');
}

TEST(Limits, OfCompletionsAreInclusive) {
  const RequestCaps caps;
  const auto fault = [](const std::string& members) {
    return completion_fault(fmt::format("{}{}", R"("prompt":"x",)", members));
  };
  for (const size_t over : {0, 1}) {
    const auto expect = [&](const std::string& found, const char* field) {
      EXPECT_EQ(found, over ? field : "") << field;
    };
    expect(fault(fmt::format("\"stop\":[{}]", list(caps.max_stops + over, text))), "stop");
    expect(fault(fmt::format("\"stop\":\"{}\"", letters(caps.max_stop_bytes + over))), "stop");
    expect(fault(fmt::format("\"stop_token_ids\":[{}]", list(caps.max_stop_ids + over, number))), "stop_token_ids");
    expect(fault(fmt::format("\"n\":{}", caps.max_n + static_cast<int64_t>(over))), "n");
    expect(fault(fmt::format("\"logprobs\":{}", caps.max_logprobs + static_cast<int64_t>(over))), "logprobs");
    expect(fault(fmt::format("\"prompt_logprobs\":{}", caps.max_logprobs + static_cast<int64_t>(over))),
           "prompt_logprobs");
    expect(fault(fmt::format("\"cache_salt\":\"{}\"", letters(caps.max_string_bytes + over))), "cache_salt");
    expect(fault(fmt::format("\"user\":\"{}\"", letters(caps.max_string_bytes + over))), "user");
    expect(fault(fmt::format("\"max_tokens\":{}", 256 + over)), "max_tokens");
    expect(fault(fmt::format("\"timeout\":{}", static_cast<int64_t>(caps.max_timeout_s) + static_cast<int64_t>(over))),
           "timeout");
    expect(completion_fault(fmt::format("\"prompt\":[{}]", list(caps.max_prompts + over, text))), "prompt");
    expect(completion_fault(fmt::format("\"prompt\":[{}]", 511 + over)), "prompt");
    expect(fault(fmt::format("\"stop_token_ids\":[{}]", 511 + over)), "stop_token_ids");
    expect(fault(fmt::format("\"logit_bias\":{{\"{}\":1}}", 511 + over)), "logit_bias");
  }
}

TEST(Limits, OfChatAreInclusive) {
  const RequestCaps caps;
  const std::string ask = R"("messages":[{"role":"user","content":"x"}],)";
  for (const size_t over : {0, 1}) {
    const auto expect = [&](const std::string& found, const char* field) {
      EXPECT_EQ(found, over ? field : "") << field;
    };
    expect(chat_fault(fmt::format("\"messages\":[{}]", list(caps.max_messages + over, user))), "messages");
    expect(chat_fault(
               fmt::format("{}{}]}}]", R"("messages":[{"role":"user","content":[)", list(caps.max_parts + over, part))),
           "messages[0].content");
    expect(chat_fault(fmt::format("{}\"tools\":[{}]", ask, list(caps.max_tools + over, tool))), "tools");
    expect(chat_fault(fmt::format("{}{}{}\"}}}}]", ask, R"("tools":[{"function":{"name":")",
                                  letters(caps.max_tool_name_bytes + over))),
           "tools");
    expect(chat_fault(
               fmt::format("{}\"chat_template_kwargs\":{{{}}}", ask, list(caps.max_template_kwargs + over, variable))),
           "chat_template_kwargs");
    const int64_t top = caps.max_logprobs + static_cast<int64_t>(over);
    expect(chat_fault(fmt::format("{}\"logprobs\":true,\"top_logprobs\":{}", ask, top)), "top_logprobs");
  }
}

}  // namespace
}  // namespace perigee

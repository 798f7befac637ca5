// The form that a request asks for reaches the engine as a constraint, or is a 400 before the first byte.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/log.h"
#include "server/api_fixture.h"

namespace perigee {
namespace {

class ConstraintTest : public ApiTest {
 protected:
  static std::string chat(const std::string& members) {
    return R"({"messages":[{"role":"user","content":"xy"}],)" + members + "}";
  }
  static std::string tool(const std::string& parameters, const std::string& more = "") {
    return R"({"type":"function","function":{"name":"f","parameters":)" + parameters + more + "}}";
  }
  // The constraint of the request with these members, null where it has none.
  std::shared_ptr<const Constraint> constraint(const std::string& path, const std::string& body) {
    const size_t before = backend_->submitted.size();
    const auto reply = post(path, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return backend_->submitted.size() > before ? backend_->submitted.back().constraint : nullptr;
  }
  std::shared_ptr<const Constraint> of_chat(const std::string& members) {
    return constraint("/v1/chat/completions", chat(members));
  }
};

TEST_F(ConstraintTest, FormsReachTheEngine) {
  start(ids_of("ok"));
  EXPECT_EQ(of_chat(R"("max_tokens":9)"), nullptr);
  EXPECT_EQ(of_chat(R"("response_format":{"type":"text"})"), nullptr);
  for (const char* form :
       {R"("response_format":{"type":"json_object"})", R"("guided_choice":["a","b"])", R"("guided_regex":"a+")",
        R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"integer"}}})",
        R"("structured_outputs":{"grammar":"root ::= \"a\""})"}) {
    const auto made = of_chat(form);
    ASSERT_NE(made, nullptr) << form;
    EXPECT_NE(constraint("/v1/completions", std::string(R"({"prompt":"x",)") + form + "}"), nullptr) << form;
    EXPECT_NE(of_chat(std::string(form) + R"(,"stream":true)"), nullptr) << form;
  }
}

// What the prompt leaves open is free first: the shortest reply has one id more, the end of the reasoning.
TEST_F(ConstraintTest, TheFormBeginsAfterReasoningThatThePromptLeavesOpen) {
  start(ids_of("ok"));
  const auto open = of_chat(R"("guided_choice":["a"])");
  const auto closed = of_chat(R"("guided_choice":["a"],"thinking":{"type":"disabled"})");
  ASSERT_NE(open, nullptr);
  ASSERT_NE(closed, nullptr);
  EXPECT_EQ(closed->shortest(), 2);  // "a" and the end
  EXPECT_EQ(open->shortest(), 3);
}

TEST_F(ConstraintTest, ToolsReachTheEngine) {
  start(ids_of("ok"));
  const std::string tools = R"("tools":[)" + tool(R"({"type":"object"})") + "]";
  EXPECT_NE(of_chat(tools), nullptr);
  EXPECT_NE(of_chat(tools + R"(,"tool_choice":"required")"), nullptr);
  EXPECT_EQ(of_chat(tools + R"(,"tool_choice":"none")"), nullptr);
  EXPECT_EQ(of_chat(tools + R"(,"ignore_eos":true,"max_tokens":4)"), nullptr);
}

TEST_F(ConstraintTest, AnOddSchemaCostsACallThatNobodyForcesItsFormOnly) {
  start(ids_of("ok"));
  const std::string odd = tool(R"({"type":"strnig"})"), strict = tool(R"({"type":"strnig"})", R"(,"strict":true)");
  testing::internal::CaptureStderr();
  EXPECT_NE(of_chat(R"("tools":[)" + odd + "]"), nullptr) << "its name is still held to";
  EXPECT_NE(of_chat(R"("tools":[)" + odd + "]"), nullptr);
  flush_log();
  const std::string log = testing::internal::GetCapturedStderr();
  const size_t said = log.find("arguments of f are not held to its schema");
  EXPECT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("are not held to", said + 20), std::string::npos) << "said once: " << log;
  for (const std::string& members :
       {R"("tools":[)" + strict + "]", R"("tools":[)" + odd + R"(],"tool_choice":"required")"})
    for (const char* stream : {"", R"(,"stream":true)"}) {
      const auto reply = post("/v1/chat/completions", chat(members + stream));
      EXPECT_EQ(reply.status, 400) << reply.body;
      EXPECT_EQ(*reply.json().find("error")->find("param"), Json("tools[0].function")) << reply.body;
    }
}

TEST_F(ConstraintTest, AFormThatDoesNotFitIsRefusedWithBothNumbers) {
  start(ids_of("ok"));
  for (const char* stream : {"", R"(,"stream":true)"}) {
    const auto reply = post(
        "/v1/chat/completions",
        chat(R"("max_tokens":4,"guided_choice":["abcdefgh"],"thinking":{"type":"disabled"})" + std::string(stream)));
    EXPECT_EQ(reply.status, 400) << reply.body;
    const Json error = *reply.json().find("error");
    EXPECT_EQ(*error.find("param"), Json("max_tokens"));
    const std::string message = error.find("message")->as_string();
    EXPECT_NE(message.find(" 9 tokens"), std::string::npos) << message;
    EXPECT_NE(message.find("leave 4"), std::string::npos) << message;
  }
  // The default of completions, and the room of the context for chats.
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x","guided_choice":["abcdefghijklmnopqrst"]})").status, 400);
  EXPECT_EQ(post("/v1/chat/completions", chat(R"("guided_choice":[")" + std::string(255, 'a') + "\"]")).status, 400);
  EXPECT_TRUE(backend_->submitted.empty());
}

TEST_F(ConstraintTest, FaultsAreToldByTheirField) {
  start(ids_of("ok"));
  const auto fault = [&](const std::string& members) {
    const auto reply = post("/v1/chat/completions", chat(members));
    EXPECT_EQ(reply.status, 400) << reply.body;
    return reply.json().find("error")->find("param")->as_string();
  };
  EXPECT_EQ(fault(R"("guided_json":"{")"), "guided_json");
  EXPECT_EQ(fault(R"("guided_regex":"(")"), "guided_regex");
  EXPECT_EQ(fault(R"("structured_outputs":{"grammar":"root ::= nowhere"})"), "structured_outputs.grammar");
  EXPECT_EQ(fault(R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"strnig"}}})"),
            "response_format.json_schema.schema");
  EXPECT_TRUE(backend_->submitted.empty());
}

}  // namespace
}  // namespace perigee

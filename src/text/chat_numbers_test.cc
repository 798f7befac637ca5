// Numbers that no machine type holds reach the prompt digit by digit: in tools, in calls of the history, in kwargs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "text/chat_prompt.h"

namespace perigee {
namespace {

Json json(std::string_view text) {
  return parse_json(text, {.max_depth = 256}).value();
}

std::string rendered(const std::string& source, const Json& messages, const Json& tools, const Json& kwargs = {}) {
  ChatPromptOptions options;
  options.template_kwargs = kwargs;
  const auto text = ChatPrompt::create(source).value().render(messages, tools, options,
                                                              [](std::string_view same) { return std::string(same); });
  return text.ok() ? *text : "ERROR " + text.error().message;
}

const char* const kUser = R"([{"role":"user","content":"q"}])";

TEST(ChatNumbers, OfToolsInBothForms) {
  const Json tools = json(R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{
      "id":{"type":"integer","default":12345678901234567890,"minimum":-12345678901234567890,"maximum":1e999},
      "kind":{"type":"integer","enum":[98765432109876543210,1]}}}}}])");
  const std::string as_text = rendered("{{ tools_ts_str }}", json(kUser), tools);
  for (const char* part : {"// Default: 12345678901234567890\n", "maximum: 1e999, minimum: -12345678901234567890\n",
                           "kind?: 98765432109876543210 | 1"})
    EXPECT_NE(as_text.find(part), std::string::npos) << part << as_text;
  const std::string as_json = rendered("{{ tools | tojson }}", json(kUser), tools);
  EXPECT_NE(as_json.find(R"("default": 12345678901234567890, "minimum": -12345678901234567890, "maximum": 1e999)"),
            std::string::npos)
      << as_json;
}

TEST(ChatNumbers, OfCallsInTheHistory) {
  const char* source =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}"
      "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }};"
      "{% endfor %}{% endfor %}";
  const Json messages = json(R"([{"role":"user","content":"q"},{"role":"assistant","content":null,"tool_calls":[
      {"id":"functions.f:0","function":{"name":"f",
       "arguments":{"a":12345678901234567890,"b":[0.12345678901234567890]}}},
      {"id":"functions.f:1","function":{"name":"f","arguments":"{\"a\":12345678901234567890}"}}]}])");
  EXPECT_EQ(rendered(source, messages, {}),
            R"({"a": 12345678901234567890, "b": [0.12345678901234567890]};{"a":12345678901234567890};)");
}

TEST(ChatNumbers, InExpressions) {
  const Json kwargs = json(R"({"big":12345678901234567890,"long":0.12345678901234567890,"huge":1e999})");
  const auto value = [&](const std::string& expression) {
    return rendered("{{ " + expression + " }}", json(kUser), {}, kwargs);
  };
  EXPECT_EQ(value("big ~ '|' ~ [big, long] ~ huge"),
            "12345678901234567890|[12345678901234567890, 0.12345678901234567890]1e999");
  EXPECT_EQ(value("(big is integer) ~ (big is float) ~ (long is float) ~ (long is integer) ~ (big is number)"),
            "TrueFalseTrueFalseTrue");
  EXPECT_EQ(value("'yes' if big and big > 5 and big == big and long < 1 else 'no'"), "yes");
  EXPECT_EQ(value("big + 1"), "1.2345678901234567e+19");
  EXPECT_EQ(value("huge | int").substr(0, 6), "ERROR ");
  EXPECT_EQ(value("range(big)").substr(0, 6), "ERROR ");
}

TEST(ChatNumbers, ValuesAsDeepAsARequestMayBe) {
  std::string deep = "1";
  for (int i = 0; i < 124; ++i) deep = fmt::format("[{}]", deep);  // with messages, a call and its arguments: 128
  const Json messages =
      json(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a":)" + deep + "}}}]}]");
  EXPECT_EQ(rendered("{{ messages[0].tool_calls[0].function.arguments.a | tojson }}", messages, {}), deep);
}

}  // namespace
}  // namespace perigee

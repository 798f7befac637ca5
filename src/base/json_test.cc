#include "base/json.h"

#include <gtest/gtest.h>

#include <limits>

namespace perigee {
namespace {

TEST(Json, RoundTripKeepsOrderAndNumbers) {
  const std::string text = R"({"z":1,"a":[true,null,-5,1.5,"x\n\u00e9"],"m":{}})";
  auto parsed = parse_json(text);
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  EXPECT_EQ(dump_json(*parsed), "{\"z\":1,\"a\":[true,null,-5,1.5,\"x\\n\xc3\xa9\"],\"m\":{}}");
  EXPECT_EQ(dump_json(*parsed, JsonStyle::kSpaced),
            "{\"z\": 1, \"a\": [true, null, -5, 1.5, \"x\\n\xc3\xa9\"], \"m\": {}}");
}

TEST(Json, DoublesAreSpeltAsPythonDoes) {
  EXPECT_EQ(format_double(1.0), "1.0");
  EXPECT_EQ(format_double(0.1), "0.1");
  EXPECT_EQ(format_double(1e-5), "1e-05");
  EXPECT_EQ(format_double(1e16), "1e+16");
  EXPECT_EQ(format_double(123456789012345680.0), "1.2345678901234568e+17");
  EXPECT_EQ(format_double(0.0001), "0.0001");
  EXPECT_EQ(format_double(-0.0), "-0.0");
}

TEST(Json, ExactDoublesOnInput) {
  auto parsed = parse_json("[0.30000000000000004, 2.2250738585072014e-308, 18446744073709551615]");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->as_array()[0].as_double(), 0.30000000000000004);
  EXPECT_EQ(parsed->as_array()[1].as_double(), std::numeric_limits<double>::min());
  EXPECT_TRUE(parsed->as_array()[2].is_double());
}

TEST(Json, ErrorsSayWhatIsWrongAndWhere) {
  const std::pair<std::string, const char*> cases[] = {
      {"{\"a\":", "invalid JSON at byte 5: incomplete JSON"},
      {"{\"a\":\"\xff\"}",
       "invalid JSON at byte 6: a byte that is no ASCII, outside a string or not valid UTF-8 in it"},
      {"\xef\xbb\xbf{}", "invalid JSON at byte 0: a byte that is no ASCII, outside a string or not valid UTF-8 in it"},
      {"[1,]", "invalid JSON at byte 3: syntax error"},
      {std::string(40, '['), "invalid JSON at byte 32: more than 32 levels of nesting"},
  };
  for (const auto& [text, message] : cases) {
    const auto parsed = parse_json(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.error().message, message);
  }
}

TEST(Json, RejectsHostileInput) {
  EXPECT_FALSE(parse_json("").ok());
  EXPECT_FALSE(parse_json("{\"a\":1,\"a\":2}").ok());
  EXPECT_FALSE(parse_json("[NaN]").ok());
  EXPECT_FALSE(parse_json("\"\xff\"").ok());
  EXPECT_FALSE(parse_json("{} x").ok());
  EXPECT_FALSE(parse_json(std::string(100, '[') + std::string(100, ']')).ok());
  EXPECT_EQ(parse_json("[1,2]", {.max_bytes = 3}).error().code, Code::kTooLarge);
  std::string many = "{";
  for (int i = 0; i < 40; ++i) many += "\"k" + std::to_string(i) + "\":0,";
  EXPECT_FALSE(parse_json(many + "\"k3\":0}").ok());
  EXPECT_TRUE(parse_json(many + "\"k99\":0}").ok());
}

}  // namespace
}  // namespace perigee

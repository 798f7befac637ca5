#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>
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

TEST(Json, NumbersThatNoTypeHoldsKeepTheirText) {
  for (const char* text :
       {"12345678901234567890", "-12345678901234567890", "9223372036854775807", "-9223372036854775808",
        "9223372036854775808", "18446744073709551616", "0.1234567890123456789", "1e999", "-1e-999",
        "340282366920938463463374607431768211456", "3.14159265358979323846e0"}) {
    const auto parsed = parse_json(text);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_TRUE(parsed->is_number());
    EXPECT_EQ(dump_json(*parsed), text);
    EXPECT_EQ(*parse_json(dump_json(*parsed, JsonStyle::kSpaced)), *parsed);
  }
  EXPECT_EQ(parse_json("12345678901234567890")->as_double(), 12345678901234567890.0);
  EXPECT_TRUE(std::isinf(parse_json("1e999")->as_double()));
  EXPECT_EQ(dump_json(Json(uint64_t{18446744073709551615u})), "18446744073709551615");
  // What a double holds is written as Python does.
  EXPECT_EQ(dump_json(*parse_json("[1.10, 1e2, 0.00, -0.0, 0.30000000000000004]")),
            "[1.1,100.0,0.0,-0.0,0.30000000000000004]");
}

TEST(Json, LoneSurrogatesBecomeTheReplacementCharacter) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("\ud800")", "\xEF\xBF\xBD"},
      {R"("\uDC00x")", "\xEF\xBF\xBDx"},
      {R"("\ud800\ud83d\ude00")", "\xEF\xBF\xBD\xF0\x9F\x98\x80"},
      {R"("\ud83d\ude00\ude00")", "\xF0\x9F\x98\x80\xEF\xBF\xBD"},
      {R"("\ud800\n")", "\xEF\xBF\xBD\n"},
      {R"("\\ud800")", "\\ud800"},  // an escaped backslash, then letters
      {R"("\\\ud800")", "\\\xEF\xBF\xBD"},
      {R"("\u00e9\ud7ff\ue000")", "\xC3\xA9\xED\x9F\xBF\xEE\x80\x80"},
  };
  for (const auto& [text, value] : cases) {
    const auto parsed = parse_json(text);
    ASSERT_TRUE(parsed.ok()) << text << parsed.error().message;
    EXPECT_EQ(*parsed, Json(value)) << text;
  }
  EXPECT_EQ(parse_json(R"({"\ud800":1})")->as_object()[0].first, "\xEF\xBF\xBD");
  EXPECT_FALSE(parse_json(R"({"\ud800":1,"\udfff":1})").ok()) << "one key twice";
  for (const char* text : {R"("\ud80")", R"("\ud8)", R"("\)", R"("\ud800\u")", R"("\ud8-1")", "\"\xED\xA0\x80\""})
    EXPECT_FALSE(parse_json(text).ok()) << text;
}

TEST(Json, ADuplicateKeyIsQuotedInWholeCharacters) {
  std::string key = "k";
  for (int i = 0; i < 40; ++i) key += "\xC3\xA9";
  const auto parsed = parse_json("{\"" + key + "\":1,\"" + key + "\":2}");
  ASSERT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.error().message, "JSON has the key \"" + key.substr(0, 63) + "...\" twice in one object");
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

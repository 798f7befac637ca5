#include "base/json.h"

#include <fmt/core.h>
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
  EXPECT_EQ(parsed.error().message,
            "JSON has the key \"" + key.substr(0, 63) + "...\" twice in one object (at byte 172)");
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
  EXPECT_EQ(parse_json("[1,2]", {.max_bytes = 4}).error().code, Code::kTooLarge);
  EXPECT_TRUE(parse_json("[1,2]", {.max_bytes = 5}).ok());
  std::string many = "{";
  for (int i = 0; i < 40; ++i) many += "\"k" + std::to_string(i) + "\":0,";
  EXPECT_FALSE(parse_json(many + "\"k3\":0}").ok());
  EXPECT_TRUE(parse_json(many + "\"k99\":0}").ok());
}

// Long texts go to the parser in pieces of 64 KiB: no escape, number or word may suffer from where they end.
TEST(Json, TextOfAnyLengthReadsTheSame) {
  const std::pair<std::string, std::string> items[] = {
      {R"("\ud800")", "\"\xEF\xBF\xBD\""},
      {R"("\ud83d\ude00")", "\"\xF0\x9F\x98\x80\""},
      {R"("a\\\"\u00e9")", "\"a\\\\\\\"\xC3\xA9\""},
      {"-12.5", "-12.5"},
      {"12345678901234567890", "12345678901234567890"},
      {"{\"key\":true}", "{\"key\":true}"},
  };
  for (const auto& [given, wanted] : items)
    for (size_t shift = 0; shift <= given.size() + 1; ++shift) {
      const std::string padding((64u << 10) - 5 - shift, 'x');
      const auto json = parse_json(fmt::format("[\"{}\",{},{}]", padding, given, given));
      ASSERT_TRUE(json.ok()) << given << " " << shift << ": " << json.error().message;
      EXPECT_EQ(dump_json(*json), fmt::format("[\"{}\",{},{}]", padding, wanted, wanted));
    }
  std::string escapes = "[\"", plain = "[\"";
  for (int i = 0; i < 60'000; ++i) {
    escapes += i % 3 == 0 ? "\\udead" : i % 3 == 1 ? "\\ud83d\\ude00" : "\\u0041";
    plain += i % 3 == 0 ? "\xEF\xBF\xBD" : i % 3 == 1 ? "\xF0\x9F\x98\x80" : "A";
  }
  const auto json = parse_json(escapes + "\"]");
  ASSERT_TRUE(json.ok()) << json.error().message;
  EXPECT_EQ(dump_json(*json), plain + "\"]");
  EXPECT_FALSE(parse_json("[1]" + std::string(200'000, ' ') + "x").ok());
  EXPECT_TRUE(parse_json("[1]" + std::string(200'000, ' ')).ok());
}

// Each cap admits exactly its number and refuses one more, saying which it was.
TEST(Json, CapsAreExactAndNamed) {
  const JsonLimits limits{
      .max_values = 9, .max_members = 3, .max_elements = 4, .max_key_bytes = 5, .max_string_bytes = 6};
  const auto parse = [&](const std::string& text) {
    const auto json = parse_json(text, limits);
    return json.ok() ? "ok" : json.error().message;
  };
  const std::pair<const char*, const char*> cases[] = {
      {R"({"a":1,"b":2,"c":3})", "ok"},
      {R"({"a":1,"b":2,"c":3,"d":4})", "JSON has more than 3 members in one object (at byte 21)"},
      {"[1,[],{},\"\"]", "ok"},
      {"[1,2,3,4,5]", "JSON has more than 4 elements in one array (at byte 10)"},
      {R"({"aaaaa":1})", "ok"},
      {R"({"aaaa\u0061a":1})", "JSON has more than 5 bytes in one key (at byte "},
      {R"({"a":"123456"})", "ok"},
      {R"({"a":"1234567"})", "JSON has more than 6 bytes in one string (at byte "},
      {R"({"a":"1234\n67"})", "JSON has more than 6 bytes in one string (at byte "},
      {"[[],[],[[[],[],[]],[]]]", "ok"},
      {"[[],[],[[[],[],[]],[],1]]", "JSON has more than 9 values (eight numbers of an array count as one) (at byte "},
      {"[[],[],[[[],[]],[],[[[]]]]]", "JSON has more than 9 values (eight numbers of an array count as one) (at byte "},
      {"[[1,2,3],[1,2,3,4],[1,2,3,4],[1,2,3,4]]", "ok"},
  };
  for (const auto& [text, message] : cases)
    EXPECT_EQ(parse(text).substr(0, std::string(message).size()), message) << text;
  EXPECT_EQ(parse_json(fmt::format("[{}]", std::string(1024, '1'))).ok(), true);
  EXPECT_EQ(parse_json(fmt::format("[{}]", std::string(1025, '1'))).ok(), false);
  EXPECT_EQ(parse_json(fmt::format("[0.{}]", std::string(1023, '1'))).ok(), false);
}

// A refused document is not kept until it is refused: the cap counts what is there, not what was read to its end.
TEST(Json, CapsHoldBeforeMemoryIsSpent) {
  std::string text = "[";
  for (int i = 0; i < 1000; ++i) text += "0,";
  const auto json = parse_json(text + "broken", {.max_elements = 10});
  ASSERT_FALSE(json.ok());
  EXPECT_EQ(json.error().message, "JSON has more than 10 elements in one array (at byte 22)");
}

TEST(Json, KeysGivenTwiceAreFoundWhereverTheyStand) {
  for (const int size : {2, 3, 20, 500})
    for (const int twin : {1, size - 1}) {
      std::string text = "{";
      for (int i = 0; i < size; ++i) text += fmt::format("{}\"k{}\":{}", i > 0 ? "," : "", i == twin ? 0 : i, i);
      const auto json = parse_json(text + "}");
      ASSERT_FALSE(json.ok()) << text;
      EXPECT_TRUE(json.error().message.starts_with("JSON has the key \"k0\" twice in one object"))
          << json.error().message;
    }
}

}  // namespace
}  // namespace perigee

#include "server/long_strings.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "base/rng.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

constexpr size_t kOverLong = (1u << 20) + 100;

std::string repeated_piece(std::string_view piece, size_t bytes = kOverLong) {
  std::string out;
  while (out.size() < bytes) out += piece;
  return out;
}

// Weights as of tokens that are common in text.
TokenBound some_bound() {
  TokenBound bound;
  for (const char* token : {"word", "    ", "\xC3\xA9\xC3\xA9", "\n\n", "\"\\/\b\f", "\xEF\xBF\xBD"})
    bound.add_token(token);
  return bound;
}

// The least number of tokens that is not refused.
size_t tokens_of(const std::string& body, const TokenBound& bound) {
  size_t low = 0, high = body.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (check_long_strings(body, bound, middle).ok())
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

TEST(LongStrings, WeighTheTextThatTheParserWillMake) {
  const TokenBound bound = some_bound();
  for (const char* piece : {
           "word ",
           "\xC3\xA9",
           "\\u00e9",
           "\\u00E9",
           "\\ud800",
           "\\udc00\\ud83d",
           "\\ud83d\\ude00",
           "\\ud800\\u0041",
           "\\n",
           "\\\"",
           "\\\\",
           "\\/",
           "\\b\\f\\r\\t",
           "a\\u0020b\\u4e2d",
           "\\u0022\\u005c",
           "\xF0\x9F\x98\x80",
       }) {
    const std::string body = "{\"prompt\": \"" + repeated_piece(piece) + "\"}";
    const auto json = parse_json(body);
    ASSERT_TRUE(json.ok()) << piece << ": " << json.error().message;
    const uint64_t weight = bound.weight(json->find("prompt")->as_string());
    EXPECT_EQ(tokens_of(body, bound), (weight + TokenBound::kOneToken - 1) / TokenBound::kOneToken) << piece;
  }
}

TEST(LongStrings, OnlyThoseOverAMegabyteAreRefused) {
  const TokenBound bound;  // each byte is a token
  EXPECT_TRUE(check_long_strings("[\"" + std::string(1u << 20, 'a') + "\"]", bound, 10).ok());
  const Status refused = check_long_strings("[1,\"" + std::string((1u << 20) + 1, 'a') + "\"]", bound, 10);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kBadInput);
  EXPECT_NE(refused.error().message.find("begins at byte 4 of the body has more than 10 tokens"), std::string::npos)
      << refused.error().message;
}

TEST(LongStrings, StandAnywhereAndEndWhereTheyEnd) {
  const TokenBound bound;
  const std::string half(700u << 10, 'a');
  for (const std::string& body :
       {fmt::format("[\"{}\",\"{}\"]", half, half), fmt::format("{{\"{}\":\"{}\"}}", half, half),
        fmt::format("[\"\\\\\",\"{}\",\"\\\\\\\"\",\"{}\"]", half, half)})
    EXPECT_TRUE(check_long_strings(body, bound, 1000).ok());
  for (const std::string& body :
       {fmt::format("[\"x\",{{\"a\":[\"{}\\\"{}\"]}}]", half, half), fmt::format("{{\"{}{}\":1}}", half, half),
        fmt::format("[\"\\\\\",\"{}\\\\\\\"{}\"]", half, half)})
    EXPECT_FALSE(check_long_strings(body, bound, 1000).ok());
}

// A chat's prompt loses this character: text full of it may still fit.
TEST(LongStrings, TextThatWillShrinkIsLeftToTheTokenizer) {
  const TokenBound bound;
  for (const char* piece : {"\xEF\xB7\x90", "\\ufdd0", "\\uFdD0"}) {
    EXPECT_TRUE(check_long_strings("[\"" + repeated_piece(piece) + "\"]", bound, 10).ok()) << piece;
    EXPECT_TRUE(
        check_long_strings("[\"" + repeated_piece("a") + piece + repeated_piece("a") + "\"]", bound, 2u << 20).ok());
  }
}

TEST(LongStrings, AnythingElseIsLeftToTheParser) {
  const TokenBound bound;
  const std::string text = repeated_piece("a");
  for (const std::string& body : {std::string(), std::string("\""), text, text + "\"", text + "\"\\", text + "\"\\u",
                                  text + "\"\\u00", text + "\"\\uZZZZ\"", text + "\"\\ud800\\u", text + "\"\\x\""})
    EXPECT_TRUE(check_long_strings(body, bound, 10).ok());
}

}  // namespace
}  // namespace perigee

#include <gtest/gtest.h>

#include "base/rng.h"
#include "text/test_vocabulary.h"
#include "text/tokenizer.h"

namespace perigee {
namespace {

TEST(TokenBound, WeighsEachByteByTheLongestTokenThatHasIt) {
  TokenBound bound;
  EXPECT_EQ(bound.weight("ab"), 2 * TokenBound::kOneToken);
  bound.add_token("ab");
  bound.add_token("bbbb");
  EXPECT_EQ(bound.weight('a'), TokenBound::kOneToken / 2);
  EXPECT_EQ(bound.weight('b'), TokenBound::kOneToken / 4);
  EXPECT_EQ(bound.weight("aabc"), TokenBound::kOneToken * 9 / 4);
  EXPECT_EQ(bound.weight(std::string(1001, 'b')), uint64_t{TokenBound::kOneToken} / 4 * 1001);
}

TEST(TokenBound, IsOverOnlyWhenNoTokenisingFits) {
  TokenBound bound;
  bound.add_token("abcd");
  const std::string fits = std::string(4 * 10'000, 'a');
  EXPECT_FALSE(bound.is_over(fits, 10'000));
  EXPECT_TRUE(bound.is_over(fits + "a", 10'000));
  EXPECT_FALSE(bound.is_over("", 0));
  EXPECT_TRUE(bound.is_over("d", 0));
}

// Text made of what makes few tokens: whole tokens, specials, cut ones, and bytes that are not a character.
std::string random_text(const Tokenizer& tokenizer, Rng& rng) {
  std::string text;
  const auto any_token = [&] {
    return tokenizer.bytes(static_cast<int32_t>(rng.below(static_cast<uint64_t>(tokenizer.vocab_size()))));
  };
  const uint64_t pieces = 1 + rng.below(30);
  std::string_view again = any_token();
  for (uint64_t i = 0; i < pieces; ++i) {
    const uint64_t kind = rng.below(5);
    const std::string_view token = any_token();
    if (kind == 0) text += token.substr(rng.below(token.size() + 1));
    if (kind == 1) text += static_cast<char>(rng.below(256));
    if (kind == 2) text += again = tokenizer.specials()[rng.below(Tokenizer::kNumSpecials)].text;
    if (kind >= 3) text += rng.below(2) == 0 ? token : again;
  }
  return text;
}

void check_never_over(const Tokenizer& tokenizer, int num_texts) {
  Rng rng(7);
  uint64_t tokens = 0, weight = 0;
  for (int i = 0; i < num_texts; ++i) {
    const std::string text = random_text(tokenizer, rng);
    for (const auto& ids :
         {tokenizer.encode(text, SpecialsIn::kRecognised), tokenizer.encode(text, SpecialsIn::kPlainText)}) {
      ASSERT_LE(tokenizer.bound().weight(text), ids.size() * TokenBound::kOneToken) << "text " << i;
      ASSERT_FALSE(tokenizer.bound().is_over(text, ids.size())) << "text " << i;
      tokens += ids.size();
      weight += tokenizer.bound().weight(text);
    }
  }
  EXPECT_GT(weight / TokenBound::kOneToken, tokens / 50) << "a bound that says nothing";
}

// No text that fits is ever refused.
TEST(TokenBound, IsNeverMoreThanTheTokens) {
  check_never_over(*test_tokenizer({"ab", "abab", "abababab", "  ", "    ", "        ", "\xC3\xA9", "\xE7\x9A\x84"}),
                   3000);
  const auto tiny = Tokenizer::load("models/tiny-k2");
  ASSERT_TRUE(tiny.ok()) << tiny.error().message;
  check_never_over(**tiny, 3000);
}

TEST(TokenBound, OfEachTokenIsAtMostOneAndOfTheLongestAlmost) {
  const auto tiny = Tokenizer::load("models/tiny-k2");
  ASSERT_TRUE(tiny.ok()) << tiny.error().message;
  for (int32_t id = 0; id < (*tiny)->vocab_size(); ++id)
    ASSERT_LE((*tiny)->bound().weight((*tiny)->bytes(id)), TokenBound::kOneToken) << id;
}

TEST(TokenBound, OfTheRealVocabulary) {
  const std::string dir = real_vocabulary_dir();
  if (dir.empty() && std::getenv("CI") == nullptr) GTEST_SKIP() << "no real vocabulary: set PERIGEE_TEST_DATA";
  const auto real = Tokenizer::load(dir);
  ASSERT_TRUE(real.ok()) << real.error().message;
  check_never_over(**real, 3000);
  const auto bytes_per_token = [&](std::string_view text) {
    return static_cast<double>(text.size()) * TokenBound::kOneToken /
           static_cast<double>((*real)->bound().weight(text));
  };
  EXPECT_LT(bytes_per_token("word "), 32);
  EXPECT_LT(bytes_per_token("\xC3\xA9"), 20);
  EXPECT_LT(bytes_per_token("\xEF\xBF\xBD"), 25);
}

}  // namespace
}  // namespace perigee

#include "grammar/token_table.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

std::string random_letters(Rng& rng, size_t length) {
  std::string out;
  while (out.size() < length) out += static_cast<char>('a' + rng.below(2));
  return out;
}

// The fewest ids of a text, where every token is tried at every place.
size_t fewest_ids(const TokenTable& table, std::string_view text) {
  std::vector<size_t> fewest(text.size() + 1, 0);
  for (size_t begin = text.size(); begin-- > 0;) {
    fewest[begin] = SIZE_MAX;
    for (size_t length = 1; begin + length <= text.size(); ++length)
      if (table.find(text.substr(begin, length))) fewest[begin] = std::min(fewest[begin], fewest[begin + length] + 1);
  }
  return fewest[0];
}

TEST(TokenTable, FewestIdsOfATextAreItsBytes) {
  Rng rng(1);
  std::vector<std::string> tokens;
  for (int i = 0; i < 60; ++i) tokens.push_back(random_letters(rng, 2 + rng.below(9)));
  tokens.push_back("abababababab");  // before shorter ones that begin as it does
  tokens.push_back("ababa");
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  std::reverse(tokens.begin(), tokens.end());
  const auto tokenizer = test_tokenizer(tokens);
  const TokenTable table(tokenizer, {*tokenizer->special_id("<|im_end|>")});
  for (int i = 0; i < 2'000; ++i) {
    const std::string text = random_letters(rng, rng.below(30));
    std::vector<int32_t> ids;
    table.append_fewest_ids(text, ids);
    std::string bytes;
    for (const int32_t id : ids) bytes += table.tokenizer().bytes(id);
    ASSERT_EQ(bytes, text);
    ASSERT_EQ(ids.size(), fewest_ids(table, text)) << text;
  }
}

TEST(TokenTable, FindsOrdinaryTokensByTheirBytes) {
  const auto tokenizer = test_tokenizer({"ab", "abcdefghijkl"});
  const TokenTable table(tokenizer, {*tokenizer->special_id("<|im_end|>")});
  for (int32_t id = 0; id < table.num_ordinary(); ++id) EXPECT_EQ(table.find(tokenizer->bytes(id)), id);
  for (const char* bytes : {"", "ba", "abcdefghijk", "<|im_end|>"}) EXPECT_FALSE(table.find(bytes)) << bytes;
}

}  // namespace
}  // namespace perigee

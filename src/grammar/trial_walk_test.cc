// A mask's tokens are tried together, an accepted id alone: both must say the same of every token.
#include "grammar/trial_walk.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "grammar/text_grammar.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

// All texts of up to 4 bytes of a few, and some of more than RestChart::kShortBytes.
std::shared_ptr<const TokenTable> dense_table() {
  static const auto table = [] {
    std::vector<std::string> tokens{"a\"a\"a\"a\"a\"", "aaaaaaaa\"]", "aaaaaaaaa\"]", "aaaaaaa\"[a]", "bbbbbbbb\"]"};
    size_t first = tokens.size();
    tokens.insert(tokens.end(), {"a", "b", "\"", "[", "]", ","});
    const size_t letters = tokens.size();
    for (int length = 2; length <= 4; ++length) {
      const size_t last = tokens.size();
      for (size_t i = first; i < last; ++i)
        for (size_t j = letters - 6; j < letters; ++j) tokens.push_back(tokens[i] + tokens[j]);
      first = last;
    }
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(letters) - 6,
                 tokens.begin() + static_cast<std::ptrdiff_t>(letters));  // single bytes are there
    // Bytes at the ends of ranges, escapes and halves of characters, alike and not.
    const std::vector<std::string> odd{"x",   "z", "t",    "u",    "v",    "!",    "#",        "\\",
                                       "\\u", "0", "\x7f", "\x80", "\xbf", "\xc3", "\xc3\xa9", "\xe2\x82"};
    for (const std::string& one : odd) {
      if (one.size() > 1) tokens.push_back(one);
      for (const std::string& two : odd)
        for (const char* end : {"", "\"]", "0\""}) tokens.push_back("x" + one + two + end);
    }
    auto tokenizer = test_tokenizer(tokens);
    return std::make_shared<const TokenTable>(tokenizer, std::vector<int32_t>{*tokenizer->special_id("<|im_end|>")});
  }();
  return table;
}

// Of the ids that a mask allows and that accept() takes, the first by which they differ; "" if there is none.
std::string difference(TextCursor& cursor, std::vector<int32_t>& allowed) {
  const TokenTable& table = *dense_table();
  std::vector<uint32_t> words(static_cast<size_t>(table.words()));
  cursor.allow(100'000, 8, words.data());
  const TextCursor::Mark mark = cursor.mark();
  allowed.clear();
  for (int32_t id = 0; id < table.num_ordinary(); ++id) {
    const bool takes = cursor.accept(id);
    if (takes) {
      cursor.rewind(mark);
      allowed.push_back(id);
    }
    if (takes != has_bit(words.data(), id))
      return (takes ? "left out: " : "let in: ") + std::string(table.tokenizer().bytes(id));
  }
  return "";
}

constexpr const char* kGrammars[] = {
    // A string, its rule entered anew in each.
    R"-(root ::= "[" (text ("," text)*)? "]"
text ::= "\"" [ab]* "\"")-",
    // The same rule at one place, with different rests: what waits for it tells these rows apart.
    R"-(root ::= many "[" part "]" | many "," part "\"" root | many
many ::= ("a" | "b" many "b")
part ::= "a" | "b" part "b" | "[" part "]")-",
    // Repetitions.
    R"-(root ::= some "]" | some "," root
some ::= "\"" pair{20,300} "\""
pair ::= "a" | "b" "b")-",
    // Bounds of characters, which a string is in.
    R"-(root ::= "[" string "]" | "[" string "," root
string ::= "\"" short "\""
short[max_tokens=3] ::= Regex("(()|[ab]+)"))-",
    R"-(root ::= "[" string "," string "]" root | "a"
string ::= "\"" short "\"" | "[\"" long "\"]"
short[max_tokens=7] ::= Regex("(()|[ab]+)")
long[max_tokens=10] ::= Regex("(()|[ab]+)"))-",
    R"-(root ::= "[\"" outer "\"]" ("," root)?
outer[max_tokens=9] ::= inner "b" inner | inner
inner[max_tokens=5] ::= Regex("(()|[a]+)"))-",
    // A string of JSON, and ranges that end where others begin.
    R"-(root ::= "[" string "]" | "[" string "," root
string ::= "\"" short "\""
short ::= Regex("(()|([^\"\\\\\\x00-\\x1f]|\\\\u[0-9a-f]{4}|\\\\[t\\\\])+)"))-",
    R"-(root ::= "[" string "]" | "[" string "," root
string ::= "\"" short "\""
short[max_tokens=5] ::= Regex("(()|[^\"\\\\\\x00-\\x1f]+)"))-",
    R"-(root ::= "[" part* "\"]" root?
part ::= [a-t] | [u] "\\"? | [v-z] part "0" | "é" | "\\" [tuv])-",
    // One range inside another one.
    R"-(root ::= "[" part tail root? | "]"
part ::= "x" | "[" part "]"
tail ::= [a-z] "0" | [t-v] "x" | [u-x] "z" | [!-z] "\"" | [#] [t-v])-",
    // Several ways to read the same.
    R"-(root ::= word "]" | word "," word
word ::= left "\"" | right "\"" right | "b" word
left ::= [ab]+
right ::= "a" | "b" right)-",
};

TEST(TrialWalk, TakesWhatTheParserTakesAlone) {
  for (const char* ebnf : kGrammars) {
    auto made = TextGrammar::compile(dense_table(), ebnf, {});
    ASSERT_TRUE(made.ok()) << made.error().message;
    Rng rng(1);
    for (int reply = 0; reply < 6; ++reply) {
      const auto cursor = (*made)->begin();
      std::string text;
      std::vector<int32_t> ids;
      for (int step = 0; step < 8; ++step) {
        ASSERT_EQ(difference(*cursor, ids), "") << ebnf << "\nafter " << text;
        if (ids.empty()) break;
        const int32_t id = ids[rng.below(ids.size())];
        text += dense_table()->tokenizer().bytes(id);
        ASSERT_TRUE(cursor->accept(id));
      }
    }
  }
}

}  // namespace
}  // namespace perigee

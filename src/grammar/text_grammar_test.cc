#include "grammar/text_grammar.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <chrono>

#include "base/rng.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

std::shared_ptr<const TokenTable> small_table() {
  static const auto table = [] {
    auto tokenizer = test_tokenizer({"ab", "aba", "\":", "{\"", "\",\"", "[[", "]]", "name", "true", "ababababab",
                                     "\"name\":true", "bbbbbbbb\":", "b\":", "bb\":", "abab\":", std::string(60, 'a')});
    return std::make_shared<const TokenTable>(tokenizer, std::vector<int32_t>{*tokenizer->special_id("<|im_end|>")});
  }();
  return table;
}

std::shared_ptr<const TextGrammar> grammar_of(const std::string& ebnf) {
  auto made = TextGrammar::compile(small_table(), ebnf, {});
  CHECK(made.ok(), made.error().message);
  return *made;
}

std::string text_of(const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += small_table()->tokenizer().bytes(id);
  return text;
}

std::vector<int32_t> allowed(TextCursor& cursor, int32_t ids_left, int32_t spare = 8) {
  std::vector<uint32_t> words(small_table()->words());
  cursor.allow(ids_left, spare, words.data());
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < small_table()->tokenizer().vocab_size(); ++id)
    if (has_bit(words.data(), id)) ids.push_back(id);
  return ids;
}

// What the parser itself says, token by token.
std::vector<int32_t> accepted(TextCursor& cursor) {
  std::vector<int32_t> ids;
  const TextCursor::Mark mark = cursor.mark();
  for (int32_t id = 0; id < small_table()->num_ordinary(); ++id) {
    if (!cursor.accept(id)) continue;
    cursor.rewind(mark);
    ids.push_back(id);
  }
  return ids;
}

constexpr const char* kGrammars[] = {
    R"(root ::= "ab" | "aba" | "b")",
    R"(root ::= "[" (root ("," root)*)? "]" | "\"" [a-z]* "\"")",
    R"(root ::= Regex("-?(0|[1-9][0-9]*)(\\.[0-9]+)?"))",
    R"(root ::= "{" ("\"" [a-z]{2,300} "\":" root ("," "\"name\":" root){0,200})? "}")",
    R"(root ::= "a" root "b" | "true")",
    R"-(root ::= "\"" short "\":" short
short[max_tokens=3] ::= Regex("(()|[a-z]+)"))-",
    R"-(root ::= "\"" short "\":" root | "true"
short[max_tokens=12] ::= Regex("(()|[a-z]+)"))-",
    R"(root ::= "[" inner "]" | "{" inner "}"
inner ::= "[" [ab]{0,3} "]")",
};

TEST(TextGrammar, SaysTheShortestText) {
  EXPECT_EQ(text_of(grammar_of(kGrammars[0])->shortest()), "b");
  EXPECT_EQ(text_of(grammar_of(kGrammars[1])->shortest()).size(), 2u);
  EXPECT_EQ(text_of(grammar_of(kGrammars[4])->shortest()), "true");
  EXPECT_EQ(grammar_of(kGrammars[4])->shortest().size(), 1u);  // one token
}

// The way by `part` is known first: when its 5 bytes are, while the 8 of the other one are still counted.
TEST(TextGrammar, TheShortestTextIsNotTheOneThatIsKnownFirst) {
  const auto grammar = grammar_of(R"(root ::= part "fffff" | "eeeeeeee"
part ::= "[" part "]" | "ccccc")");
  EXPECT_EQ(text_of(grammar->shortest()), "eeeeeeee");
}

TEST(TextGrammar, MasksAreWhatTheParserAccepts) {
  for (const char* ebnf : kGrammars) {
    Rng rng(1);
    const auto grammar = grammar_of(ebnf);  // of all replies: they share what was tried
    for (int reply = 0; reply < 20; ++reply) {
      const auto cursor = grammar->begin();
      std::vector<int32_t> text;
      for (int step = 0; step < 40; ++step) {
        const std::vector<int32_t> ids = allowed(*cursor, 100'000);
        const std::vector<int32_t> taken = accepted(*cursor);
        ASSERT_EQ(text_of(ids), text_of(taken)) << ebnf << " after " << text_of(text);
        if (ids.empty()) {
          ASSERT_TRUE(cursor->at_end());
          break;
        }
        text.push_back(ids[rng.below(ids.size())]);
        ASSERT_TRUE(cursor->accept(text.back()));
      }
    }
  }
}

TEST(TextGrammar, MasksKnowTheRepetitionsThatAreLeft) {
  const auto cursor = grammar_of(R"(root ::= ("]" | "a" "b"){1,300})")->begin();
  const int32_t one = *small_table()->find("]");
  for (int times = 0; times < 300; ++times) {
    ASSERT_EQ(allowed(*cursor, 100'000), accepted(*cursor)) << times;
    ASSERT_TRUE(cursor->accept(one));
  }
  EXPECT_TRUE(allowed(*cursor, 100'000).empty());
}

TEST(TextGrammar, EveryTextEndsInTime) {
  for (const char* ebnf : kGrammars) {
    const auto grammar = grammar_of(ebnf);
    Rng rng(2);
    for (int reply = 0; reply < 300; ++reply) {
      const int32_t budget = static_cast<int32_t>(grammar->shortest().size() + rng.below(60));
      const auto cursor = grammar->begin();
      std::vector<int32_t> text;
      while (true) {
        const int32_t left = budget - static_cast<int32_t>(text.size());
        const std::vector<int32_t> ids = allowed(*cursor, left);
        if (left <= static_cast<int32_t>(cursor->way().size()) + 8) {
          ASSERT_LE(ids.size(), 1u);
        }
        if (ids.empty() || (cursor->at_end() && rng.below(8) == 0)) break;
        text.push_back(ids[rng.below(ids.size())]);
        ASSERT_TRUE(cursor->accept(text.back()));
      }
      ASSERT_TRUE(cursor->at_end()) << ebnf << ": " << text_of(text);
      ASSERT_LE(static_cast<int32_t>(text.size()), budget);
    }
  }
}

TEST(TextGrammar, RewindsToAnyPlace) {
  const auto grammar = grammar_of(kGrammars[1]);
  const auto cursor = grammar->begin();
  ASSERT_TRUE(cursor->accept(*small_table()->find("[[")));
  const std::vector<int32_t> before = allowed(*cursor, 100);
  const TextCursor::Mark mark = cursor->mark();
  ASSERT_TRUE(cursor->accept(*small_table()->find("]]")));
  EXPECT_TRUE(cursor->at_end());
  cursor->rewind(mark);
  EXPECT_FALSE(cursor->at_end());
  EXPECT_EQ(allowed(*cursor, 100), before);
}

TEST(TextGrammar, RefusesWhatHasNoBound) {
  for (const auto& [ebnf, why] : std::initializer_list<std::pair<const char*, const char*>>{
           {"root ::= root \"a\" | \"b\"", "left-recursive"},
           {"root ::= \"a\" root", "no text"},
           {"root ::= (", "EBNF"},
           {"root ::= [a-z]{100000}", "bytes"},
       }) {
    auto made = TextGrammar::compile(small_table(), ebnf, {});
    ASSERT_FALSE(made.ok()) << ebnf;
    EXPECT_EQ(made.error().code, Code::kBadInput);
    EXPECT_NE(made.error().message.find(why), std::string::npos) << made.error().message;
  }
}

// Each rule adds 64,000 bytes that must follow it, without any recursion.
TEST(TextGrammar, RefusesWhatIsTooLongAsThat) {
  const auto chain = [](int rules) {
    std::string ebnf = "root ::= r0\n";
    for (int i = 0; i < rules; ++i) ebnf += fmt::format("r{} ::= r{} t | \"a\"\n", i, i + 1);
    return ebnf +
           fmt::format("r{} ::= \"b\"\nt ::= v{{100}}\nv ::= w{{40}}\nw ::= \"{}\"\n", rules, std::string(16, 'c'));
  };
  const GrammarLimits limits{.row_states = 100'000, .openings = 1'000'000'000};
  auto made = TextGrammar::compile(small_table(), chain(5000), limits);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("begin with one another too often"), std::string::npos) << made.error().message;
  EXPECT_TRUE(TextGrammar::compile(small_table(), chain(50), limits).ok());
}

TEST(TextGrammar, CountsItsFirstPlaceAndItsWays) {
  const auto cursor = grammar_of(R"(root ::= "[" [a-z]{1000,} "]")")->begin();
  const int64_t first = cursor->work();
  EXPECT_GT(first, 0);
  ASSERT_FALSE(cursor->way().empty());
  const int64_t with_way = cursor->work();
  EXPECT_GT(with_way, first + 1000 / 32);
  cursor->way();
  EXPECT_EQ(cursor->work(), with_way) << "a way that is known costs nothing";
}

TEST(TextGrammar, RefusesRulesThatBeginWithOneAnother) {
  std::string ebnf = "root ::= r0\n";
  for (int i = 0; i < 600; ++i)
    ebnf += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + " \"x\" | \"" + std::to_string(i) + "\" r0?\n";
  auto made = TextGrammar::compile(small_table(), ebnf + "r600 ::= \"a\"\n", {});
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message.find("begin with one another"), std::string::npos) << made.error().message;
}

// No text could come by such a place, and tables of tokens for them would hold a compile thread for half a minute.
TEST(TextGrammar, RefusesThemBehindAByteToo) {
  const auto chain = [](int rules, const std::string& before) {
    std::string ebnf = "root ::= \"[\" r0 \"]\" | \"b\"\n";
    for (int i = 0; i < rules; ++i) ebnf += fmt::format("r{} ::= {}r{} \"b\" | \"a\"\n", i, before, i + 1);
    return ebnf + fmt::format("r{} ::= \"a\"\ne ::= \"\" | \"x\"\n", rules);
  };
  for (const char* before : {"", "e "}) {  // e may be empty
    auto made = TextGrammar::compile(small_table(), chain(6000, before), {});
    ASSERT_FALSE(made.ok());
    EXPECT_NE(made.error().message.find("begin with one another in over 512 ways"), std::string::npos)
        << made.error().message;
    EXPECT_TRUE(TextGrammar::compile(small_table(), chain(100, before), {}).ok());
  }
  auto many = TextGrammar::compile(small_table(), chain(400, ""), {.openings = 50'000});
  ASSERT_FALSE(many.ok());
  EXPECT_NE(many.error().message.find("too many of its rules begin"), std::string::npos) << many.error().message;
}

// Once a round over all rules was made for each of them.
TEST(TextGrammar, RulesMayStandInAnyOrder) {
  constexpr int kRules = 4000;
  for (const bool upwards : {false, true}) {
    std::string ebnf = "root ::= r0\n";
    for (int i = 0; i < kRules; ++i) {
      const int at = upwards ? kRules - 1 - i : i;
      ebnf += fmt::format("r{} ::= \"a\" r{}\n", at, at + 1);
    }
    const auto grammar = grammar_of(ebnf + fmt::format("r{} ::= \"b\" | \"true\"\n", kRules));
    EXPECT_EQ(text_of(grammar->shortest()), std::string(kRules, 'a') + "b");
  }
}

// Each "a" could be read in more ways than the one before: without a bound the time for an id grows with its square.
TEST(TextGrammar, WhatCanBeReadInTooManyWaysEnds) {
  const auto grammar = grammar_of(R"(root ::= "a" root root | "a" root | "a")");
  const auto cursor = grammar->begin();
  const int32_t a = small_table()->tokenizer().encode("a", SpecialsIn::kPlainText).at(0);
  const int32_t b = small_table()->tokenizer().encode("b", SpecialsIn::kPlainText).at(0);
  int32_t taken = 0;
  while (taken < 2000 && cursor->accept(a)) ++taken;
  EXPECT_GT(taken, 50);
  EXPECT_LT(taken, 2000);
  EXPECT_TRUE(cursor->was_too_much());
  EXPECT_FALSE(cursor->accept(b));
  EXPECT_FALSE(cursor->was_too_much()) << "the grammar refuses this one, whatever ids before it cost";
}

// Each byte is cheap, and leaves 1,000 states more in the chart.
TEST(TextGrammar, ALongTextMeetsTheBoundOfWhatIsKept) {
  std::string ebnf = "root ::= (w0";
  for (int i = 1; i < 1000; ++i) ebnf += " | w" + std::to_string(i);
  ebnf += ") \"]]\"";
  for (int i = 0; i < 1000; ++i) ebnf += fmt::format("\nw{} ::= [a]* \"{}\"", i, i);
  auto made = TextGrammar::compile(small_table(), ebnf, {.row_states = 4096});
  ASSERT_TRUE(made.ok()) << made.error().message;
  const auto cursor = (*made)->begin();
  const int32_t a = small_table()->tokenizer().encode("a", SpecialsIn::kPlainText).at(0);
  int32_t taken = 0;
  while (taken < 10'000 && cursor->accept(a)) ++taken;
  EXPECT_GT(taken, 1000);
  EXPECT_LT(taken, 5000);
  EXPECT_TRUE(cursor->was_too_much());
}

// Of grammars that pile up ways to read what came: no mask and no id costs more than the bounds, masks are never empty
// before an end, and what a mask allows is taken or refused for its cost.
TEST(TextGrammar, NoPlaceCostsMoreThanItsBound) {
  std::string wide = "root ::= \"a\" (root";
  for (int i = 0; i < 40; ++i) wide += " | w" + std::to_string(i);
  wide += ")? | \"b\"\n";
  for (int i = 0; i < 40; ++i) wide += "w" + std::to_string(i) + " ::= [ab]{1,9} root? root\n";
  int64_t most = 0;
  for (const std::string& ebnf :
       {std::string("root ::= \"a\" root root | \"a\" root | \"a\""),
        std::string("root ::= s\ns ::= \"a\" s \"b\" s | \"b\" s \"a\" s | \"a\" s s | \"ab\""),
        std::string("root ::= t+\nt ::= u{1,50} | [ab]{1,60} | \"b\" t\nu ::= \"a\" | \"aba\" | [ab]{2,40}"), wide}) {
    auto made = TextGrammar::compile(small_table(), ebnf, {.row_states = 4096});  // as of schemas
    ASSERT_TRUE(made.ok()) << made.error().message;
    const auto grammar = *made;
    Rng rng(0);
    const auto cursor = grammar->begin();
    for (int step = 0; step < 40; ++step) {
      const int64_t before = cursor->work();
      const std::vector<int32_t> ids = allowed(*cursor, 100'000);
      const int64_t masked = cursor->work();
      ASSERT_LE(masked - before, 2 * 400'000 + 210'000) << ebnf;
      ASSERT_TRUE(!ids.empty() || cursor->at_end());
      if (ids.empty()) break;
      const bool taken = cursor->accept(ids[rng.below(ids.size())]);
      ASSERT_LE(cursor->work() - masked, 210'000) << ebnf;
      most = std::max(most, cursor->work() - before);
      ASSERT_TRUE(taken || cursor->was_too_much());
      if (!taken) break;
    }
  }
  EXPECT_GT(most, 50'000);  // some of them are costly indeed
}

}  // namespace
}  // namespace perigee

#include "grammar/language.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "base/rng.h"
#include "grammar/number_language.h"
#include "grammar/pattern.h"

namespace perigee {
namespace {

Language of(const std::string& pattern, Reading reading = Reading::kNarrow) {
  auto made = Language::of_pattern(pattern, reading);
  CHECK(made.ok(), pattern, ": ", made.error().message);
  return *std::move(made);
}

std::string text_of(Rng& rng) {
  std::string text;
  for (uint64_t i = rng.below(7); i > 0; --i) text += "ab1-\n"[rng.below(5)];
  return text;
}

TEST(Language, MatchesWhatThePatternMatches) {
  Rng rng(1);
  for (const char* pattern : {"a", "^a", "a$", "^a$", "^$", "", "(a|b1)*", "^(a|b1)*$", "^[ab]{2,3}1?$", "b{3}",
                              "^a|b$", "[^a]1", ".", "^.+$", "^(a{1,2}b){2}", "a*?1", "\\d\\w"}) {
    const Language language = of(pattern);
    const Pattern other = *Pattern::parse(pattern, Pattern::Whole::kSearched);
    for (int i = 0; i < 2000; ++i) {
      const std::string text = text_of(rng);
      ASSERT_EQ(language.matches(text), other.matches(text)) << pattern << ": " << text;
      ASSERT_EQ(*Language::pattern_matches(pattern, Reading::kNarrow, text), other.matches(text)) << pattern << text;
    }
  }
}

TEST(Language, LookAheadsAndAnchorsAnywhere) {
  struct Case {
    const char *pattern, *yes, *no;
  };
  for (const Case& each : {Case{"^(?=.*[A-Z])(?=.*[0-9]).{4,}$", "abC1", "abc1"},
                           {"^(?!admin$)[a-z]+$", "admins", "admin"},
                           {"^(?!\\s*$).+", " x", "  "},
                           {"^(a|^b)c$", "bc", "abc"},
                           {"a(b$|c)", "xab", "abx"},
                           {"(?P<n>a)$", "ba", "ab"},
                           {"^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "-0.5", "-."},
                           {"$^", "", "a"},
                           {"a*$^", "", "aa"},
                           {"^(?:(?:x))$|^(?=y)yz", "yz", "xz"},
                           {"(?=.*[A-Z])(?=.*[0-9]).{4,}", "x abC1y", "ab1"},
                           {"^[a-z\\d](?:[a-z\\d]|-(?=[a-z\\d])){0,38}$", "a-b-c", "a-"},
                           {"^a(?!.*--)[a-z-]+$", "ab-c-", "ab--c"},
                           {"^(?:a(?=b|$)|b(?!b))+$", "abab", "abba"},
                           {"a(?=b\\b)", "ab c", "abc"},
                           {"^(?=(?!a).*c).*$", "bc", "ac"},
                           {"x(?=^)|b(?!^)a", "ba", "x"},
                           {"^(?!\\b)", " a", "a"},
                           {"-(?=\\bb)", "-b", "- b"},
                           {"^[a-z._]+(?<![_.])$", "a.b", "ab."},
                           {"^(?=.{1,25}$)(?:(?!-)[a-z-]{1,6}(?<!-)\\.)+[a-z]{2,}$", "a-b.com", "a-.com"},
                           {"(?<=a|bc)b", "bcb", "cb"},
                           {"(?<![\\s\\S])a", "ab", "ba"},
                           {"a(?<=[^a]b|c)|b", "b", "a"}}) {
    EXPECT_TRUE(of(each.pattern).matches(each.yes)) << each.pattern;
    EXPECT_FALSE(of(each.pattern).matches(each.no)) << each.pattern;
    EXPECT_TRUE(*Language::pattern_matches(each.pattern, Reading::kNarrow, each.yes)) << each.pattern;
    EXPECT_FALSE(*Language::pattern_matches(each.pattern, Reading::kNarrow, each.no)) << each.pattern;
  }
  for (const char* pattern : {"(?<=^a)b", "(?<=\\ba)b", "(?=a(?<=a))", "a(?i)", "(?m)a", "(?i:a)", "(?-i)a", "(?)",
                              "\\b+", "(a)\\1", "^(.{1,900}a.{1,900}){1,90}$", "((){100000}){100000}", "a{,3}", "a{,}",
                              "[]a]", "[^]a]", "\\012", "\\ud83d", "[\\ud83d\\ude00]"}) {
    EXPECT_FALSE(Language::of_pattern(pattern, Reading::kNarrow).ok()) << pattern;
    EXPECT_FALSE(Language::pattern_matches(pattern, Reading::kNarrow, "a").ok()) << pattern;
  }
}

// A random pattern and, apart from Language, where it ends in a text that it begins at a place of.
struct RandomPattern {
  enum class Kind { kOne, kSequence, kChoice, kLoop, kAhead, kNotAhead, kBehind, kNotBehind } kind = Kind::kSequence;
  std::string one;
  std::vector<RandomPattern> parts;

  static RandomPattern of_characters(Rng& rng) {
    RandomPattern out;
    for (uint64_t i = 1 + rng.below(3); i > 0; --i)
      out.parts.push_back({Kind::kOne, rng.chance(0.5) ? "a" : "[^a]", {}});
    return out;
  }

  // `ahead`: inside look-ahead, where there is no look-behind.
  static RandomPattern drawn(Rng& rng, int depth, bool ahead) {
    constexpr const char* kOnes[] = {"a", "b", "_", "-", " ", "\\b", "\\B", "\\w", "\\W", "[a-]", "[^a]", "^", "$"};
    RandomPattern out;
    for (uint64_t i = 1 + rng.below(4); i > 0; --i) {
      if (depth > 0 && rng.below(3) == 0) {
        constexpr Kind kGroups[] = {Kind::kChoice,   Kind::kLoop,   Kind::kAhead,
                                    Kind::kNotAhead, Kind::kBehind, Kind::kNotBehind};
        RandomPattern group{kGroups[rng.below(ahead ? 4 : 6)], "", {}};
        const bool behind = group.kind == Kind::kBehind || group.kind == Kind::kNotBehind;
        const bool inside = ahead || group.kind == Kind::kAhead || group.kind == Kind::kNotAhead;
        group.parts.push_back(behind ? of_characters(rng) : drawn(rng, depth - 1, inside));
        if (group.kind == Kind::kChoice) group.parts.push_back(drawn(rng, depth - 1, inside));
        out.parts.push_back(std::move(group));
      } else {
        out.parts.push_back({Kind::kOne, kOnes[rng.below(std::size(kOnes))], {}});
      }
    }
    return out;
  }

  std::string text() const {
    std::string out = one;
    for (const RandomPattern& part : parts) out += (kind == Kind::kChoice && !out.empty() ? "|" : "") + part.text();
    if (kind == Kind::kOne || kind == Kind::kSequence) return out;
    const char* begins = kind == Kind::kAhead       ? "(?="
                         : kind == Kind::kNotAhead  ? "(?!"
                         : kind == Kind::kBehind    ? "(?<="
                         : kind == Kind::kNotBehind ? "(?<!"
                                                    : "(?:";
    return begins + out + (kind == Kind::kLoop ? ")*" : ")");
  }

  std::set<size_t> ends(const std::string& in, bool any_case, const std::set<size_t>& begins) const {
    std::set<size_t> out;
    switch (kind) {
      case Kind::kSequence: {
        std::set<size_t> now = begins;
        for (const RandomPattern& part : parts) now = part.ends(in, any_case, now);
        return now;
      }
      case Kind::kChoice:
        for (const RandomPattern& part : parts) out.merge(part.ends(in, any_case, begins));
        return out;
      case Kind::kLoop:
        for (std::set<size_t> now = begins; !now.empty();) {
          std::set<size_t> fresh;
          std::set_difference(now.begin(), now.end(), out.begin(), out.end(), std::inserter(fresh, fresh.end()));
          out.insert(fresh.begin(), fresh.end());
          now = fresh.empty() ? fresh : parts[0].ends(in, any_case, fresh);
        }
        return out;
      default: break;
    }
    for (const size_t at : begins) {
      if (kind == Kind::kBehind || kind == Kind::kNotBehind) {
        bool found = false;
        for (size_t begin = 0; begin <= at; ++begin) found |= parts[0].ends(in, any_case, {begin}).contains(at);
        if (found == (kind == Kind::kBehind)) out.insert(at);
        continue;
      }
      if (kind != Kind::kOne) {
        if (parts[0].ends(in, any_case, {at}).empty() == (kind == Kind::kNotAhead)) out.insert(at);
        continue;
      }
      const auto is_word = [&](size_t i) { return i < in.size() && (std::isalnum(in[i]) != 0 || in[i] == '_'); };
      const bool edge = is_word(at) != (at > 0 && is_word(at - 1));
      if (one == "^" || one == "$" || one == "\\b" || one == "\\B") {
        if (one == "^" ? at == 0 : one == "$" ? at == in.size() : edge == (one == "\\b")) out.insert(at);
        continue;
      }
      if (at == in.size()) continue;
      const char c = any_case ? static_cast<char>(std::tolower(in[at])) : in[at];
      const bool takes = one == "\\w"    ? is_word(at)
                         : one == "\\W"  ? !is_word(at)
                         : one == "[a-]" ? c == 'a' || c == '-'
                         : one == "[^a]" ? c != 'a'
                                         : c == one[0];
      if (takes) out.insert(at + 1);
    }
    return out;
  }
};

TEST(Language, AssertionsAndCaseInRandomPatterns) {
  Rng rng(3);
  int64_t matched = 0, tried = 0;
  for (int i = 0; i < 250; ++i) {
    const bool any_case = rng.chance(0.3);
    const RandomPattern pattern = RandomPattern::drawn(rng, 2, false);
    const std::string text = (any_case ? "(?i)" : "") + pattern.text();
    const Language language = of(text), wide = of(text, Reading::kWide);
    for (int j = 0; j < 60; ++j) {
      std::string in;
      for (uint64_t k = rng.below(6); k > 0; --k) in += "abAB_- "[rng.below(7)];
      if (in.empty() && text.find("\\B") != std::string::npos) continue;  // about which engines differ
      std::set<size_t> begins;
      for (size_t at = 0; at <= in.size(); ++at) begins.insert(at);
      const bool expected = !pattern.ends(in, any_case, begins).empty();
      ASSERT_EQ(language.matches(in), expected) << text << ": " << in;
      ASSERT_EQ(*Language::pattern_matches(text, Reading::kNarrow, in), expected) << text << ": " << in;
      ASSERT_TRUE(wide.matches(in) || !expected) << text << ": " << in;
      matched += expected ? 1 : 0;
      ++tried;
    }
  }
  EXPECT_GT(matched, tried / 10);
  EXPECT_LT(matched, tried * 9 / 10);
}

TEST(Language, WordEdgesAndFlagsWhereEnginesDiffer) {
  struct Case {
    const char *pattern, *text;
    bool narrow, wide;
  };
  for (const Case& each : {Case{"^\\bé", "é", false, true},  // a letter of a word in Python, not in ECMA
                           {"a\\b", "aé", false, true},
                           {"a\\Bé", "aé", false, true},
                           {"é\\b-", "é-", false, true},
                           {"é\\Ba", "éa", false, true},
                           {"^\\bab\\b.\\bé?", "ab ab", true, true},
                           {"\\B", "", false, true},
                           {"^$|\\B", "-", true, true},
                           {"(?i)^k$", "K", true, true},
                           {"(?i)^k$", "\u212a", false, true},  // KELVIN SIGN, a K in Python
                           {"(?i)^[^k]$", "K", false, false},
                           {"(?i)^[^k]$", "\u212a", false, true},
                           {"(?i)^[^k]$", "j", true, true},
                           {"(?i)^é$", "É", false, true},
                           {"(?i)^é$", "é", true, true},
                           {"(?i)^\\x4a$", "j", true, true},
                           {"(?is)^a.$", "A\n", true, true},
                           {"(?s)^.$", "\u2028", true, true},
                           {"(?au)^a$", "A", false, false}}) {
    EXPECT_EQ(of(each.pattern).matches(each.text), each.narrow) << each.pattern << ": " << each.text;
    EXPECT_EQ(of(each.pattern, Reading::kWide).matches(each.text), each.wide) << each.pattern << ": " << each.text;
    EXPECT_EQ(*Language::pattern_matches(each.pattern, Reading::kNarrow, each.text), each.narrow) << each.pattern;
  }
}

TEST(Language, TheWideReadingTakesWhatAnyEngineMatches) {
  EXPECT_FALSE(of("^\\d$").matches("٣"));
  EXPECT_TRUE(of("^\\d$", Reading::kWide).matches("٣"));
  for (const char* pattern : {"^\\s$", "^\\S$", "^[\\s]$", "^[^\\s]$", "^[^\\d\\s]$", "^[\\S]$"}) {
    EXPECT_FALSE(of(pattern).matches("\x1e")) << pattern;
    EXPECT_TRUE(of(pattern, Reading::kWide).matches("\x1e")) << pattern;
  }
  EXPECT_TRUE(of("^a$", Reading::kWide).matches("a\n"));
  EXPECT_TRUE(of("^[^\\w]$", Reading::kWide).matches("é"));
  // What must not match has the other reading.
  EXPECT_FALSE(of("^(?!\\d).$").matches("٣"));
}

// Each level is asked after three kinds of characters, each of which would ask the next one three times.
TEST(Language, LookAheadsInsideOthersAreBoundedTogether) {
  std::string pattern = "\\b";
  for (int level = 0; level < 60; ++level) pattern = fmt::format("(?=[a\\-é]?{})", pattern);
  EXPECT_FALSE(Language::of_pattern(pattern, Reading::kWide).ok());
  EXPECT_FALSE(Language::pattern_matches(pattern, Reading::kWide, "a").ok());
  EXPECT_TRUE(Language::of_pattern("(?=[a\\-é]?(?=[a\\-é]?(?=[a\\-é]?\\b)))", Reading::kNarrow).ok());
}

TEST(Language, SetsOfTexts) {
  Rng rng(2);
  const Language a = of("^[ab]*$"), b = of("1|-"), lengths = Language::of_lengths(2, 4);
  const Language both = *a.intersected(lengths), either = *a.united(b), rest = a.complement();
  for (int i = 0; i < 3000; ++i) {
    const std::string text = text_of(rng);
    const bool fits = text.size() >= 2 && text.size() <= 4;
    ASSERT_EQ(lengths.matches(text), fits);
    ASSERT_EQ(both.matches(text), a.matches(text) && fits);
    ASSERT_EQ(either.matches(text), a.matches(text) || b.matches(text));
    ASSERT_EQ(rest.matches(text), !a.matches(text));
  }
  EXPECT_TRUE(a.intersected(rest)->is_empty());
  EXPECT_TRUE(Language().complement().matches("x"));
  EXPECT_EQ(of("^(ab|cb)$").states().size(), 3u);  // reduced
}

// Minimisation gives long chains up after some rounds, and merges nothing then.
TEST(Language, LongChains) {
  for (const int64_t most : {62, 63, 64, 65, 66, 127, 1'000}) {
    const Language lengths = *of("^(a|b)*1?$").intersected(Language::of_lengths(0, most));
    const Language texts = Language::of_texts({std::string(most, 'a'), std::string(most, 'a') + "b"});
    EXPECT_GE(lengths.states().size(), static_cast<size_t>(most));
    for (int64_t size = std::max<int64_t>(0, most - 3); size < most + 4; ++size) {
      const std::string text(size, 'a');
      ASSERT_EQ(lengths.matches(text), size <= most) << most << ": " << size;
      ASSERT_EQ(lengths.matches(text + "1"), size < most) << most << ": " << size;
      ASSERT_EQ(texts.matches(text), size == most) << most << ": " << size;
      ASSERT_EQ(texts.matches(text + "b"), size == most) << most << ": " << size;
      ASSERT_EQ(texts.complement().matches(text), size != most) << most << ": " << size;
    }
  }
}

TEST(Language, SpellingsOfNumbers) {
  for (const char* number : {"5", "5.0", "5.00", "-5.0", "0.50", "0", "-0.0", "0.0", "100.0", "100", "10.10"}) {
    const Language language = of("^(" + spellings_of_number(number) + ")$");
    for (const char* text :
         {"5", "5.0", "-5", "0.5", "0.50", "0", "-0", "0.00", "100", "100.0", "1", "10", "10.1", "5.5"})
      EXPECT_EQ(language.matches(text), std::stod(number) == std::stod(text)) << number << " " << text;
  }
}

TEST(Language, Multiples) {
  for (const int64_t step : {1, 2, 3, 7, 10, 12, 25, 60, 300, 7000}) {
    const Language language = *multiples_of(std::to_string(step), true);
    for (int64_t value = -2 * step - 30; value < 3 * step + 30; ++value) {
      ASSERT_EQ(language.matches(std::to_string(value)), value % step == 0) << value << " of " << step;
    }
  }
  EXPECT_TRUE(multiples_of("0.01", true)->matches("12.25"));
  EXPECT_TRUE(multiples_of("2.5", true)->matches("15"));
  EXPECT_FALSE(multiples_of("2.5", true)->matches("4"));
  EXPECT_FALSE(multiples_of("0.1", true)->matches("0.25"));
  EXPECT_FALSE(multiples_of("1009", true).ok());
}

}  // namespace
}  // namespace perigee

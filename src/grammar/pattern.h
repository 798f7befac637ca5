// Pattern: a regular expression of the common subset of ECMA-262 and Python, as an automaton's expression over code
// points.
//
// It takes what pattern_parser.h takes, with ^ and $ at the ends of alternatives only, without \b and without
// look-ahead; Language takes those too. \d, \w and \s are ASCII, and their complements leave out non-ASCII too, so that
// engines that know Unicode digits agree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "grammar/pattern_parser.h"

namespace perigee {

class Pattern {
 public:
  static constexpr int32_t kNoEnd = PatternNode::kNoEnd;
  // Bounds above this are taken as this: beyond it xgrammar's tables know next to nothing, and a mask takes 50 ms.
  static constexpr int32_t kMostRepeats = 128;
  enum class Whole { kYes, kSearched };

  // kSearched: as JSON Schema reads a pattern, anywhere in a text unless it says ^ or $. Errors: what is not supported,
  // with its byte offset; deeper than 64; more than 20,000 characters when its repetitions are written out.
  static Result<Pattern> parse(std::string_view text, Whole whole);

  struct RepeatedSet {
    CodePoints set;
    int32_t least, most;
  };
  // What a pattern says that is one repetition of one character, with bounds however large.
  static std::optional<RepeatedSet> repeated_set(std::string_view text, Whole whole);

  // As a regular expression of xgrammar over the text, or over the inside of a JSON string with that text.
  std::string spelt() const;
  std::string spelt_in_json() const;

  bool matches(std::string_view text) const;  // the whole of valid UTF-8

  // Restricts it to texts of `least` to `most` code points, as far as one repetition of it can be given other bounds.
  // False: it cannot, and is as before.
  bool restrict_length(int32_t least, int32_t most);

 private:
  using Node = PatternNode;

  static Status bound_repeats(Node& node);
  static Status anchor(Node& node, Whole whole);
  static bool has_anchor(const Node& node);
  static std::pair<int32_t, int32_t> lengths(const Node& node);
  static void spell(const Node& node, bool json, std::string& out);
  static std::vector<size_t> ends(const Node& node, std::string_view text, std::vector<size_t> begins);

  Node root_{Node::Kind::kSequence, {}, {}};
};

// A repetition of a group as xgrammar's regular expressions build it right: from no time on it is spelt as a choice,
// because their `?`, `*` and `{0,n}` of what ends in a loop let the loop be entered at once.
std::string spell_repeat(const std::string& group, int64_t least, int64_t most = Pattern::kNoEnd);

// A class of code points as xgrammar's regular expressions spell it; JSON's escapes where `json`. Surrogates are left
// out. Empty sets are spelt as what matches nothing.
std::string spell_set(const CodePoints& set, bool json);

}  // namespace perigee

// A regular expression as a tree: the common subset of ECMA-262 and Python.
//
// Literals, classes, `.`, groups, alternation, greedy and lazy repetition, \d \w \s and their complements, ^ and $, \b
// and \B, look-ahead, and Python's flags i, s, a and u before all else. Look-behind, back references, \p and other
// flags are refused by name.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "grammar/code_points.h"

namespace perigee {

struct PatternNode {
  static constexpr int32_t kNoEnd = INT32_MAX;
  enum class Kind {
    kSet,
    kSequence,
    kChoice,
    kRepeat,
    kBegin,
    kEnd,
    kWordEdge,
    kNoWordEdge,
    kAhead,
    kNotAhead,
    kBehind,
    kNotBehind
  };
  Kind kind;
  CodePoints set;                  // of a kSet; of a kWordEdge and a kNoWordEdge: what may be a letter of a word
  std::vector<PatternNode> parts;  // one of a kRepeat, and of those that look ahead or behind
  int32_t least = 0, most = 0;
};

// Engines differ: Python's \d takes the digits of all scripts, its $ a newline at the end, ECMA's `.` no U+2028.
enum class Reading {
  kNarrow,  // the texts that all engines match
  kWide,    // those that any engine matches: what a pattern that must not match is read by
};

// What is not to match by look-ahead or look-behind has the other reading. Errors: what is not supported, with its byte
// offset; more than 64 nested groups.
Result<PatternNode> parse_pattern(std::string_view text, Reading reading);

size_t flags_length(std::string_view text);  // of (?i) and the like at its beginning

extern const CodePoints kWordLetters;  // those of \w that all engines agree on

bool has_word_edge(const PatternNode& node);  // \b or \B, anywhere in it
bool looks_around(const PatternNode& node);   // the same of these, look-ahead and look-behind

}  // namespace perigee

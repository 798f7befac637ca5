// Language: a regular language of texts, as a deterministic automaton over code points.
//
// What a regular expression alone cannot say (two patterns at once, a pattern and a length, a name that no pattern
// matches, look-ahead) is said by intersections and complements of these. Immutable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "grammar/pattern_parser.h"

namespace perigee {

class Language {
 public:
  struct Edge {
    uint32_t low, high;  // code points, both included
    int32_t to;
    bool operator==(const Edge&) const = default;
  };
  struct State {
    bool accepts = false;
    std::vector<Edge> edges;  // sorted and disjoint; other code points lead nowhere
  };

  // Without states that no text passes, and with equal ones merged.
  static Language of_states(std::vector<State> states);
  // The texts that a pattern matches somewhere. Errors: what parse_pattern refuses, and what needs more than
  // kMostStates.
  static Result<Language> of_pattern(std::string_view pattern, Reading reading);
  // Whether valid UTF-8 is of the language of a pattern, without its states: for few texts. Errors: the same, and a
  // long text of a large pattern.
  static Result<bool> pattern_matches(std::string_view pattern, Reading reading, std::string_view text);
  static Language of_texts(const std::vector<std::string>& texts);  // valid UTF-8
  static Language of_lengths(int64_t least, int64_t most);          // in code points; most < 0 for no bound
  static Language of_first(const CodePoints& set, bool or_empty);   // texts that begin with one of these
  static Language all() { return of_lengths(0, -1); }

  Result<Language> intersected(const Language& other) const;
  Result<Language> united(const Language& other) const;
  Language complement() const;

  bool is_empty() const { return states_.empty(); }
  bool matches(std::string_view text) const;  // valid UTF-8
  // The first is where a text begins; from each a text can be finished.
  const std::vector<State>& states() const { return states_; }

  static constexpr size_t kMostStates = 2000;
  static Error too_large();
  // Appends an edge that begins after all others, to the last one where it goes on as that does.
  static void add_edge(std::vector<Edge>& edges, const Edge& edge);

 private:
  std::vector<State> states_;  // none: no text
};

}  // namespace perigee

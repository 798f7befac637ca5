// Closing: how far a text is from an end of its grammar, in bytes, and the bytes that lead there.
//
// A distance is counted over the automata of xgrammar's compiled grammar: the fewest bytes from a place of a rule to
// the end of that rule (Knuth 1977: shortest derivations by relaxation), added up along the rules that wait for it in
// the Earley chart. Every derivation in the chart has its own rest; `least` is the shortest of them, the way to an end,
// `most` the longest. Each byte b lengthens the rest of no derivation by more than growth(b), which is known for the
// grammar as a whole. So after a token the least rest is at most `most` plus the growth of its bytes: what lets a
// whole class of tokens pass without trying them one by one.
//
// Only text_grammar.cc includes this.
#pragma once

#include <earley_parser.h>
#include <grammar_impl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace perigee {

struct Rest {
  int32_t least;
  int32_t most;
};

class Distances {
 public:
  // Errors: a root that derives no text, a shortest text over `shortest_bytes`, left recursion through optional parts
  // (a byte's growth would have no bound).
  static Result<Distances> make(const xgrammar::Grammar& grammar, int32_t shortest_bytes);

  // Bytes from the state to the end of its rule.
  int32_t to_rule_end(const xgrammar::ParserState& state) const;
  // The repetitions behind a state, where what may follow for at most `bytes` bytes depends on them.
  int32_t count_that_matters(const xgrammar::ParserState& state, int32_t bytes) const;
  // The state of a waiting rule once what it waits for, `rule`, is complete. Its rest is to_rule_end of that.
  int32_t after_child(const xgrammar::ParserState& waiting, int32_t rule) const;

  // Appends the bytes of those.
  void append_to_rule_end(const xgrammar::ParserState& state, std::string& out) const;
  void append_after_child(const xgrammar::ParserState& waiting, int32_t rule, std::string& out) const;

  // At least -1; kNever for a byte that the grammar does not have.
  int32_t growth(uint8_t byte) const { return growth_[byte]; }
  static constexpr int32_t kNever = INT32_MIN;
  int32_t num_places() const { return static_cast<int32_t>(to_end_.size()); }

 private:
  explicit Distances(xgrammar::Grammar grammar) : grammar_(std::move(grammar)) {}
  const xgrammar::CompactFSM& fsm() const { return grammar_->complete_fsm; }
  int32_t start_of(int32_t rule) const { return grammar_->per_rule_fsms[rule]->GetFsm().GetStart(); }
  int64_t cost(const xgrammar::FSMEdge& edge) const;
  void relax();
  Status find_growth();
  bool leads_nowhere() const;
  void append(int32_t place, std::string& out) const;

  static constexpr int32_t kFar = 1 << 28;  // no way to the end
  xgrammar::Grammar grammar_;
  std::vector<int32_t> to_end_;  // by place: bytes to the end of its rule
  std::vector<int32_t> best_;    // by place: the edge, counted within the place, that a shortest way begins with
  std::array<int32_t, 256> growth_{};
};

// The parser's chart, with the rests of what waits in it.
class RestChart : public xgrammar::EarleyParser {
 public:
  // `most_states`: of a row, see is_crowded().
  RestChart(const xgrammar::Grammar& grammar, const Distances& distances, int32_t most_states, int32_t token_bytes);

  // Moves by a byte, or not at all: also where a text could be read in more ways than is_crowded() allows. A rule with
  // `max_tokens` N takes at most N characters of a JSON string: what xgrammar counts as tokens are characters here, an
  // escape being one.
  bool advance(uint8_t byte);
  // How many bytes that could begin a character the next token may have in the state's rule, at least; INT32_MAX
  // without a bound. In an open escape its first byte begins none.
  int32_t characters_left(const xgrammar::ParserState& state) const {
    const Count& now = counts_.back();
    if (state.budget_deadline < 0) return INT32_MAX;
    return std::max(0, state.budget_deadline - now.characters + 1) + (now.escape > 0 ? 1 : 0);
  }
  // Sums up the rows that were added since; before rest() or way().
  void settle();
  void pop(int32_t bytes);

  // What the tokens of at most kShortBytes that may follow depend on, and what longer ones do, as hashes: the newest
  // row's states, all that waits for them, and the bounds that such tokens can reach. The same after different texts
  // where those are alike. None where it is not known.
  static constexpr int32_t kShortBytes = 8;
  struct Place {
    uint64_t for_short, for_long;
  };
  std::optional<Place> place() const;

  bool completed() const { return IsCompleted(); }
  auto states() const { return scanable_state_history_[scanable_state_history_.size() - 1]; }
  // Whether the newest row has too many states: what an ambiguous grammar piles up costs time in each later one.
  bool is_crowded() const {
    const int32_t row = rule_id_to_completable_states_.size() - 1;
    return static_cast<int64_t>(states().size()) > most_states_ ||
           static_cast<int64_t>(rule_id_to_completable_states_[row].size()) > most_states_;
  }
  void push_trial(const xgrammar::ParserState& state) {
    PushOneStateToCheck(state);
    counts_.push_back(counts_.back());
  }
  void pop_trial(int32_t rows) {
    PopLastStates(rows);
    counts_.resize(counts_.size() - static_cast<size_t>(rows));
  }

  Rest rest() const;
  std::string way() const;  // rest().least bytes

 private:
  struct Waiting {
    int32_t rule;  // that is waited for
    Rest rest;     // from its completion to the end of the text
    int32_t via;   // index in the row of the waiting state with the least
    Place what;    // hashes of all that waits; kUnknown
  };
  Rest after(int32_t rule, int32_t row) const;
  const Waiting& settled(int32_t rule, int32_t row);
  Waiting sum_up(int32_t rule, int32_t row);
  static constexpr Place kUnknown{0, 0};
  static bool is_unknown(Place what) { return what.for_short == 0 || what.for_long == 0; }
  Place what_waits(int32_t rule, int32_t row) const;
  Place hash_of(const xgrammar::ParserState& state, Place waits) const;

  struct Count {
    int32_t characters = 0;
    int8_t escape = 0;  // bytes of an open escape: 1 after \, then 5 to 2 for those of \uXXXX
  };

  const Distances& distances_;
  const int32_t most_states_;
  const int32_t token_bytes_;                  // of the longest token
  std::vector<std::vector<Waiting>> waiting_;  // by row
  std::vector<Count> counts_{Count{}};         // by row
};

}  // namespace perigee

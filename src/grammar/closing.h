// Closing: how far a text is from an end of its grammar, in bytes, and the bytes that lead there.
//
// A distance is counted over the automata of xgrammar's compiled grammar: the fewest bytes from a place of a rule to
// the end of that rule (Knuth 1977: shortest derivations by relaxation), added up along the rules that wait for it in
// the Earley chart. Every derivation in the chart has its own rest; `least` is the shortest of them, the way to an end,
// `most` the longest. Each byte b lengthens the rest of no derivation by more than growth(b), which is known for the
// grammar as a whole. So after a token the least rest is at most `most` plus the growth of its bytes: what lets a
// whole class of tokens pass without trying them one by one.
//
// Only rest_chart.h and compiled_text.h include this.
#pragma once

#include <earley_parser.h>
#include <grammar_impl.h>

#include <array>
#include <cstdint>
#include <span>
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

  // The edges of a place, as the automaton has them, found faster.
  std::span<const xgrammar::FSMEdge> edges(int32_t place) const { return edges_[static_cast<size_t>(place)]; }

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
  explicit Distances(xgrammar::Grammar grammar);
  const xgrammar::CompactFSM& fsm() const { return grammar_->complete_fsm; }
  int32_t start_of(int32_t rule) const { return grammar_->per_rule_fsms[rule]->GetFsm().GetStart(); }
  int64_t cost(const xgrammar::FSMEdge& edge) const;
  void relax();
  Status find_growth();
  bool leads_nowhere() const;
  void append(int32_t place, std::string& out) const;

  static constexpr int32_t kFar = 1 << 28;  // no way to the end
  xgrammar::Grammar grammar_;
  std::vector<std::span<const xgrammar::FSMEdge>> edges_;  // by place
  std::vector<int32_t> to_end_;                            // by place: bytes to the end of its rule
  std::vector<int32_t> best_;  // by place: the edge, counted within the place, that a shortest way begins with
  std::array<int32_t, 256> growth_{};
};

}  // namespace perigee

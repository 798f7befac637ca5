// RestChart: the parser's chart, with the rests of what waits in it (closing.h).
//
// What it costs is counted and bounded. The unit of work is a state that is visited, some tens of nanoseconds: a byte
// of a plain string takes two or three, one of an ambiguous grammar could take as many as there are places times rows.
//
// Only compiled_text.h includes this.
#pragma once

#include <earley_parser.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "grammar/byte_set.h"
#include "grammar/closing.h"

namespace perigee {

class RestChart : public xgrammar::EarleyParser {
 public:
  static constexpr int64_t kIdWork = 200'000;      // of one id
  static constexpr int64_t kMostKept = 4'000'000;  // states of all rows, 44 bytes each

  // `most_states`: of a row, see is_crowded().
  RestChart(const xgrammar::Grammar& grammar, const Distances& distances, int32_t most_states, int32_t token_bytes);

  // The bytes from here on are of a new id, whose work is counted from none.
  void begin_id() {
    id_began_ = counts_.back().work;
    too_much_ = false;
  }
  // Moves by a byte, or not at all: also where a text could be read in more ways than is_crowded() allows, the id would
  // take more work than kIdWork, or the chart would keep more than kMostKept. A rule with `max_tokens` N takes at most
  // N characters of a JSON string: what xgrammar counts as tokens are characters here, an escape being one.
  bool advance(uint8_t byte);
  // All work, with that of the first row and of ways, and for bytes that were refused or taken back.
  int64_t work() const { return work_; }
  // Whether a byte of the newest id was refused for what it costs, not by the grammar.
  bool was_too_much() const { return too_much_; }
  // How many bytes that could begin a character the next token may have in the state's rule, at least; INT32_MAX
  // without a bound. In an open escape its first byte begins none.
  int32_t characters_left(const xgrammar::ParserState& state) const {
    const Count& now = counts_.back();
    if (state.budget_deadline < 0) return INT32_MAX;
    return std::max(0, state.budget_deadline - now.characters + 1) + (now.escape > 0 ? 1 : 0);
  }
  // Sums up the rows that were added since; before rest() or way().
  void settle();
  // Takes so many rows back.
  void pop(int32_t bytes);

  // What the tokens of at most kShortBytes that may follow depend on, and what longer ones do, as hashes: the newest
  // row's states, all that waits for them, and the bounds that such tokens can reach. The same after different texts
  // where those are alike. None where it is not known.
  static constexpr int32_t kShortBytes = 8;
  struct CacheKey {
    uint64_t for_short, for_long;
  };
  std::optional<CacheKey> cache_key() const;

  auto states() const { return scanable_state_history_[scanable_state_history_.size() - 1]; }
  // What the next `bytes` bytes may be depends on the newest row in this way: rows with the same key take the same, at
  // the same cost. `base` is an earlier row or the newest; `names` are for the rows from there to the one before the
  // newest, the same for rows with the same key. None where it is not known.
  std::optional<uint64_t> row_key(int32_t base, const std::vector<int32_t>& names, int32_t bytes) const;
  // All that can be the next byte, and maybe more. Bytes from one of `begins` up to the next one move the chart to the
  // same row at the same cost.
  struct NextBytes {
    ByteSet may, begins;
  };
  NextBytes next_bytes() const;
  int32_t newest_row() const { return rule_id_to_completable_states_.size() - 1; }
  int64_t newest_size() const {  // in states, as in kept()
    return int64_t{states().size()} + rule_id_to_completable_states_[newest_row()].size();
  }
  int64_t kept() const { return counts_.back().kept; }  // states of all rows

  bool completed() const { return IsCompleted(); }
  // Whether the newest row has too many states: what an ambiguous grammar piles up costs time in each later one.
  bool is_crowded() const {
    const int32_t row = rule_id_to_completable_states_.size() - 1;
    return static_cast<int64_t>(states().size()) > most_states_ ||
           static_cast<int64_t>(rule_id_to_completable_states_[row].size()) > most_states_;
  }
  // Takes rows back that were not settled.
  void pop_trial(int32_t rows) {
    PopLastStates(rows);
    counts_.resize(counts_.size() - static_cast<size_t>(rows));
  }

  Rest rest() const;
  std::string way();  // rest().least bytes

 private:
  struct Waiting {
    int32_t rule;  // that is waited for
    Rest rest;     // from its completion to the end of the text
    int32_t via;   // index in the row of the waiting state with the least; kNone, kNotSummed
    CacheKey key;  // of all that waits; kUnknown
  };
  static constexpr int32_t kNone = -1, kNotSummed = -2;
  static constexpr int64_t kEdgesAUnit =
      16;  // or states of a row, or bytes of a way: looking at one is that much cheaper than a visit
  bool scan(uint8_t byte);
  bool expand(int64_t most_work);
  void drop_open_row();
  int64_t cost_of(const xgrammar::ParserState& state);
  const Waiting* waiting_for(int32_t rule, int32_t row) const;
  Rest after(int32_t rule, int32_t row) const;
  Waiting settled(int32_t rule, int32_t row);
  Waiting sum_up(int32_t rule, int32_t row);
  static constexpr CacheKey kUnknown{0, 0};
  static bool is_unknown(CacheKey key) { return key.for_short == 0 || key.for_long == 0; }
  CacheKey key_of_waiting(int32_t rule, int32_t row) const;
  CacheKey key_of(const xgrammar::ParserState& state, CacheKey waits) const;

  struct Count {
    int32_t characters = 0;
    int8_t escape = 0;  // bytes of an open escape: 1 after \, then 5 to 2 for those of \uXXXX
    int64_t work = 0;   // of the rows up to this one
    int64_t kept = 0;   // states of them
  };

  const Distances& distances_;
  const int32_t most_states_;
  const int32_t token_bytes_;                  // of the longest token
  std::vector<std::vector<Waiting>> waiting_;  // by row, each in the order of rules
  std::vector<int32_t> by_rule_;               // the waiting states of the row that is summed up, in that order
  std::vector<Count> counts_{Count{}};         // by row
  int64_t work_ = 0, id_began_ = 0;
  bool too_much_ = false;
};

}  // namespace perigee

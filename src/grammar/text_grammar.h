// TextGrammar: a context-free grammar over bytes, compiled for one vocabulary; TextCursor: a place in a text of it.
//
// The grammar engine is xgrammar: its EBNF, its automata of rules, its Earley parser and, for each place in a rule, the
// table of tokens that it takes. Nothing of it is seen outside text_*.cc, rest_chart.* and closing.*. What is added
// here is the way to the end: how many ids a text still needs at most, and which (closing.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "grammar/token_table.h"

namespace perigee {

// What a grammar may cost. A hostile one is refused before it has cost more than its sender's reply.
struct GrammarLimits {
  size_t text_bytes = 256 << 10;      // of a schema, a regex, a grammar, or all of the choices
  int32_t places = 40'000;            // of the automata, before tables of tokens are made for them
  int32_t shortest_bytes = 64 << 10;  // of the shortest text
  int32_t row_states = 512;           // of a place in a text: in how many ways what came before can be read
  int64_t openings = 4'000'000;       // of all places together, the ways in which what comes there can begin
  int64_t token_tries = 24'000'000;   // for those tables: the tokens whose first byte a place takes; 3 million a second
};

class TextCursor;

class TextGrammar : public std::enable_shared_from_this<TextGrammar> {
 public:
  // EBNF whose first rule is `root`. Errors: kBadInput with xgrammar's words or what exceeds `limits`.
  static Result<std::shared_ptr<const TextGrammar>> compile(std::shared_ptr<const TokenTable> table,
                                                            const std::string& ebnf, const GrammarLimits& limits);
  static Result<std::shared_ptr<const TextGrammar>> compile_structural_tag(std::shared_ptr<const TokenTable> table,
                                                                           const std::string& json,
                                                                           const GrammarLimits& limits);
  ~TextGrammar();

  // Of a client's text, before compile() or compile_structural_tag() adds to it. Refuses what is not EBNF, by the line
  // in this text, and attributes of rules, `x[max_chars=3] ::= …`: xgrammar's matcher would follow some of them, a
  // TextCursor follows none except `max_tokens`, by which the schemas' grammars count characters.
  // Refuses over 32 KiB with regular expressions in them, too.
  static Status check_ebnf(const std::string& ebnf);

  std::unique_ptr<TextCursor> begin() const;
  const std::vector<int32_t>& shortest() const { return shortest_; }  // the ids of its shortest text
  size_t bytes() const { return bytes_; }                             // of memory, about

  struct Compiled;  // compiled_text.h
  const Compiled& compiled() const { return *compiled_; }
  const TokenTable& table() const { return *table_; }

 private:
  explicit TextGrammar(std::shared_ptr<const TokenTable> table);
  static Result<std::shared_ptr<const TextGrammar>> finish(std::shared_ptr<const TokenTable> table,
                                                           std::unique_ptr<Compiled> compiled);

  std::shared_ptr<const TokenTable> table_;
  std::unique_ptr<Compiled> compiled_;
  std::vector<int32_t> shortest_;
  size_t bytes_ = 0;
};

class TextCursor {
 public:
  explicit TextCursor(std::shared_ptr<const TextGrammar> grammar);
  ~TextCursor();

  // Moves by an ordinary id. False: it may not follow, and the cursor is as before.
  bool accept(int32_t id);

  // Where it stands, to come back to. The way that is known there belongs to it: another one may be as short in bytes
  // and longer in ids than what was counted on.
  struct Mark {
    size_t size;
    std::optional<std::vector<int32_t>> way;
  };
  Mark mark() const { return {lengths_.size(), way_}; }
  void rewind(const Mark& mark);

  bool at_end() const;  // the text may end here
  // Whether what came can be read in too many ways (GrammarLimits): accept() refuses to come to such a place.
  bool is_crowded() const;
  // Whether accept() refused the newest id for what it costs: too many ways, too much work or memory (RestChart).
  bool was_too_much() const;
  // What was done since the beginning, in units of RestChart.
  int64_t work() const;

  // Sets the bits of the ids that may follow, if `ids_left` of them may be in the text from here on. The text can
  // always be ended within ids_left: where they do not suffice for more than way() and `spare` ids, only the first of
  // way() is set (none where that is empty). Requires way().size() <= ids_left. The work is bounded: of a grammar whose
  // places cost too much, some tokens are left out, but never all.
  void allow(int32_t ids_left, int32_t spare, uint32_t* words);

  // A way to the end in few ids, empty at_end(). It holds until the next call.
  const std::vector<int32_t>& way();

 private:
  struct Chart;

  std::shared_ptr<const TextGrammar> grammar_;
  std::unique_ptr<Chart> chart_;
  std::vector<int32_t> lengths_;             // bytes of each accepted id
  std::optional<std::vector<int32_t>> way_;  // from here on, if it is known
};

}  // namespace perigee

// ReplyGrammar: a Constraint: what a reply is made of around its texts: reasoning, Kimi's markers, the end.
//
// A small automaton over ids; special ids are its own, and inside a text a TextCursor speaks. Each of its places knows
// the shortest way to the end of the reply, so the reply always closes in the ids that are left.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "control/constraint.h"
#include "grammar/grammar_spec.h"
#include "grammar/text_grammar.h"

namespace perigee {

// The ids of the markers that a vocabulary has.
struct ReplyMarkers {
  std::optional<int32_t> think, end_think, section_begin, section_end, call_begin, argument_begin, call_end;

  explicit ReplyMarkers(const Tokenizer& tokenizer);
  bool has_calls() const { return section_begin && section_end && call_begin && argument_begin && call_end; }
};

class ReplyGrammar : public Constraint, public std::enable_shared_from_this<ReplyGrammar> {
 public:
  struct Tool {
    std::string name;
    std::shared_ptr<const TextGrammar> arguments;
    std::vector<int32_t> header;  // fewest ids of "functions.NAME:"
  };

  // A reply that is a text of `text`.
  static Result<std::shared_ptr<const Constraint>> of_text(std::shared_ptr<const TokenTable> table,
                                                           std::shared_ptr<const TextGrammar> text,
                                                           bool after_reasoning);
  // A reply with calls of the tools. Errors: a vocabulary without the markers.
  static Result<std::shared_ptr<const Constraint>> of_calls(std::shared_ptr<const TokenTable> table,
                                                            std::vector<Tool> tools, GrammarSpec::Calls calls,
                                                            bool after_reasoning);

  std::unique_ptr<ConstraintState> begin() const override;
  int32_t shortest() const override { return shortest_; }

 private:
  friend class ReplyState;
  ReplyGrammar(std::shared_ptr<const TokenTable> table, bool after_reasoning)
      : table_(std::move(table)), markers_(table_->tokenizer()), after_reasoning_(after_reasoning) {}
  Status check_markers() const;

  bool one_call() const { return calls_ == GrammarSpec::Calls::kAutoOne || calls_ == GrammarSpec::Calls::kExactlyOne; }
  bool free_text() const {
    return text_ == nullptr && (calls_ == GrammarSpec::Calls::kAuto || calls_ == GrammarSpec::Calls::kAutoOne);
  }
  // Ids of the shortest call of a tool, from after call_begin to call_end.
  int32_t call_ids(const Tool& tool) const;
  size_t shortest_tool() const;

  std::shared_ptr<const TokenTable> table_;
  ReplyMarkers markers_;
  bool after_reasoning_;
  std::shared_ptr<const TextGrammar> text_;  // null: calls
  std::vector<Tool> tools_;
  std::vector<std::pair<int32_t, int32_t>> indices_;  // of calls, as one id has them, and the id; ascending
  GrammarSpec::Calls calls_ = GrammarSpec::Calls::kAuto;
  int32_t shortest_ = 0;
};

}  // namespace perigee

// OutputParser: token ids of a reply to reasoning, content and tool calls.
//
// One state machine for streamed and whole replies: a whole reply is the same events folded by collect(), so the two
// cannot differ, however the tokens were grouped. Markers are recognised by id only; the same characters spelt with
// ordinary tokens are text. Follows vLLM's parser for `kimi_k2` of August 2026 (REASONING, CONTENT, TOOL_PREAMBLE,
// TOOL_NAME, TOOL_ARGS, TOOL_BETWEEN); where that leaves a marker without a rule, it is swallowed or, in arguments,
// kept (see output_parser.cc), never shown as content. Arguments are raw text: not validated, not re-serialised.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/detokenizer.h"
#include "text/tokenizer.h"

namespace perigee {

struct OutputEvent {
  enum class Kind {
    kReasoning,  // text
    kContent,    // text
    kToolCall,   // call_index, call_id, name: a call begins
    kArguments,  // call_index, text: a piece of its arguments
  };
  Kind kind;
  int32_t call_index = -1;  // counts the calls of this reply from 0, without gaps
  std::string text;         // valid UTF-8, never empty for the kinds that carry text
  std::string call_id;      // as the model wrote it: functions.NAME:IDX
  std::string name;
};

struct OutputParserOptions {
  bool thinking = false;             // <think> and </think> mean something; else they are text
  bool starts_in_reasoning = false;  // see prompt_leaves_reasoning_open; only with `thinking`
  bool parse_tools = false;          // the tool markers mean something; else they are text
  bool suppress_tools = false;       // tool_choice none: as parse_tools, but calls are dropped
  bool skip_special_tokens = true;   // drop the other special tokens; else they are text
  bool one_call = false;             // the reply is over with its first call
};

class OutputParser {
 public:
  // Keeps a reference to the tokenizer. Markers that it does not know as special tokens never occur.
  OutputParser(const Tokenizer& tokenizer, OutputParserOptions options);

  // Appends the events of the next token. Cost: linear in its bytes, amortised; nothing is capped.
  void push(int32_t id, std::vector<OutputEvent>& out);

  // The reply is over: appends what was held back. A call that was cut short counts as made.
  void finish(std::vector<OutputEvent>& out);

  int64_t num_reasoning_ids() const { return num_reasoning_ids_; }  // of the reasoning's text, without its markers
  bool saw_tool_call() const { return num_calls_ > 0; }
  bool done() const { return done_; }  // with one_call: the first call has ended; later tokens give no events

 private:
  enum class State { kReasoning, kContent, kPreamble, kName, kArguments, kBetween };
  enum class Marker { kNone, kThink, kEndThink, kSectionBegin, kSectionEnd, kCallBegin, kArgumentBegin, kCallEnd };
  using Events = std::vector<OutputEvent>;

  Marker marker_of(int32_t id) const;
  void on_think_marker(Marker marker, Events& out);
  void on_tool_marker(Marker marker, Events& out);
  void enter(State next, Events& out);  // leaves the current state properly
  void begin_call(Events& out);
  void end_call(Events& out);
  void on_text(std::string_view text, Events& out);
  void hold_trailing_space(OutputEvent::Kind kind, std::string_view text, Events& out);
  void on_content(std::string_view text, Events& out);
  void emit(OutputEvent::Kind kind, std::string text, Events& out);

  const Tokenizer& tokenizer_;
  OutputParserOptions options_;
  bool tools_;  // tool markers mean something
  int32_t marker_ids_[8];
  State state_;
  Utf8Repair repair_;             // incomplete characters of the current state's text
  std::string held_;              // white space that may turn out to be dropped
  std::string header_;            // kName: what the model has written of the call's id
  bool content_started_ = false;  // something other than white space
  bool call_open_ = false;        // kArguments: the header was valid and calls are not suppressed
  bool arguments_started_ = false;
  bool done_ = false;
  int32_t num_calls_ = 0;
  int64_t num_reasoning_ids_ = 0;
};

struct ParsedOutput {
  struct Call {
    std::string id, name, arguments;
  };
  std::optional<std::string> reasoning, content;
  std::vector<Call> calls;
};

// The whole reply: events folded. Text kinds that never occurred are nullopt; arguments are trimmed, empty gives "{}".
ParsedOutput collect(std::span<const OutputEvent> events);

// Where the reply to this prompt begins: true in reasoning, false in content. Looks at the think markers after the
// prompt's last <|im_assistant|> (the history may hold others): a last `<think>` is open, a last `</think>` or a tool
// section is not. With neither the model opens its thinking itself (K2-Thinking) and the answer is true. Only for
// models that think; false when the vocabulary has no <think>.
bool prompt_leaves_reasoning_open(const Tokenizer& tokenizer, std::span<const int32_t> prompt);

}  // namespace perigee

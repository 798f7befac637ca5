// ChoiceFold: what the engine's chunks of one choice mean as text.
//
// Streamed and whole replies use the same fold: a whole reply is its deltas appended, so the two cannot differ. A stop
// string, or the first call where one is allowed, ends the choice here; the engine, which knows ids only, is told by
// the caller (`ended_by_text`).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/messages.h"
#include "server/request_fields.h"
#include "text/output_parser.h"
#include "text/stop_strings.h"

namespace perigee {

struct ChoiceDelta {
  std::string text;                 // completions
  std::vector<OutputEvent> events;  // chat
  std::vector<int32_t> ids;
  std::vector<TokenLogprobs> logprobs;  // one per id, when asked for
  std::optional<FinishReason> finish;
  bool made_tool_call = false;             // with finish
  int32_t stop_id = -1;                    // the request's own stop id, or -1 (an end-of-sequence id is none)
  std::optional<std::string> stop_string;  // the one that was met
  bool ended_by_text = false;              // the engine still runs this choice: cancel it with kStop
  std::string error;

  bool empty() const { return text.empty() && events.empty() && !finish; }
  void append(ChoiceDelta&& next);
};

class ChoiceFold {
 public:
  virtual ~ChoiceFold() = default;
  // Chunks after the end (a stop string was met, the engine had more) give empty deltas.
  ChoiceDelta push(OutputChunk&& chunk);
  bool ended() const { return ended_; }
  virtual std::optional<int64_t> num_reasoning_ids() const { return std::nullopt; }  // where reasoning is told apart

 protected:
  ChoiceFold(const RequestFields& fields, std::vector<int32_t> eos_ids);

  // Appends what token `id` adds to `delta`.
  virtual void feed(int32_t id, ChoiceDelta& delta) = 0;
  // The choice is over: appends what was held back.
  virtual void close(ChoiceDelta& delta) = 0;

  // The reply is complete with the token that is being fed.
  void end_here() { complete_ = true; }
  // Runs new text through the stop strings; appends what is sure to be output.
  void filter(const std::string& text, std::string& emit);
  // Appends the text that waits for a possible stop string; what follows starts a new search.
  void flush(std::string& emit);

 private:
  bool stopped(ChoiceDelta& delta);
  std::vector<std::string> stop_list_;
  StopStrings stops_;
  std::vector<int32_t> eos_ids_;
  std::optional<size_t> found_;
  int64_t min_tokens_;
  bool include_stop_;
  int64_t num_tokens_ = 0;
  bool complete_ = false;
  bool ended_ = false;
};

// Completions: detokenize. `tokenizer` null: text is always "".
std::unique_ptr<ChoiceFold> make_text_fold(const Tokenizer* tokenizer, const RequestFields& fields,
                                           std::vector<int32_t> eos_ids);

// Chat: reasoning, content and tool calls. Stop strings act on content.
std::unique_ptr<ChoiceFold> make_chat_fold(const Tokenizer& tokenizer, const OutputParserOptions& options,
                                           const RequestFields& fields, std::vector<int32_t> eos_ids);

}  // namespace perigee

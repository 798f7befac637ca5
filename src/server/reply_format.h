// ReplyFormat: the JSON of one API's choices, streamed and whole, from the deltas of a fold.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/chat_request.h"
#include "server/choice_fold.h"
#include "server/completion_request.h"
#include "server/http_types.h"
#include "server/model_text.h"

namespace perigee {

// --- What both APIs share: usage, logprobs, finish reasons ---

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  std::optional<int64_t> reasoning_tokens;           // of the completion's; chat only
  int64_t accepted_drafts = 0, rejected_drafts = 0;  // without any the reply says nothing of them
};

Json usage_json(const Usage& usage);

HttpReply json_reply(const Json& body);

// "stop", "length", "tool_calls"; for choices that failed "error" or "timeout".
const char* finish_name(const ChoiceDelta& delta);
Json stop_reason(const ChoiceDelta& delta);  // null, the stop id, or the stop string

double clamp_logprob(float logprob);  // -inf is -9999.0, which JSON can carry

// Completions: {"tokens", "token_logprobs", "top_logprobs", "text_offset"}. An entry with no logprobs (the first prompt
// token) has null values. `offset` is the position in characters of the first token's text, and moves on.
class CompletionLogprobs {
 public:
  CompletionLogprobs(const ModelText& text, bool as_ids, int32_t num_top, int64_t& offset)
      : text_(text), as_ids_(as_ids), num_top_(num_top), offset_(offset) {}
  void add_unscored(int32_t id);
  void add(const TokenLogprobs& entry);
  Json json() &&;

 private:
  void add_token(int32_t id);
  const ModelText& text_;
  bool as_ids_;
  int32_t num_top_;
  int64_t& offset_;
  Json::Array tokens_, token_logprobs_, top_logprobs_, text_offset_;
};

// Chat: {"content": [{token, logprob, bytes, top_logprobs}]}.
Json chat_logprobs(const ModelText& text, bool as_ids, int32_t num_top, const std::vector<TokenLogprobs>& entries);

// vLLM's prompt_logprobs: null for the first token, then {"ID": {logprob, rank, decoded_token}, ...} for each.
Json prompt_logprobs_json(const ModelText& text, bool as_ids, int32_t num_top,
                          const std::vector<TokenLogprobs>& entries);

Json ids_json(const std::vector<int32_t>& ids);

// --- The choices of one API ---

using TokenIds = std::shared_ptr<const std::vector<int32_t>>;

// One choice of a request under way.
struct ChoiceState {
  int32_t index = 0;        // in the reply
  size_t prompt_index = 0;  // which of the request's prompts it answers
  std::unique_ptr<ChoiceFold> fold;
  ChoiceDelta total;  // whole replies: everything so far
  std::vector<TokenLogprobs> prompt_logprobs;
  int64_t text_offset = 0;  // completions: characters of the tokens so far
  bool opened = false;      // streamed: its first chunk has gone out
};

class ReplyFormat {
 public:
  virtual ~ReplyFormat() = default;
  virtual const char* id_prefix() const = 0;
  virtual const char* object_name(bool streamed) const = 0;
  virtual std::unique_ptr<ChoiceFold> make_fold(const std::vector<int32_t>& prompt) const = 0;
  // The streamed choices that say `delta`, one chunk each; none when there is nothing to say yet.
  virtual std::vector<Json> stream(ChoiceState& state, const ChoiceDelta& delta) const = 0;
  virtual Json whole(ChoiceState& state) const = 0;
  // Members of the whole reply beside its choices.
  virtual void add_reply_members(const std::vector<ChoiceState>& choices, Json& reply) const = 0;
  // Whether the reply has the prompt's tokens or text in it.
  virtual bool shows_prompt() const = 0;
  // echo with max_tokens 0: the engine makes one token, which nobody sees.
  virtual bool discards_output() const = 0;
};

struct ReplyContext {
  std::shared_ptr<const ModelText> text;
  std::vector<int32_t> eos_ids;
  std::string reasoning_field;  // "both", "reasoning" or "reasoning_content"
};

// `prompts` are the token ids of the request's prompts, in order.
std::unique_ptr<ReplyFormat> make_completion_format(ReplyContext context, const CompletionRequest& request,
                                                    std::vector<TokenIds> prompts);
std::unique_ptr<ReplyFormat> make_chat_format(ReplyContext context, const ChatRequest& request, TokenIds prompt);

}  // namespace perigee

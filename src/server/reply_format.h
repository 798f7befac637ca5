// ReplyFormat: the JSON of one API's choices, streamed and whole, from the deltas of a fold.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/chat_request.h"
#include "server/choice_fold.h"
#include "server/completion_request.h"
#include "server/model_text.h"

namespace perigee {

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

// The JSON of replies that both APIs share: usage, logprobs, finish reasons.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/choice_fold.h"
#include "server/http_types.h"
#include "server/model_text.h"

namespace perigee {

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
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

}  // namespace perigee

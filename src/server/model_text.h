// ModelText: the text side of a model: tokenizer, chat template, generation defaults.
//
// Every part may be missing; a model without tokenizer files is served with token ids only. Immutable.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "server/request_fields.h"
#include "text/chat_prompt.h"
#include "text/tokenizer.h"

namespace perigee {

class ModelText {
 public:
  // Renders messages, tools (or null) and template variables to a prompt's token ids. More than max_ids of them mean
  // that there are more.
  using ChatEncoder = std::function<Result<std::vector<int32_t>>(const Json& messages, const Json& tools,
                                                                 const Json& kwargs, PromptEnd end, size_t max_ids)>;

  // Reads tokenizer, template and generation_config.json in `dir`. Missing tokenizer files are fine, broken ones are
  // errors.
  static Result<std::shared_ptr<const ModelText>> load(const std::string& dir);
  // For tests: the parts as they are.
  static std::shared_ptr<const ModelText> make(std::shared_ptr<const Tokenizer> tokenizer, ChatEncoder chat,
                                               bool thinks, SamplingDefaults defaults);

  const Tokenizer* tokenizer() const { return tokenizer_.get(); }  // null: token ids only
  std::shared_ptr<const Tokenizer> shared_tokenizer() const { return tokenizer_; }
  bool has_chat() const { return chat_ != nullptr; }
  bool thinks() const { return thinks_; }  // the template knows reasoning
  const SamplingDefaults& defaults() const { return defaults_; }
  const Json& tokenizer_config() const { return tokenizer_config_; }  // with chat_template; null without a tokenizer

  // Requires has_chat().
  Result<std::vector<int32_t>> encode_chat(const Json& messages, const Json& tools, const Json& kwargs, PromptEnd end,
                                           size_t max_ids = SIZE_MAX) const {
    return chat_(messages, tools, kwargs, end, max_ids);
  }

  // A token as logprobs show it: its text alone, with U+FFFD for bytes that do not form characters, or "token_id:N".
  std::string token_text(int32_t id, bool as_id) const;

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  ChatEncoder chat_;
  bool thinks_ = false;
  SamplingDefaults defaults_;
  Json tokenizer_config_;
};

// The sampling defaults in the text of a generation_config.json; values of the wrong type or range are left out.
SamplingDefaults read_generation_config(const Json& config);

}  // namespace perigee

#include "server/completion_request.h"

#include <fmt/core.h>

#include "server/request_fields.h"

namespace perigee {

Result<std::vector<int32_t>> read_token_ids(const Json::Array& list, int64_t vocab, const std::string& field) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& entry : list) {
    const auto id = entry.is_int() ? std::optional<int64_t>(entry.as_int()) : std::nullopt;
    if (!id || *id < 0 || *id >= vocab)
      return bad_input(fmt::format("{} token ids must be integers between 0 and {}", field, vocab - 1), field);
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

namespace {

Result<PromptInput> read_prompt(const Json& value, const RequestContext& context) {
  if (value.is_string()) {
    if (!context.has_tokenizer)
      return bad_input("prompt must be token ids: this model has no tokenizer files", "prompt");
    if (value.as_string().empty()) return bad_input("prompt must not be empty", "prompt");
    return PromptInput(value.as_string());
  }
  if (!value.is_array())
    return bad_input(fmt::format("prompt must be a string, token ids, or a list of either, got {}", value.type_name()),
                     "prompt");
  if (value.as_array().empty()) return bad_input("prompt must not be empty", "prompt");
  ASSIGN_OR_RETURN(auto ids, read_token_ids(value.as_array(), context.vocab, "prompt"));
  return PromptInput(std::move(ids));
}

Result<std::vector<PromptInput>> read_prompts(const Json* value, const RequestContext& context) {
  std::vector<PromptInput> prompts;
  if (value == nullptr) return bad_input("prompt is required: a string, token ids, or a list of either", "prompt");
  const bool several = value->is_array() && !value->as_array().empty() && !value->as_array().front().is_number();
  if (!several) {
    ASSIGN_OR_RETURN(PromptInput prompt, read_prompt(*value, context));
    prompts.push_back(std::move(prompt));
    return prompts;
  }
  const size_t count = value->as_array().size();
  if (count > context.caps.max_prompts)
    return bad_input(fmt::format("prompt lists hold at most {} prompts, got {}; send several requests",
                                 context.caps.max_prompts, count),
                     "prompt");
  for (const Json& entry : value->as_array()) {
    ASSIGN_OR_RETURN(PromptInput prompt, read_prompt(entry, context));
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace

Result<CompletionRequest> parse_completion_request(const Json& body, const RequestContext& context) {
  CompletionRequest request;
  Fields fields(body);
  request.fields = read_request_fields(fields, context);
  request.echo = fields.flag("echo", false);
  request.logprobs = static_cast<int32_t>(fields.integer("logprobs", 0, context.caps.max_logprobs).value_or(-1));
  const int64_t low = request.echo ? 0 : 1;
  request.fields.max_tokens = fields.integer("max_tokens", low, context.max_model_len);
  const Json* prompt = fields.any("prompt");
  request.format = read_output_format(fields, context);
  refuse_unsupported(fields, Api::kCompletions, request.fields.n);
  request.fields.unknown = fields.unknown();
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(request.prompts, read_prompts(prompt, context));
  SamplingParams& sampling = request.fields.sampling;
  sampling.logprobs = request.logprobs;
  if (request.echo && request.logprobs >= 0 && sampling.prompt_logprobs < request.logprobs)
    sampling.prompt_logprobs = request.logprobs;
  return request;
}

}  // namespace perigee

// POST /v1/completions: JSON to a validated request.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/output_format.h"
#include "server/request_fields.h"

namespace perigee {

using PromptInput = std::variant<std::string, std::vector<int32_t>>;  // text, or token ids

struct CompletionRequest {
  RequestFields fields;
  std::optional<OutputFormat> format;
  std::vector<PromptInput> prompts;  // at least one, none empty
  bool echo = false;
  int32_t logprobs = -1;  // -1: none
};

// Errors: kBadInput with the field, its limit and the way out.
Result<CompletionRequest> parse_completion_request(const Json& body, const RequestContext& context);

// Ids from a JSON array of integers, each in [0, vocab).
Result<std::vector<int32_t>> read_token_ids(const Json::Array& list, int64_t vocab, const std::string& field);

}  // namespace perigee

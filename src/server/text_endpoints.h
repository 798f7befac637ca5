// POST /tokenize, POST /detokenize, GET /tokenizer_info: the tokenizer over HTTP.
#pragma once

#include "base/json.h"
#include "base/result.h"
#include "server/model_text.h"
#include "server/request_fields.h"

namespace perigee {

// {prompt}, or {messages} with what makes the prompt of a chat, to {count, max_model_len, tokens, token_strs}.
Result<Json> tokenize(const Json& body, const RequestContext& context, const ModelText& text);

// {tokens} to {prompt}.
Result<Json> detokenize(const Json& body, const RequestContext& context, const ModelText& text);

// Clients count tokens with /tokenize to find out whether a text fits, so more than the context is answered: so many.
size_t max_tokenized(const RequestContext& context);

Result<Json> tokenizer_info(const ModelText& text);

}  // namespace perigee

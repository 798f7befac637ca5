// POST /v1/chat/completions: JSON to a validated request.
//
// Messages come out in the one shape that templates read: roles of Kimi's format, content as a string, tool calls
// checked, reasoning under both of its names.
#pragma once

#include <optional>
#include <string>

#include "server/request_fields.h"

namespace perigee {

struct ChatRequest {
  RequestFields fields;
  Json messages;         // array of objects
  Json tools;            // array, or null when none are to be offered
  Json template_kwargs;  // object: chat_template_kwargs with the thinking switches folded in
  bool add_generation_prompt = true;
  bool include_reasoning = true;
  bool parallel_tool_calls = true;  // false: the reply ends with its first call
  int32_t top_logprobs = -1;        // -1: no logprobs
};

// Errors: kBadInput with the field, its limit and the way out.
Result<ChatRequest> parse_chat_request(const Json& body, const RequestContext& context);

// chat_template_kwargs with the other spellings of the thinking switch as members of it; members given win.
Json read_template_kwargs(Fields& fields, const RequestCaps& caps);

// The messages of a chat or tokenize request in the templates' shape.
Result<Json> read_messages(const Json* value, const RequestCaps& caps);

// The tools of a request; null when absent.
Result<Json> read_tools(const Json* value, const RequestCaps& caps);

}  // namespace perigee

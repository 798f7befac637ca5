// POST /v1/chat/completions: JSON to a validated request.
//
// Messages come out in the one shape that templates read: roles of Kimi's format, content as a string, tool calls
// checked, reasoning under both of its names.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/output_format.h"
#include "server/request_fields.h"
#include "server/tool_request.h"
#include "text/chat_prompt.h"

namespace perigee {

// What the prompt of a chat is made of.
struct Conversation {
  Json messages;                       // array of objects; system messages may hold `tools`
  Json tools;                          // array, or null when the request declares none beside its messages
  std::vector<DeclaredTool> declared;  // all of them
  PromptEnd end = PromptEnd::kReplyBegins;

  void drop_tools();  // as if none had been declared
};

// The members of a chat or tokenize request that say it; faults land in `fields`, which must outlive this.
struct ConversationFields {
  explicit ConversationFields(Fields& fields);
  const Json* messages;
  const Json* tools;
  bool continue_final_message;
  std::optional<bool> add_generation_prompt;
};

// Errors: kBadInput with the field, its limit and the way out.
Result<Conversation> read_conversation(const ConversationFields& fields, const RequestCaps& caps);

struct ChatRequest {
  RequestFields fields;
  Conversation conversation;
  ToolChoice tool_choice;
  std::optional<OutputFormat> format;  // its reasoning apart; of tools, too
  Json template_kwargs;                // object: chat_template_kwargs with the thinking switches folded in
  bool include_reasoning = true;
  bool parallel_tool_calls = true;  // false: the reply ends with its first call
  int32_t top_logprobs = -1;        // -1: no logprobs
};

// Errors: kBadInput with the field, its limit and the way out.
Result<ChatRequest> parse_chat_request(const Json& body, const RequestContext& context);

// chat_template_kwargs with the other spellings of the thinking switch as members of it; members given win.
Json read_template_kwargs(Fields& fields, const RequestCaps& caps);

}  // namespace perigee

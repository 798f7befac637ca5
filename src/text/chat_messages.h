// The messages of a chat request in the form that chat templates expect.
#pragma once

#include "base/json.h"
#include "base/result.h"

namespace perigee {

// Checks the shape of `messages` and rewrites them as ChatPrompt::render (text/chat_prompt.h) says.
// Errors: kBadInput with the field, e.g. "messages[2].tool_calls[0].function.name".
Result<Json> normalise_messages(const Json& messages);

// Whether a call id is of the form that Kimi models write: functions.NAME:IDX.
bool is_native_call_id(std::string_view id);

}  // namespace perigee

// ChatPrompt: from the messages and tools of a chat request to the text of the prompt.
//
// Brings a request into the one form that Kimi's templates expect (null and missing fields, both names of reasoning,
// call ids, tool declarations) and runs the model's template. It knows no tokens: what keeps a control token that
// a user typed from becoming one is the caller's `neutralise`, which every string of the request passes through.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "text/chat_template.h"

namespace perigee {

enum class PromptEnd {
  kReplyBegins,        // with the beginning of the assistant's turn: the generation prompt
  kAfterLastMessage,   // nothing follows the last message
  kInsideLastMessage,  // right after the text of the last message, an assistant's, which the reply continues
};

struct ChatPromptOptions {
  PromptEnd end = PromptEnd::kReplyBegins;
  Json template_kwargs;  // the request's chat_template_kwargs: an object, or null for none
  TemplateLimits limits;
};

// Whether the model may think: `thinking`, or else `enable_thinking`, of chat_template_kwargs; true when neither is
// there. The prompt ends accordingly, and the reply's parser must start accordingly. Errors: kBadInput for a value that
// is not a boolean, and for two that contradict each other.
Result<bool> thinking_enabled(const Json& template_kwargs);

class ChatPrompt {
 public:
  using Neutralise = std::function<std::string(std::string_view)>;

  // Errors: those of ChatTemplate::parse.
  static Result<ChatPrompt> create(std::string template_source);

  // The prompt for `messages`, an array of message objects, with `tools`, an array or null; an empty list of tools is
  // none. Errors: kBadInput with a field such as "messages[2].role" for a wrong shape and "chat_template_kwargs.NAME"
  // for a kwarg that is reserved; those of ChatTemplate::render.
  //
  // To the template go: messages, tools (null for none), add_generation_prompt, the kwargs, and, if the template reads
  // it, tools_ts_str. In messages: `reasoning` and `reasoning_content` are both present or both missing; a missing
  // content is null; a call id that is not of the form functions.NAME:IDX becomes that, IDX counting the calls of the
  // conversation from 0, and so does the tool_call_id of the result that belongs to it. A system message that holds
  // `tools` becomes one of the name tool_declare whose content declares them, as the prompt's own declaration reads.
  Result<std::string> render(const Json& messages, const Json& tools, const ChatPromptOptions& options,
                             const Neutralise& neutralise) const;

 private:
  explicit ChatPrompt(ChatTemplate parsed) : template_(std::move(parsed)) {}
  Status add_kwargs(const Json& kwargs, const Neutralise& neutralise, Json& context) const;

  Json messages_for_template(const Json& normal, const Neutralise& neutralise) const;

  ChatTemplate template_;
};

// Checks the shape of `messages` and rewrites them as ChatPrompt::render says.
// Errors: kBadInput with the field, e.g. "messages[2].tool_calls[0].function.name".
Result<Json> normalise_messages(const Json& messages);

// Whether a call id is of the form that Kimi models write: functions.NAME:IDX.
bool is_native_call_id(std::string_view id);

}  // namespace perigee

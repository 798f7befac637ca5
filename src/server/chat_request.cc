#include "server/chat_request.h"

#include <fmt/core.h>

#include "server/request_fields.h"

namespace perigee {

namespace {

// Content parts joined without a separator, as Kimi's templates print them.
Result<std::string> read_content(const Json& content, const RequestCaps& caps, const std::string& where) {
  if (content.is_string()) return content.as_string();
  const std::string field = where + "content";
  if (!content.is_array()) return bad_input(field + " must be a string or an array of text parts", field);
  if (content.as_array().size() > caps.max_parts)
    return bad_input(fmt::format("{} must have at most {} parts", field, caps.max_parts), field);
  std::string text;
  for (const Json& part : content.as_array()) {
    const Json* type = part.find("type");
    const Json* value = part.find("text");
    if (type == nullptr || !(*type == Json("text")) || value == nullptr || !value->is_string())
      return bad_input(field + " parts must be {\"type\": \"text\", \"text\": ...}: this server takes text only",
                       field);
    text += value->as_string();
  }
  return text;
}

Status check_tool_calls(const Json& calls, const RequestCaps& caps, const std::string& where) {
  const std::string field = where + "tool_calls";
  if (!calls.is_array() || calls.as_array().size() > caps.max_tools)
    return bad_input(fmt::format("{} must be an array of at most {} calls", field, caps.max_tools), field);
  for (const Json& call : calls.as_array()) {
    const Json* function = call.find("function");
    const Json* name = function == nullptr ? nullptr : function->find("name");
    const Json* arguments = function == nullptr ? nullptr : function->find("arguments");
    const Json* id = call.find("id");
    if (name == nullptr || !name->is_string() || (id != nullptr && !id->is_null() && !id->is_string()))
      return bad_input(field + " entries need a string id and function.name", field);
    if (arguments != nullptr && !arguments->is_string() && !arguments->is_object())
      return bad_input(field + " function.arguments must be a string of JSON or an object", field);
  }
  return {};
}

// Reasoning arrives as `reasoning` or `reasoning_content`, and templates read either: both are set.
void copy_reasoning(Fields& fields, Json& out) {
  const Json* reasoning = fields.any("reasoning_content");
  const Json* other = fields.any("reasoning");
  if (reasoning == nullptr) reasoning = other;
  if (reasoning == nullptr) return;
  if (!reasoning->is_string()) return fields.fail("reasoning_content", "must be a string");
  out.set("reasoning_content", *reasoning);
  out.set("reasoning", *reasoning);
}

// What other servers know in a message, and would change the prompt.
void refuse_members(Fields& fields) {
  fields.refuse("prefix", "use partial", Json(false));
  fields.refuse("function_call", "use tool_calls");
  fields.refuse("refusal", "put its text into content");
  fields.refuse("audio", "this server takes text only");
  for (const char* name : {"annotations", "cache_control"}) fields.any(name);  // no effect, and none is missed
  fields.unknown();
}

// The tools that a system message declares; null for none, and for an empty list of them.
const Json* tools_of(Fields& fields, const std::string& role, const Json* content) {
  const Json* tools = fields.any("tools");
  if (tools == nullptr || *tools == Json(Json::Array{})) return nullptr;
  if (role != "system") fields.fail("tools", "belongs in system messages only; others are declared in tools");
  if (content != nullptr && !(*content == Json("")) && !(*content == Json(Json::Array{})))
    fields.fail("tools", "needs an empty content beside it; put the text into a message of its own");
  return tools;
}

// A message in the templates' shape, and what it says beside its text.
struct Message {
  Json json;
  bool partial = false;
};

Result<Message> read_message(const Json& message, const RequestCaps& caps, const std::string& where,
                             DeclaredTools& declared) {
  if (!message.is_object()) return bad_input(where + " must be an object", "messages");
  Fields fields(message, where + ".");
  std::string role = fields.text("role", 64).value_or("");
  if (role == "developer") role = "system";
  const bool assistant = role == "assistant";
  Message result;
  Json& out = result.json;
  if (!assistant && role != "system" && role != "user" && role != "tool")
    fields.fail("role", "must be system, user, assistant or tool");
  out = Json(Json::Object{{"role", role}});
  if (const auto name = fields.text("name", caps.max_string_bytes)) out.set("name", *name);
  const Json* content = fields.any("content");
  const Json* calls = fields.any("tool_calls");
  const Json* tools = tools_of(fields, role, content);
  result.partial = fields.flag("partial", false);
  if (result.partial && !assistant) fields.fail("partial", "belongs in an assistant message: the reply continues it");
  if (content == nullptr && tools == nullptr && !(assistant || calls != nullptr)) fields.fail("content", "is required");
  if (assistant) copy_reasoning(fields, out);
  if (role == "tool" && !fields.any("tool_call_id")) fields.fail("tool_call_id", "is required in a tool message");
  if (const auto id = fields.text("tool_call_id", caps.max_string_bytes)) out.set("tool_call_id", *id);
  if (calls != nullptr && !assistant) fields.fail("tool_calls", "belongs in assistant messages only");
  refuse_members(fields);
  RETURN_IF_ERROR(fields.status());
  if (content != nullptr) {
    ASSIGN_OR_RETURN(std::string text, read_content(*content, caps, where + "."));
    out.set("content", std::move(text));
  }
  if (calls != nullptr && !(calls->is_array() && calls->as_array().empty())) {
    RETURN_IF_ERROR(check_tool_calls(*calls, caps, where + "."));
    out.set("tool_calls", *calls);
  }
  if (tools != nullptr) {
    RETURN_IF_ERROR(declared.add(*tools, where + ".tools", DeclaredTools::Place::kMessage));
    out.set("content", "");
    out.set("tools", *tools);
  }
  return result;
}

// Whether the reply begins a turn or continues the last message, by the request's switches and that message's
// `partial`.
Result<PromptEnd> read_end(const ConversationFields& fields, const Message& last, size_t index) {
  constexpr const char* kContinue = "continue_final_message";
  if (!fields.continue_final_message && !last.partial)
    return fields.add_generation_prompt.value_or(true) ? PromptEnd::kReplyBegins : PromptEnd::kAfterLastMessage;
  const std::string field = fields.continue_final_message ? kContinue : fmt::format("messages[{}].partial", index);
  if (fields.add_generation_prompt == true)
    return bad_input(field + " contradicts \"add_generation_prompt\": true; leave one of them out", field);
  if (!(*last.json.find("role") == Json("assistant")) || last.json.find("tool_calls") != nullptr)
    return bad_input(field + " needs an assistant message without tool_calls as the last one", field);
  return PromptEnd::kInsideLastMessage;
}

// {"type": "enabled" | "disabled", "keep": "all", "effort": ...} of Moonshot's API.
void read_thinking(Fields& fields, Json& kwargs) {
  const Json* thinking = fields.object("thinking");
  if (thinking == nullptr) return;
  Fields members(*thinking, "thinking.");
  kwargs.set("thinking", members.choice("type", {"enabled", "disabled"}).value_or("enabled") == "enabled");
  if (const auto effort = members.choice("effort", {"minimal", "low", "medium", "high", "xhigh", "max"}))
    kwargs.set("thinking_effort", *effort);
  if (members.choice("keep", {"all"})) kwargs.set("preserve_thinking", true);
  members.refuse_unknown();
  fields.adopt(members);
}

void read_reasoning_effort(Fields& fields, Json& kwargs) {
  const auto effort = fields.choice("reasoning_effort", {"none", "minimal", "low", "medium", "high", "xhigh", "max"});
  if (!effort) return;
  if (*effort == "none" && kwargs.find("thinking") != nullptr && *kwargs.find("thinking") == Json(true))
    fields.fail("reasoning_effort", "\"none\" contradicts thinking.type \"enabled\"");
  if (*effort == "none") kwargs.set("thinking", false);
  if (kwargs.find("thinking_effort") == nullptr) kwargs.set("thinking_effort", *effort);
}

void read_logprobs(Fields& fields, const RequestContext& context, ChatRequest& out) {
  const bool wanted = fields.flag("logprobs", false);
  const auto top = fields.integer("top_logprobs", 0, context.caps.max_logprobs);
  if (top.value_or(0) > 0 && !wanted) fields.fail("top_logprobs", "needs \"logprobs\": true");
  if (wanted) out.top_logprobs = static_cast<int32_t>(top.value_or(0));
  out.fields.sampling.logprobs = out.top_logprobs;
}

// The values that Kimi's own API fixes or does not know.
void refuse_as_kimi_does(Fields& fields) {
  constexpr std::string_view kFixed = "this server runs with --kimi-strict, which fixes it; leave it out";
  fields.real("temperature", 0, 1);
  fields.refuse("top_p", kFixed, Json(0.95));
  fields.refuse("presence_penalty", kFixed, Json(0));
  fields.refuse("frequency_penalty", kFixed, Json(0));
  fields.refuse("n", kFixed, Json(1));
  fields.choice("reasoning_effort", {"low", "high", "max"});
  if (const Json* thinking = fields.object("thinking")) {
    Fields members(*thinking, "thinking.");
    members.choice("effort", {"low", "high", "max"});
    fields.adopt(members);
  }
}

// The form that the tools give the reply; nothing where it may be any text.
std::optional<OutputFormat> format_of_calls(const ChatRequest& request) {
  const ToolChoice& choice = request.tool_choice;
  const std::vector<DeclaredTool>& declared = request.conversation.declared;
  const bool is_forced = choice.is_forced();
  if (choice.kind == ToolChoice::Kind::kNone || declared.empty()) return std::nullopt;
  GrammarSpec spec{.kind = GrammarSpec::Kind::kToolCalls};
  const bool one = choice.kind == ToolChoice::Kind::kNamed || !request.parallel_tool_calls;
  if (is_forced)
    spec.calls = one ? GrammarSpec::Calls::kExactlyOne : GrammarSpec::Calls::kRequired;
  else
    spec.calls = one ? GrammarSpec::Calls::kAutoOne : GrammarSpec::Calls::kAuto;
  OutputFormat format{.field = is_forced ? "tool_choice" : "tools", .wanted = is_forced};
  for (const DeclaredTool& tool : declared) {
    if (choice.kind == ToolChoice::Kind::kNamed && tool.name != choice.name) continue;
    spec.tools.push_back({tool.name, tool.parameters});
    format.tools.push_back({tool.where, tool.strict});
  }
  format.spec = std::move(spec);
  return format;
}

// Puts the form of the calls beside that of the text: there is room for one of them.
Status join_formats(ChatRequest& request) {
  std::optional<OutputFormat> calls = format_of_calls(request);
  if (!calls) return {};
  if (request.format) {
    const std::string& field = request.format->field;
    return bad_input(
        fmt::format("{} and {} exclude each other: a reply is a call or text of a form; {}", field, calls->field,
                    request.tool_choice.is_forced() ? "send one of them" : "send \"tool_choice\": \"none\" for text"),
        field);
  }
  if (!request.fields.ignore_eos)
    request.format = std::move(calls);
  else if (!calls->may_lapse())
    return bad_input(fmt::format("ignore_eos contradicts {}: a call that is held to its schema ends the reply",
                                 calls->wanted ? "tool_choice" : "a strict tool"),
                     "ignore_eos");
  return {};
}

}  // namespace

Json read_template_kwargs(Fields& fields, const RequestCaps& caps) {
  constexpr std::string_view kSwitches[] = {"thinking", "enable_thinking", "preserve_thinking", "thinking_effort"};
  constexpr const char* kField = "chat_template_kwargs";
  Json kwargs(Json::Object{});
  read_thinking(fields, kwargs);
  read_reasoning_effort(fields, kwargs);
  const Json* given = fields.object(kField);
  if (given == nullptr) return kwargs;
  if (given->as_object().size() > caps.max_template_kwargs) {
    fields.fail(kField, fmt::format("must have at most {} members, got {}", caps.max_template_kwargs,
                                    given->as_object().size()));
    return kwargs;
  }
  Fields members(*given, "chat_template_kwargs.");
  for (const std::string_view name : kSwitches)
    if (name == "thinking_effort")
      members.text(name, caps.max_string_bytes);
    else
      members.flag(name, false);
  for (const char* name : {"messages", "tools", "tools_ts_str", "add_generation_prompt", "chat_template"})
    if (given->find(name) != nullptr) members.fail(name, "is set by the server and cannot be given");
  members.unknown();  // the template may know them, except a misspelt switch
  fields.adopt(members);
  for (const auto& [name, value] : given->as_object()) kwargs.set(name, value);
  return kwargs;
}

ConversationFields::ConversationFields(Fields& fields)
    : messages(fields.any("messages")),
      tools(fields.any("tools")),
      continue_final_message(fields.flag("continue_final_message", false)) {
  if (fields.any("add_generation_prompt") != nullptr)
    add_generation_prompt = fields.flag("add_generation_prompt", true);
}

Result<Conversation> read_conversation(const ConversationFields& fields, const RequestCaps& caps) {
  const Json* list = fields.messages;
  if (list == nullptr || !list->is_array() || list->as_array().empty())
    return bad_input("messages must be an array with at least one message", "messages");
  const size_t count = list->as_array().size();
  if (count > caps.max_messages)
    return bad_input(fmt::format("messages must have at most {} entries", caps.max_messages), "messages");
  Conversation out;
  DeclaredTools declared(caps);
  if (fields.tools != nullptr) {
    RETURN_IF_ERROR(declared.add(*fields.tools, "tools", DeclaredTools::Place::kRequest));
    out.tools = *fields.tools;
  }
  Json::Array messages;
  for (size_t i = 0; i < count; ++i) {
    const std::string where = fmt::format("messages[{}]", i);
    ASSIGN_OR_RETURN(Message message, read_message(list->as_array()[i], caps, where, declared));
    if (message.partial && i + 1 < count)
      return bad_input(where + ".partial is only allowed in the last message", where + ".partial");
    if (i + 1 == count) {
      ASSIGN_OR_RETURN(out.end, read_end(fields, message, i));
    }
    messages.push_back(std::move(message.json));
  }
  out.messages = Json(std::move(messages));
  out.declared = std::move(declared).take();
  return out;
}

void Conversation::drop_tools() {
  tools = Json();
  declared.clear();
  std::erase_if(messages.as_array(), [](const Json& message) { return message.find("tools") != nullptr; });
}

Result<ChatRequest> parse_chat_request(const Json& body, const RequestContext& context) {
  ChatRequest request;
  Fields fields(body);
  if (!context.has_tokenizer)
    return bad_input("chat needs a tokenizer, which this model lacks; use /v1/completions with token ids", "messages");
  request.fields = read_request_fields(fields, context);
  read_logprobs(fields, context, request);
  const auto older = fields.integer("max_tokens", 1, context.max_model_len);
  const auto newer = fields.integer("max_completion_tokens", 1, context.max_model_len);
  if (older && newer && *older != *newer)
    fields.fail("max_completion_tokens", fmt::format("{} contradicts max_tokens {}; send one of them", *newer, *older));
  request.fields.max_tokens = newer ? newer : older;
  request.include_reasoning = fields.flag("include_reasoning", true);
  request.parallel_tool_calls = fields.flag("parallel_tool_calls", true);
  const ConversationFields conversation(fields);
  const Json* tool_choice = fields.any("tool_choice");
  request.template_kwargs = read_template_kwargs(fields, context.caps);
  request.format = read_output_format(fields, context);
  if (context.kimi_strict) refuse_as_kimi_does(fields);
  refuse_unsupported(fields, Api::kChat, request.fields.n);
  request.fields.unknown = fields.unknown();
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(request.conversation, read_conversation(conversation, context.caps));
  if (tool_choice != nullptr) {
    ASSIGN_OR_RETURN(request.tool_choice, read_tool_choice(*tool_choice, request.conversation.declared));
  }
  if (request.tool_choice.kind == ToolChoice::Kind::kNone) request.conversation.drop_tools();
  RETURN_IF_ERROR(join_formats(request));
  return request;
}

}  // namespace perigee

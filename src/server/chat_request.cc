#include "server/chat_request.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <unordered_set>

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
  constexpr std::string_view kPrefill = "use /v1/completions with the rendered prompt";
  fields.refuse("tools", "declare tools in the request's own tools", Json(Json::Array{}));
  fields.refuse("partial", kPrefill, Json(false));
  fields.refuse("prefix", kPrefill, Json(false));
  fields.refuse("function_call", "use tool_calls");
  fields.refuse("refusal", "put its text into content");
  fields.refuse("audio", "this server takes text only");
  for (const char* name : {"annotations", "cache_control"}) fields.any(name);  // no effect, and none is missed
  fields.unknown();
}

Result<Json> read_message(const Json& message, const RequestCaps& caps, const std::string& where) {
  if (!message.is_object()) return bad_input(where + " must be an object", "messages");
  Fields fields(message, where + ".");
  std::string role = fields.text("role", 64).value_or("");
  if (role == "developer") role = "system";
  const bool assistant = role == "assistant";
  if (!assistant && role != "system" && role != "user" && role != "tool")
    fields.fail("role", "must be system, user, assistant or tool");
  Json out(Json::Object{});
  out.set("role", role);
  if (const auto name = fields.text("name", caps.max_string_bytes)) out.set("name", *name);
  const Json* content = fields.any("content");
  const Json* calls = fields.any("tool_calls");
  if (content == nullptr && !(assistant || calls != nullptr)) fields.fail("content", "is required");
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
  return out;
}

bool is_tool_name(const std::string& name, const RequestCaps& caps) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-' || c == '.'; };
  return !name.empty() && name.size() <= caps.max_tool_name_bytes && std::all_of(name.begin(), name.end(), allowed);
}

// The name of the function that a tool declares.
Result<std::string_view> check_tool(const Json& tool, const RequestCaps& caps, const std::string& where) {
  if (!tool.is_object()) return bad_input(where + " must be an object", "tools");
  Fields fields(tool, where + ".");
  fields.choice("type", {"function"});
  const Json* function = fields.object("function");
  fields.unknown();
  RETURN_IF_ERROR(fields.status());
  const Json* name = function == nullptr ? nullptr : function->find("name");
  if (name == nullptr || !name->is_string() || !is_tool_name(name->as_string(), caps))
    return bad_input(fmt::format("{} needs a function.name of 1 to {} letters, digits, '_', '-' or '.'", where,
                                 caps.max_tool_name_bytes),
                     "tools");
  Fields members(*function, where + ".function.");
  members.any("name");
  members.object("parameters");  // a JSON schema
  members.text("description", caps.max_tool_schema_bytes);
  members.refuse("strict", "it needs grammar support, which this version lacks; leave it out", Json(false));
  members.unknown();  // others are part of the declaration that the model reads
  RETURN_IF_ERROR(members.status());
  if (dump_json(tool).size() > caps.max_tool_schema_bytes)
    return bad_input(fmt::format("{} must be at most {} bytes", where, caps.max_tool_schema_bytes), "tools");
  return std::string_view(name->as_string());
}

// "auto" and "none" are served; forcing a call needs a grammar.
Status apply_tool_choice(const Json* choice, Json& tools) {
  constexpr const char* kField = "tool_choice";
  if (choice == nullptr || *choice == Json("auto")) return {};
  if (*choice == Json("none")) {
    tools = Json();
    return {};
  }
  const bool forced = *choice == Json("required") || choice->is_object();
  if (!forced) return bad_input("tool_choice must be \"auto\" or \"none\"", kField);
  if (tools.is_null()) return bad_input("tool_choice needs tools", kField);
  return bad_input(
      "tool_choice \"required\" and named functions need grammar support, not in this version; use \"auto\"", kField);
}

// {"type": "enabled" | "disabled", "keep": "all", "effort": ...} of Moonshot's API.
void read_thinking(Fields& fields, Json& kwargs) {
  const Json* thinking = fields.object("thinking");
  if (thinking == nullptr) return;
  Fields members(*thinking, "thinking.");
  const auto type = members.choice("type", {"enabled", "disabled"});
  if (!type) members.fail("type", "must be \"enabled\" or \"disabled\"");
  kwargs.set("thinking", type == "enabled");
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

Result<Json> read_messages(const Json* value, const RequestCaps& caps) {
  if (value == nullptr || !value->is_array() || value->as_array().empty())
    return bad_input("messages must be an array with at least one message", "messages");
  if (value->as_array().size() > caps.max_messages)
    return bad_input(fmt::format("messages must have at most {} entries", caps.max_messages), "messages");
  Json::Array out;
  for (size_t i = 0; i < value->as_array().size(); ++i) {
    ASSIGN_OR_RETURN(Json message, read_message(value->as_array()[i], caps, fmt::format("messages[{}]", i)));
    out.push_back(std::move(message));
  }
  return Json(std::move(out));
}

Result<Json> read_tools(const Json* value, const RequestCaps& caps) {
  if (value == nullptr) return Json();
  if (!value->is_array() || value->as_array().empty() || value->as_array().size() > caps.max_tools)
    return bad_input(fmt::format("tools must be an array of 1 to {} tools; leave it out for none", caps.max_tools),
                     "tools");
  std::unordered_set<std::string_view> names;
  for (size_t i = 0; i < value->as_array().size(); ++i) {
    ASSIGN_OR_RETURN(const std::string_view name, check_tool(value->as_array()[i], caps, fmt::format("tools[{}]", i)));
    if (!names.insert(name).second)
      return bad_input(fmt::format("tools has the function {} twice; names must differ", name), "tools");
  }
  return *value;
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
  request.add_generation_prompt = fields.flag("add_generation_prompt", true);
  request.include_reasoning = fields.flag("include_reasoning", true);
  request.parallel_tool_calls = fields.flag("parallel_tool_calls", true);
  const Json* messages = fields.any("messages");
  const Json* tools = fields.any("tools");
  const Json* tool_choice = fields.any("tool_choice");
  request.template_kwargs = read_template_kwargs(fields, context.caps);
  refuse_unsupported(fields, Api::kChat, request.fields.n);
  request.fields.unknown = fields.unknown();
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(request.messages, read_messages(messages, context.caps));
  ASSIGN_OR_RETURN(request.tools, read_tools(tools, context.caps));
  RETURN_IF_ERROR(apply_tool_choice(tool_choice, request.tools));
  return request;
}

}  // namespace perigee

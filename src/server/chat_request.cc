#include "server/chat_request.h"

#include <algorithm>
#include <cctype>

namespace perigee {

namespace {

// Content parts joined without a separator, as Kimi's templates print them.
Result<std::string> read_content(const Json& content, const RequestCaps& caps, const std::string& where) {
  if (content.is_string()) return content.as_string();
  const std::string field = where + "content";
  if (!content.is_array()) return bad_input(field + " must be a string or an array of text parts", field);
  if (content.as_array().size() > caps.max_parts)
    return bad_input(str_cat(field, " must have at most ", caps.max_parts, " parts"), field);
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
    return bad_input(str_cat(field, " must be an array of at most ", caps.max_tools, " calls"), field);
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

Status check_tool(const Json& tool, const RequestCaps& caps) {
  const Json* type = tool.find("type");
  if (type != nullptr && !(*type == Json("function")))
    return bad_input("tools entries must have \"type\": \"function\"", "tools");
  const Json* function = tool.find("function");
  const Json* name = function == nullptr ? nullptr : function->find("name");
  if (name == nullptr || !name->is_string() || !is_tool_name(name->as_string(), caps))
    return bad_input(str_cat("tools entries need a function.name of 1 to ", caps.max_tool_name_bytes,
                             " letters, digits, '_', '-' or '.'"),
                     "tools");
  const Json* parameters = function->find("parameters");
  if (parameters != nullptr && !parameters->is_null() && !parameters->is_object())
    return bad_input("tools function.parameters must be an object (a JSON schema)", "tools");
  if (dump_json(tool).size() > caps.max_tool_schema_bytes)
    return bad_input(str_cat("tools entries must be at most ", caps.max_tool_schema_bytes, " bytes"), "tools");
  return {};
}

// tool_choice: "auto" and "none" are served; forcing a call needs a grammar.
void read_tool_choice(Fields& fields, ChatRequest& out) {
  const Json* choice = fields.any("tool_choice");
  if (choice == nullptr || *choice == Json("auto")) return;
  if (*choice == Json("none")) {
    out.tools = Json();
    return;
  }
  const bool forced = *choice == Json("required") || choice->is_object();
  if (!forced) return fields.fail("tool_choice", "must be \"auto\" or \"none\"");
  if (out.tools.is_null()) return fields.fail("tool_choice", "needs tools");
  fields.fail("tool_choice",
              "\"required\" and named functions need grammar support, not in this version; use \"auto\"");
}

// The several spellings of the thinking switch become members of chat_template_kwargs, which win where given.
void read_thinking(Fields& fields, ChatRequest& out) {
  Json kwargs(Json::Object{});
  if (const Json* thinking = fields.object("thinking")) {
    const Json* type = thinking->find("type");
    const bool on = type != nullptr && *type == Json("enabled");
    if (!on && (type == nullptr || !(*type == Json("disabled"))))
      fields.fail("thinking", "must have a \"type\" of \"enabled\" or \"disabled\"");
    kwargs.set("thinking", on);
    if (const Json* effort = thinking->find("effort")) kwargs.set("thinking_effort", *effort);
    if (const Json* keep = thinking->find("keep")) kwargs.set("preserve_thinking", *keep == Json("all"));
  }
  if (const auto effort = fields.text("reasoning_effort", 32)) {
    if (*effort == "none") kwargs.set("thinking", false);
    if (kwargs.find("thinking_effort") == nullptr) kwargs.set("thinking_effort", *effort);
  }
  if (const Json* given = fields.object("chat_template_kwargs")) {
    for (const auto& [name, value] : given->as_object()) kwargs.set(name, value);
    for (const char* name : {"thinking", "enable_thinking"})
      if (const Json* value = given->find(name); value != nullptr && !value->is_bool())
        fields.fail("chat_template_kwargs", str_cat(name, " must be true or false"));
    for (const char* name : {"messages", "tools", "tools_ts_str", "add_generation_prompt", "chat_template"})
      if (given->find(name) != nullptr) fields.fail("chat_template_kwargs", str_cat("must not set ", name));
  }
  out.template_kwargs = std::move(kwargs);
}

void read_logprobs(Fields& fields, const RequestContext& context, ChatRequest& out) {
  const bool wanted = fields.flag("logprobs", false);
  const auto top = fields.integer("top_logprobs", 0, context.caps.max_logprobs);
  if (top.value_or(0) > 0 && !wanted) fields.fail("top_logprobs", "needs \"logprobs\": true");
  if (wanted) out.top_logprobs = static_cast<int32_t>(top.value_or(0));
  out.fields.sampling.logprobs = out.top_logprobs;
}

}  // namespace

Result<Json> read_messages(const Json* value, const RequestCaps& caps) {
  if (value == nullptr || !value->is_array() || value->as_array().empty())
    return bad_input("messages must be an array with at least one message", "messages");
  if (value->as_array().size() > caps.max_messages)
    return bad_input(str_cat("messages must have at most ", caps.max_messages, " entries"), "messages");
  Json::Array out;
  for (size_t i = 0; i < value->as_array().size(); ++i) {
    ASSIGN_OR_RETURN(Json message, read_message(value->as_array()[i], caps, str_cat("messages[", i, "]")));
    out.push_back(std::move(message));
  }
  return Json(std::move(out));
}

Result<Json> read_tools(const Json* value, const RequestCaps& caps) {
  if (value == nullptr) return Json();
  if (!value->is_array() || value->as_array().empty() || value->as_array().size() > caps.max_tools)
    return bad_input(str_cat("tools must be an array of 1 to ", caps.max_tools, " tools; leave it out for none"),
                     "tools");
  for (const Json& tool : value->as_array()) RETURN_IF_ERROR(check_tool(tool, caps));
  return *value;
}

Result<ChatRequest> parse_chat_request(const Json& body, const RequestContext& context) {
  ChatRequest request;
  Fields fields(body);
  if (!context.has_tokenizer)
    return bad_input("chat needs a tokenizer, which this checkpoint lacks; use /v1/completions with token ids",
                     "messages");
  request.fields = read_request_fields(fields, context);
  read_logprobs(fields, context, request);
  const auto older = fields.integer("max_tokens", 1, context.max_model_len);
  const auto newer = fields.integer("max_completion_tokens", 1, context.max_model_len);
  request.fields.max_tokens = newer ? newer : older;
  request.add_generation_prompt = fields.flag("add_generation_prompt", true);
  request.continue_final_message = fields.flag("continue_final_message", false);
  request.include_reasoning = fields.flag("include_reasoning", true);
  request.parallel_tool_calls = fields.flag("parallel_tool_calls", true);
  fields.flag("add_special_tokens", false);
  fields.refuse("echo", "use /v1/completions", Json(false));
  fields.refuse("functions", "use tools");
  fields.refuse("function_call", "use tool_choice");
  if (request.continue_final_message)
    fields.fail("continue_final_message", "is not supported: use /v1/completions with the rendered prompt");
  const Json* messages = fields.any("messages");
  const Json* tools = fields.any("tools");
  read_thinking(fields, request);
  RETURN_IF_ERROR(fields.status());
  ASSIGN_OR_RETURN(request.messages, read_messages(messages, context.caps));
  ASSIGN_OR_RETURN(request.tools, read_tools(tools, context.caps));
  read_tool_choice(fields, request);
  RETURN_IF_ERROR(fields.status());
  request.fields.unknown = fields.unknown();
  return request;
}

}  // namespace perigee

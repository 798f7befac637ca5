#include "text/chat_prompt.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>

#include "text/tool_declarations.h"

namespace perigee {
namespace {

// What the template and its interpreter take for their own: a request may not set it (CVE-2025-62426's class).
constexpr std::array<std::string_view, 20> kReserved = {
    "messages",
    "tools",
    "add_generation_prompt",
    "tools_ts_str",
    "chat_template",
    "documents",
    "tokenize",
    "continue_final_message",
    "return_dict",
    "template_kwargs",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
    "loop",
    "tojson",
    "conversation",
};

Json neutralised(const Json& value, const ChatPrompt::Neutralise& neutralise) {
  if (value.is_string()) return Json(neutralise(value.as_string()));
  if (value.is_array()) {
    Json::Array items;
    items.reserve(value.as_array().size());
    for (const Json& item : value.as_array()) items.push_back(neutralised(item, neutralise));
    return Json(std::move(items));
  }
  if (!value.is_object()) return value;
  Json::Object members;
  members.reserve(value.as_object().size());
  for (const auto& [key, member] : value.as_object())
    members.emplace_back(neutralise(key), neutralised(member, neutralise));
  return Json(std::move(members));
}

Error wrong_kwarg(std::string_view name, std::string_view what) {
  const std::string field = fmt::format("chat_template_kwargs.{}", name.substr(0, 64));
  return bad_input(fmt::format("{} {}", field, what), field);
}

Status check_tools(const Json& tools) {
  if (tools.is_null()) return {};
  if (!tools.is_array()) return bad_input("tools must be an array", "tools");
  for (size_t i = 0; i < tools.as_array().size(); ++i) {
    const std::string field = fmt::format("tools[{}]", i);
    if (!tools.as_array()[i].is_object()) return bad_input(field + " must be an object", field);
  }
  return {};
}

// Follows the text that a reply continues. Whatever a template prints after the text of the last message comes from the
// template, so the last of these strings in the prompt is the one that was put there.
constexpr std::string_view kContinued = "\xEF\xB7\x91\xEF\xB7\x91";  // U+FDD1, a noncharacter, twice

Status mark_last_message(Json& messages) {
  constexpr const char* kField = "messages";
  if (messages.as_array().empty()) return bad_input("messages must not be empty", kField);
  Json& last = messages.as_array().back();
  if (*last.find("role") != Json("assistant") || last.find("tool_calls"))
    return bad_input("the last message must be an assistant's without tool_calls: the reply continues it", kField);
  Json& content = *last.find("content");
  if (content.is_string())
    content.as_string() += kContinued;
  else if (content.is_array())
    content.as_array().push_back(Json(Json::Object{{"type", "text"}, {"text", std::string(kContinued)}}));
  else
    content = std::string(kContinued);
  return {};
}

Result<std::string> cut_at_mark(std::string prompt) {
  const size_t mark = prompt.rfind(kContinued);
  if (mark == std::string::npos)
    return bad_input("this model's chat template does not print the last message: it cannot be continued", "messages");
  prompt.resize(mark);
  return prompt;
}

}  // namespace

Result<bool> thinking_enabled(const Json& template_kwargs) {
  std::optional<bool> enabled;
  for (const char* name : {"thinking", "enable_thinking"}) {
    const Json* value = template_kwargs.find(name);
    if (!value || value->is_null()) continue;
    if (!value->is_bool()) return wrong_kwarg(name, "must be a boolean");
    if (enabled && *enabled != value->as_bool()) return wrong_kwarg(name, "contradicts chat_template_kwargs.thinking");
    enabled = value->as_bool();
  }
  return enabled.value_or(true);
}

Result<ChatPrompt> ChatPrompt::create(std::string template_source) {
  ASSIGN_OR_RETURN(ChatTemplate parsed, ChatTemplate::parse(std::move(template_source)));
  return ChatPrompt(std::move(parsed));
}

Status ChatPrompt::add_kwargs(const Json& kwargs, const Neutralise& neutralise, Json& context) const {
  if (kwargs.is_null()) return {};
  if (!kwargs.is_object()) return bad_input("chat_template_kwargs must be an object", "chat_template_kwargs");
  for (const auto& [name, value] : kwargs.as_object()) {
    if (std::find(kReserved.begin(), kReserved.end(), name) != kReserved.end())
      return wrong_kwarg(name, "is set by the server and cannot be given");
    if (name == "thinking" || name == "enable_thinking") continue;
    if (name == "preserve_thinking" && !value.is_bool()) return wrong_kwarg(name, "must be a boolean");
    context.set(name, neutralised(value, neutralise));
  }
  ASSIGN_OR_RETURN(const bool thinking, thinking_enabled(kwargs));
  // Only `thinking` acts in Kimi's templates; templates of other families read the other name.
  if (kwargs.find("thinking") || kwargs.find("enable_thinking")) {
    context.set("thinking", thinking);
    context.set("enable_thinking", thinking);
  }
  return {};
}

Result<std::string> ChatPrompt::render(const Json& messages, const Json& tools, const ChatPromptOptions& options,
                                       const Neutralise& neutralise) const {
  RETURN_IF_ERROR(check_tools(tools));
  ASSIGN_OR_RETURN(const Json normal, normalise_messages(messages));
  Json context{Json::Object{}};
  RETURN_IF_ERROR(add_kwargs(options.template_kwargs, neutralise, context));
  Json prepared = messages_for_template(normal, neutralise);
  const bool continues = options.end == PromptEnd::kInsideLastMessage;
  if (continues) RETURN_IF_ERROR(mark_last_message(prepared));
  context.set("messages", std::move(prepared));
  context.set("add_generation_prompt", options.end == PromptEnd::kReplyBegins);
  const bool has_tools = tools.is_array() && !tools.as_array().empty();
  const Json declared = has_tools ? neutralised(tools, neutralise) : Json();
  const bool as_text = has_tools && template_.mentions("tools_ts_str");
  // Templates that read the TypeScript text were written for sorted tools; older ones print the tools as they came.
  context.set("tools", as_text ? deep_sorted(declared) : declared);
  if (as_text) context.set("tools_ts_str", declare_tools(declared));
  Result<std::string> prompt = template_.render(context, options.limits);
  return continues && prompt.ok() ? cut_at_mark(std::move(*prompt)) : prompt;
}

Json ChatPrompt::messages_for_template(const Json& normal, const Neutralise& neutralise) const {
  Json messages = neutralised(normal, neutralise);
  for (Json& message : messages.as_array()) {
    const Json* tools = message.find("tools");
    if (tools == nullptr) continue;
    std::string text = template_.mentions("tools_ts_str") ? declare_tools(*tools) : dump_json(*tools);
    message = Json(Json::Object{{"role", "system"}, {"name", "tool_declare"}, {"content", std::move(text)}});
  }
  return messages;
}

namespace {

constexpr std::string_view kNativePrefix = "functions.";

// Goes through the messages in order and remembers the ids it gave to calls.
class Normaliser {
 public:
  Result<Json> message(const Json& given, const std::string& field);

 private:
  Status check_role(const Json& message, const std::string& field);
  Status normalise_reasoning(Json& message, const std::string& field);
  Status normalise_content(Json& message, const std::string& field);
  Status check_parts(const Json& parts, const std::string& field);
  Status normalise_calls(Json& message, const std::string& field);
  Status normalise_call(Json& call, const std::string& field);
  Status normalise_result(Json& message, const std::string& field);
  static Status normalise_tools(Json& message, const std::string& field);

  size_t num_calls_ = 0;
  std::unordered_map<std::string, std::string> new_ids_;  // of foreign ids; a later call may reuse one
};

const Json* find_value(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value && !value->is_null() ? value : nullptr;
}

void remove(Json& object, std::string_view key) {
  std::erase_if(object.as_object(), [key](const Json::Member& member) { return member.first == key; });
}

Error wrong(const std::string& field, std::string_view expected) {
  return bad_input(fmt::format("{} must be {}", field, expected), field);
}

Status Normaliser::check_role(const Json& message, const std::string& field) {
  const Json* role = message.find("role");
  if (!role || !role->is_string() || role->as_string().empty()) return wrong(field + ".role", "a non-empty string");
  const Json* name = find_value(message, "name");
  if (name && !name->is_string()) return wrong(field + ".name", "a string");
  return {};
}

// The two names of the reasoning text become one value under both.
Status Normaliser::normalise_reasoning(Json& message, const std::string& field) {
  const Json* found = nullptr;
  for (const char* name : {"reasoning", "reasoning_content"}) {
    const Json* value = find_value(message, name);
    if (!value) continue;
    if (!value->is_string()) return wrong(fmt::format("{}.{}", field, name), "a string or null");
    found = value;
  }
  if (!found) {
    remove(message, "reasoning");
    remove(message, "reasoning_content");
    return {};
  }
  const Json text = *found;
  message.set("reasoning", text);
  message.set("reasoning_content", text);
  return {};
}

Status Normaliser::check_parts(const Json& parts, const std::string& field) {
  for (size_t i = 0; i < parts.as_array().size(); ++i) {
    const Json& part = parts.as_array()[i];
    const std::string where = fmt::format("{}[{}]", field, i);
    const Json* type = part.find("type");
    if (!type || !type->is_string()) return wrong(where, "an object with a type");
    if (type->as_string() != "text")
      return bad_input(
          fmt::format("{}.type: only text parts are supported, not '{}'", where, type->as_string().substr(0, 32)),
          where + ".type");
    const Json* text = part.find("text");
    if (!text || !text->is_string()) return wrong(where + ".text", "a string");
  }
  return {};
}

Status Normaliser::normalise_content(Json& message, const std::string& field) {
  const std::string& role = message.find("role")->as_string();
  const Json* content = find_value(message, "content");
  if (!content) {
    if (role != "assistant" && role != "tool") return wrong(field + ".content", "a string or a list of text parts");
    message.set("content", nullptr);
    return {};
  }
  if (content->is_string()) return {};
  if (!content->is_array()) return wrong(field + ".content", "a string or a list of text parts");
  return check_parts(*content, field + ".content");
}

Status Normaliser::normalise_calls(Json& message, const std::string& field) {
  const std::string where = field + ".tool_calls";
  Json* calls = message.find("tool_calls");
  if (!calls) return {};
  if (calls->is_null() || (calls->is_array() && calls->as_array().empty())) {
    remove(message, "tool_calls");
    return {};
  }
  if (!calls->is_array()) return wrong(where, "an array");
  if (message.find("role")->as_string() != "assistant")
    return bad_input(fmt::format("{} belongs to assistant messages only", where), where);
  for (size_t i = 0; i < calls->as_array().size(); ++i)
    RETURN_IF_ERROR(normalise_call(calls->as_array()[i], fmt::format("{}[{}]", where, i)));
  return {};
}

Status Normaliser::normalise_call(Json& call, const std::string& field) {
  Json* function = call.find("function");
  if (!function || !function->is_object()) return wrong(field + ".function", "an object");
  const Json* name = function->find("name");
  if (!name || !name->is_string() || name->as_string().empty())
    return wrong(field + ".function.name", "a non-empty string");
  const Json* arguments = function->find("arguments");
  if (!arguments || !(arguments->is_string() || arguments->is_object()))
    return wrong(field + ".function.arguments", "a string or an object");
  const Json* id = find_value(call, "id");
  if (id && !id->is_string()) return wrong(field + ".id", "a string");
  const size_t index = num_calls_++;
  if (id && is_native_call_id(id->as_string())) return {};
  const std::string fresh = fmt::format("{}{}:{}", kNativePrefix, name->as_string(), index);
  if (id) new_ids_[id->as_string()] = fresh;
  call.set("id", fresh);
  return {};
}

Status Normaliser::normalise_result(Json& message, const std::string& field) {
  const Json* id = find_value(message, "tool_call_id");
  const bool is_result = message.find("role")->as_string() == "tool";
  if (!id && !is_result) return {};
  if (!id || !id->is_string()) return wrong(field + ".tool_call_id", "a string");
  const auto fresh = new_ids_.find(id->as_string());
  if (fresh != new_ids_.end()) message.set("tool_call_id", fresh->second);
  return {};
}

Status Normaliser::normalise_tools(Json& message, const std::string& field) {
  const Json* tools = find_value(message, "tools");
  if (tools == nullptr) {
    remove(message, "tools");
    return {};
  }
  if (message.find("role")->as_string() != "system")
    return bad_input(fmt::format("{}.tools belongs to system messages only", field), field + ".tools");
  if (!tools->is_array()) return wrong(field + ".tools", "an array");
  return {};
}

Result<Json> Normaliser::message(const Json& given, const std::string& field) {
  if (!given.is_object()) return wrong(field, "an object");
  Json message = given;
  RETURN_IF_ERROR(check_role(message, field));
  RETURN_IF_ERROR(normalise_reasoning(message, field));
  RETURN_IF_ERROR(normalise_content(message, field));
  RETURN_IF_ERROR(normalise_calls(message, field));
  RETURN_IF_ERROR(normalise_result(message, field));
  RETURN_IF_ERROR(normalise_tools(message, field));
  return message;
}

}  // namespace

bool is_native_call_id(std::string_view id) {
  if (!id.starts_with(kNativePrefix)) return false;
  id.remove_prefix(kNativePrefix.size());
  const size_t colon = id.rfind(':');
  if (colon == std::string_view::npos || colon == 0 || colon + 1 == id.size()) return false;
  const std::string_view index = id.substr(colon + 1);
  return std::all_of(index.begin(), index.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Result<Json> normalise_messages(const Json& messages) {
  if (!messages.is_array()) return wrong("messages", "an array");
  Normaliser normaliser;
  Json::Array out;
  out.reserve(messages.as_array().size());
  for (size_t i = 0; i < messages.as_array().size(); ++i) {
    ASSIGN_OR_RETURN(Json message, normaliser.message(messages.as_array()[i], fmt::format("messages[{}]", i)));
    out.push_back(std::move(message));
  }
  return Json(std::move(out));
}

}  // namespace perigee

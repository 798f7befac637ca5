#include "text/chat_prompt.h"

#include <algorithm>
#include <array>
#include <optional>

#include "text/chat_messages.h"
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
  const std::string field = str_cat("chat_template_kwargs.", name.substr(0, 64));
  return bad_input(str_cat(field, " ", what), field);
}

Status check_tools(const Json& tools) {
  if (tools.is_null()) return {};
  if (!tools.is_array()) return bad_input("tools must be an array", "tools");
  for (size_t i = 0; i < tools.as_array().size(); ++i) {
    const std::string field = str_cat("tools[", i, "]");
    if (!tools.as_array()[i].is_object()) return bad_input(field + " must be an object", field);
  }
  return {};
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
  context.set("messages", neutralised(normal, neutralise));
  context.set("add_generation_prompt", options.add_generation_prompt);
  const bool has_tools = tools.is_array() && !tools.as_array().empty();
  const Json declared = has_tools ? neutralised(tools, neutralise) : Json();
  const bool as_text = has_tools && template_.mentions("tools_ts_str");
  // Templates that read the TypeScript text were written for sorted tools; older ones print the tools as they came.
  context.set("tools", as_text ? deep_sorted(declared) : declared);
  if (as_text) context.set("tools_ts_str", declare_tools(declared));
  return template_.render(context, options.limits);
}

}  // namespace perigee

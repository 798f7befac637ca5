#include "text/chat_messages.h"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace perigee {
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
  return bad_input(str_cat(field, " must be ", expected), field);
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
    if (!value->is_string()) return wrong(str_cat(field, ".", name), "a string or null");
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
    const std::string where = str_cat(field, "[", i, "]");
    const Json* type = part.find("type");
    if (!type || !type->is_string()) return wrong(where, "an object with a type");
    if (type->as_string() != "text")
      return bad_input(
          str_cat(where, ".type: only text parts are supported, not '", type->as_string().substr(0, 32), "'"),
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
    return bad_input(str_cat(where, " belongs to assistant messages only"), where);
  for (size_t i = 0; i < calls->as_array().size(); ++i)
    RETURN_IF_ERROR(normalise_call(calls->as_array()[i], str_cat(where, "[", i, "]")));
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
  const std::string fresh = str_cat(kNativePrefix, name->as_string(), ":", index);
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

Result<Json> Normaliser::message(const Json& given, const std::string& field) {
  if (!given.is_object()) return wrong(field, "an object");
  Json message = given;
  RETURN_IF_ERROR(check_role(message, field));
  RETURN_IF_ERROR(normalise_reasoning(message, field));
  RETURN_IF_ERROR(normalise_content(message, field));
  RETURN_IF_ERROR(normalise_calls(message, field));
  RETURN_IF_ERROR(normalise_result(message, field));
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
    ASSIGN_OR_RETURN(Json message, normaliser.message(messages.as_array()[i], str_cat("messages[", i, "]")));
    out.push_back(std::move(message));
  }
  return Json(std::move(out));
}

}  // namespace perigee

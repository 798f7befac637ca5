#include "grammar/schema_evaluated.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace perigee {
namespace {

const char* const kEvaluating[] = {
    "properties", "patternProperties", "additionalProperties", "dependentSchemas", "anyOf", "oneOf", "prefixItems",
    "items",      "contains"};

}  // namespace

bool evaluates(const Json& schema) {
  return std::any_of(std::begin(kEvaluating), std::end(kEvaluating),
                     [&](const char* key) { return schema.find(key) != nullptr; });
}

bool speaks_of_unevaluated(const Json& in) {
  if (in.is_array()) return std::any_of(in.as_array().begin(), in.as_array().end(), speaks_of_unevaluated);
  if (!in.is_object()) return false;
  return std::any_of(in.as_object().begin(), in.as_object().end(), [](const Json::Member& member) {
    const bool closes = member.first == "unevaluatedProperties" || member.first == "unevaluatedItems";
    return (closes && !(member.second == Json(true))) || speaks_of_unevaluated(member.second);
  });
}

bool evaluates_more(const Json& part, const Json& beside) {
  if (!part.is_object()) return false;
  const auto of_member = [&](const Json::Member& member) {
    const auto& [key, value] = member;
    const auto is_any = [key = std::string_view(key)](std::initializer_list<std::string_view> keys) {
      return std::find(keys.begin(), keys.end(), key) != keys.end();
    };
    if (is_any({"allOf", "anyOf", "oneOf"}) && value.is_array())
      return std::any_of(value.as_array().begin(), value.as_array().end(),
                         [&](const Json& each) { return evaluates_more(each, beside); });
    const Json *declared = beside.find("properties"), *items = beside.find("items");
    if (key == "properties" && value.is_object() && beside.find("additionalProperties") == nullptr)
      return std::any_of(value.as_object().begin(), value.as_object().end(), [&](const Json::Member& property) {
        return declared == nullptr || declared->find(property.first) == nullptr;
      });
    if (is_any({"properties", "additionalProperties"})) return beside.find("additionalProperties") == nullptr;
    if (is_any({"prefixItems", "items", "contains"})) return items == nullptr || items->is_array();
    return is_any({"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "patternProperties",
                   "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems"});
  };
  return std::any_of(part.as_object().begin(), part.as_object().end(), of_member);
}

}  // namespace perigee

#include "grammar/schema_modern.h"

#include <string>
#include <utility>

namespace perigee {

Json modern(const Json& schema) {
  Json out = schema;
  const auto erase = [&](const char* key) {
    std::erase_if(out.as_object(), [&](const Json::Member& member) { return member.first == key; });
  };
  const auto add = [&](const char* key, Json value) {  // beside what it says already
    if (out.find(key) == nullptr) {
      out.set(key, std::move(value));
      return;
    }
    const Json* own = out.find("allOf");
    Json::Array all = own == nullptr ? Json::Array{} : own->is_array() ? own->as_array() : Json::Array{*own};
    all.emplace_back(Json::Object{{key, std::move(value)}});
    out.set("allOf", Json(std::move(all)));
  };
  const auto rename = [&](const char* old, const char* now) {
    const Json* value = out.find(old);
    if (value == nullptr) return;
    Json moved = *value;
    erase(old);
    add(now, std::move(moved));
  };
  if (const Json* items = out.find("items"); items != nullptr && items->is_array()) {
    rename("items", "prefixItems");
    rename("additionalItems", "items");
  }
  rename("$dynamicRef", "$ref");
  rename("$recursiveRef", "$ref");
  if (const Json* all = out.find("dependencies"); all != nullptr && all->is_object()) {
    Json::Object names, schemas;
    for (const auto& [name, needs] : all->as_object()) (needs.is_array() ? names : schemas).emplace_back(name, needs);
    erase("dependencies");
    if (!names.empty()) add("dependentRequired", Json(std::move(names)));
    if (!schemas.empty()) add("dependentSchemas", Json(std::move(schemas)));
  }
  rename("dependencies", "dependentSchemas");  // which refuses what is no object
  if (out.find("contains") == nullptr) {
    erase("minContains");
    erase("maxContains");
  }
  for (const auto& [exclusive, bound] :
       {std::pair{"exclusiveMinimum", "minimum"}, std::pair{"exclusiveMaximum", "maximum"}}) {
    const Json* flag = out.find(exclusive);
    if (flag == nullptr || !flag->is_bool()) continue;
    const bool excludes = flag->as_bool();
    erase(exclusive);
    if (excludes) rename(bound, exclusive);
  }
  return out;
}

bool is_modern(const Json& schema) {
  for (const char* old : {"$dynamicRef", "$recursiveRef", "dependencies"})
    if (schema.find(old) != nullptr) return false;
  if (schema.find("contains") == nullptr &&
      (schema.find("minContains") != nullptr || schema.find("maxContains") != nullptr))
    return false;
  for (const char* bound : {"exclusiveMinimum", "exclusiveMaximum"})
    if (const Json* value = schema.find(bound); value != nullptr && value->is_bool()) return false;
  const Json* items = schema.find("items");
  return items == nullptr || !items->is_array();
}

}  // namespace perigee

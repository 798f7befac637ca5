#include "grammar/schema_negate.h"

#include <algorithm>
#include <utility>

#include "grammar/schema_keywords.h"
#include "grammar/schema_obeys.h"

namespace perigee {
namespace {

constexpr size_t kMostParts = 64;  // of a complement; more are left out
constexpr int kMostDepth = 8;
// In bytes, of what is copied into a complement, and of as many for each schema that is looked at: $ref may lead to
// the same ones again and again. Later ones count as if nothing could be said of them.
constexpr size_t kMostWork = 4'000'000, kWorkOfSchema = 400;

Json object(Json::Object members) {
  return Json(std::move(members));
}

class Negation {
 public:
  Negation(const ResolveRef& resolve, const std::vector<std::string>& names) : resolve_(resolve), names_(names) {}

  std::vector<Json> of(const Json& schema, int depth) {
    if (schema.is_bool()) return schema.as_bool() ? std::vector<Json>{} : std::vector<Json>{Json(true)};
    work_ += kWorkOfSchema;
    if (!schema.is_object() || depth > kMostDepth || work_ > kMostWork) return {};
    std::vector<Json> out;
    for (const auto& [key, value] : schema.as_object()) {
      for (Json& part : of_keyword(key, value, schema, depth))
        if (out.size() < kMostParts) out.push_back(std::move(part));
    }
    return out;
  }

 private:
  static Json typed(const char* type, const char* key, Json value) {
    return object({{"type", type}, {key, std::move(value)}});
  }

  // What obeys not even one keyword of a schema does not obey it.
  std::vector<Json> of_keyword(const std::string& key, const Json& value, const Json& schema, int depth) {
    if (key == "$ref" && value.is_string()) return of(resolve_(value.as_string()), depth + 1);
    if (key == "type") return of_types(schema_types(schema));
    if (key == "const" || key == "enum" || key == "not") {
      work_ += dump_json(value).size();
      if (work_ > kMostWork) return {};
    }
    if (key == "const") return {object({{kExcept, Json(Json::Array{value})}})};
    if (key == "enum" && value.is_array()) return {object({{kExcept, value}})};
    if (key == "not") return {value};
    if (key == "allOf" && value.is_array()) return of_any(value.as_array(), depth);
    if ((key == "anyOf" || key == "oneOf") && value.is_array()) return of_all(value.as_array(), depth);
    if (key == "properties" || key == "required") return of_members(key, value, depth);
    if (key == "additionalProperties") return of_others(value, schema, depth);
    if (key == "items" || key == "contains") return of_items(key, value, schema, depth);
    if (key == "pattern") return {typed("string", kNotPatterns, Json(Json::Array{value}))};
    if (key == "multipleOf") return {typed("number", kNotMultiples, Json(Json::Array{value}))};
    return of_bound(key, value);
  }

  static std::vector<Json> of_types(const std::vector<std::string>& types) {
    const auto has = [&](const char* type) { return std::find(types.begin(), types.end(), type) != types.end(); };
    std::vector<Json> out;
    Json::Array others;
    for (const char* type : {"null", "boolean", "object", "array", "number", "string"})
      if (!has(type) && !(type == std::string("number") && has("integer"))) others.emplace_back(type);
    if (!others.empty()) out.push_back(object({{"type", Json(std::move(others))}}));
    if (has("integer") && !has("number")) out.push_back(typed("number", kFraction, Json(true)));
    return out;
  }

  std::vector<Json> of_any(const Json::Array& schemas, int depth) {
    std::vector<Json> out;
    for (const Json& schema : schemas) {
      for (Json& part : of(schema, depth + 1)) out.push_back(std::move(part));
      if (out.size() >= kMostParts) break;
    }
    return out;
  }

  std::vector<Json> of_all(const Json::Array& schemas, int depth) {
    Json::Array all;
    for (const Json& schema : schemas) {
      std::vector<Json> parts = of(schema, depth + 1);
      if (parts.empty()) return {};
      all.push_back(any_of(std::move(parts)));
    }
    if (all.empty()) return {};
    return {object({{"allOf", Json(std::move(all))}})};
  }

  std::vector<Json> of_members(const std::string& key, const Json& value, int depth) {
    std::vector<Json> out;
    if (key == "required" && value.is_array())
      for (const Json& name : value.as_array()) out.push_back(typed("object", kAbsent, Json(Json::Array{name})));
    if (key == "properties" && value.is_object())
      for (const auto& [name, schema] : value.as_object())
        for (Json& part : of(schema, depth + 1))
          out.push_back(object({{"type", "object"},
                                {"required", Json(Json::Array{Json(name)})},
                                {"properties", object({{name, std::move(part)}})}}));
    return out;
  }

  // Objects with a member that `properties` does not declare.
  std::vector<Json> of_others(const Json& value, const Json& schema, int depth) {
    if (schema.find("patternProperties") != nullptr) return {};
    work_ += names_.size() * dump_json(value).size();
    if (work_ > kMostWork) return {};
    const Json* declared = schema.find("properties");
    Json::Object members;
    for (const std::string& name : names_)
      if (declared == nullptr || declared->find(name) == nullptr) members.emplace_back(name, value);
    return of_members("properties", object(std::move(members)), depth);
  }

  std::vector<Json> of_items(const std::string& key, const Json& value, const Json& schema, int depth) {
    std::vector<Json> parts = of(value, depth + 1);
    if (parts.empty() || schema.find("prefixItems") != nullptr || schema.find("minContains") != nullptr) return {};
    if (key == "contains") return {typed("array", "items", any_of(std::move(parts)))};
    return {object({{"type", "array"}, {"prefixItems", Json(Json::Array{any_of(std::move(parts))})}, {"minItems", 1}})};
  }

  static std::vector<Json> of_bound(const std::string& key, const Json& value) {
    if (!value.is_number()) return {};
    for (const auto& [bound, other] : {std::pair{"minimum", "exclusiveMaximum"},
                                       {"maximum", "exclusiveMinimum"},
                                       {"exclusiveMinimum", "maximum"},
                                       {"exclusiveMaximum", "minimum"}})
      if (key == bound) return {typed("number", other, value)};
    if (!value.is_int()) return {};
    struct Count {
      const char *least, *most, *type;
    };
    for (const Count& count : {Count{"minLength", "maxLength", "string"}, Count{"minItems", "maxItems", "array"},
                               Count{"minProperties", "maxProperties", "object"}}) {
      if (key == count.least && value.as_int() > 0) return {typed(count.type, count.most, Json(value.as_int() - 1))};
      if (key == count.most) return {typed(count.type, count.least, Json(value.as_int() + 1))};
    }
    return {};
  }

  size_t work_ = 0;
  const ResolveRef& resolve_;
  const std::vector<std::string>& names_;
};

}  // namespace

std::vector<Json> negated(const Json& schema, const ResolveRef& resolve, const std::vector<std::string>& names) {
  return Negation(resolve, names).of(schema, 0);
}

Json any_of(std::vector<Json> schemas) {
  if (schemas.size() == 1) return std::move(schemas[0]);
  return Json(Json::Object{{"anyOf", Json(std::move(schemas))}});
}

}  // namespace perigee

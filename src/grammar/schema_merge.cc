#include "grammar/schema_merge.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/utf8.h"
#include "grammar/pattern.h"

namespace perigee {
namespace {

bool is_false(const Json& schema) {
  return schema.is_bool() && !schema.as_bool();
}

bool equal(const Json& a, const Json& b) {
  if (a.is_number() && b.is_number()) return a == b || a.as_double() == b.as_double();
  if (a.is_array() && b.is_array()) {
    return a.as_array().size() == b.as_array().size() &&
           std::equal(a.as_array().begin(), a.as_array().end(), b.as_array().begin(), equal);
  }
  if (a.is_object() && b.is_object()) {
    if (a.as_object().size() != b.as_object().size()) return false;
    return std::all_of(a.as_object().begin(), a.as_object().end(), [&](const Json::Member& member) {
      const Json* other = b.find(member.first);
      return other != nullptr && equal(member.second, *other);
    });
  }
  return a == b;
}

std::vector<std::string> listed_types(const Json& type) {
  if (type.is_string()) return {type.as_string()};
  std::vector<std::string> out;
  if (type.is_array()) {
    for (const Json& each : type.as_array())
      if (each.is_string()) out.push_back(each.as_string());
  }
  return out;
}

Json conjunction(const Json& a, const Json& b) {
  if (a == b) return a;
  if (is_false(a) || is_false(b)) return false;
  if (a.is_bool()) return b;
  if (b.is_bool()) return a;
  return Json(Json::Object{{"allOf", Json(Json::Array{a, b})}});
}

Json merged_types(const Json& a, const Json& b) {
  Json::Array both;
  for (const std::string& x : listed_types(a)) {
    for (const std::string& y : listed_types(b)) {
      if (x == y) both.push_back(x);
      if ((x == "integer" && y == "number") || (x == "number" && y == "integer")) both.push_back("integer");
    }
  }
  if (both.size() == 1) return both[0];
  return both;
}

// What a schema says of a property by name: properties, or else additionalProperties.
const Json* other_properties(const Json& schema) {
  const Json* closed = schema.find("additionalProperties");
  return schema.find("patternProperties") != nullptr ? nullptr : closed;
}

Json merged_properties(const Json& a, const Json& b) {
  Json::Object out;
  const auto add = [&](const Json& one, const Json& two) {
    const Json* properties = one.find("properties");
    if (properties == nullptr || !properties->is_object()) return;
    const Json* also = two.find("properties");
    for (const Json::Member& member : properties->as_object()) {
      if (std::any_of(out.begin(), out.end(), [&](const Json::Member& m) { return m.first == member.first; })) continue;
      const Json* other = also == nullptr ? nullptr : also->find(member.first);
      if (other == nullptr) other = other_properties(two);
      out.emplace_back(member.first, other == nullptr ? member.second : conjunction(member.second, *other));
    }
  };
  add(a, b);
  add(b, a);
  return out;
}

double bound(const Json& value) {
  return value.is_number() ? value.as_double() : 0;
}

// One of the two where both have it; null where they cannot be put together.
Json merged_keyword(const std::string& key, const Json& a, const Json& b) {
  const auto any_of = [&](std::initializer_list<const char*> keys) {
    return std::any_of(keys.begin(), keys.end(), [&](const char* each) { return key == each; });
  };
  if (a == b) return a;
  if (key == "type") return merged_types(a, b);
  if (any_of({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}))
    return bound(a) >= bound(b) ? a : b;
  if (any_of({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}))
    return bound(a) <= bound(b) ? a : b;
  if (key == "required" && a.is_array() && b.is_array()) {
    Json::Array all = a.as_array();
    for (const Json& name : b.as_array())
      if (std::find(all.begin(), all.end(), name) == all.end()) all.push_back(name);
    return all;
  }
  if (any_of({"additionalProperties", "items", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}))
    return conjunction(a, b);
  if (key == "enum" && a.is_array() && b.is_array()) {
    Json::Array both;
    for (const Json& value : a.as_array())
      if (std::any_of(b.as_array().begin(), b.as_array().end(), [&](const Json& o) { return equal(o, value); }))
        both.push_back(value);
    return both;
  }
  if (key == "uniqueItems") return true;
  return nullptr;
}

bool is_annotation(const std::string& key) {
  for (const char* each :
       {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment",
        "$anchor", "$id", "$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"})
    if (key == each) return true;
  return false;
}

double length_of(const std::string& text) {
  double count = 0;
  for (size_t at = 0; at < text.size(); at += utf8_at(text, at).length) ++count;
  return count;
}

bool has_type(const Json& value, const std::string& type) {
  if (type == "integer") {
    return value.is_int() || (value.is_double() && value.as_double() == std::floor(value.as_double()));
  }
  return value.is_number() ? type == "number" : type == value.type_name();
}

Obeys negated(Obeys is) {
  return is == Obeys::kUnknown ? is : is == Obeys::kYes ? Obeys::kNo : Obeys::kYes;
}

Obeys all_obey(const Json::Array& values, const Json& schema) {
  Obeys all = Obeys::kYes;
  for (const Json& value : values) {
    const Obeys one = obeys(value, schema);
    if (one == Obeys::kNo) return one;
    if (one == Obeys::kUnknown) all = one;
  }
  return all;
}

Obeys of(bool is) {
  return is ? Obeys::kYes : Obeys::kNo;
}

Obeys obeys_applicator(const Json& value, const std::string& key, const Json& schemas) {
  if (!schemas.is_array()) return Obeys::kUnknown;
  int yes = 0, unknown = 0;
  for (const Json& schema : schemas.as_array()) {
    const Obeys one = obeys(value, schema);
    yes += one == Obeys::kYes ? 1 : 0;
    unknown += one == Obeys::kUnknown ? 1 : 0;
  }
  if (unknown > 0) return Obeys::kUnknown;
  if (key == "allOf") return of(yes == static_cast<int>(schemas.as_array().size()));
  return of(key == "anyOf" ? yes > 0 : yes == 1);
}

Obeys obeys_object(const Json& value, const std::string& key, const Json& of_key, const Json& schema) {
  if (key == "minProperties") return of(value.as_object().size() >= bound(of_key));
  if (key == "maxProperties") return of(value.as_object().size() <= bound(of_key));
  if (key == "required") {
    for (const Json& name : of_key.as_array())
      if (name.is_string() && value.find(name.as_string()) == nullptr) return Obeys::kNo;
    return Obeys::kYes;
  }
  if (key == "additionalProperties" && schema.find("patternProperties") != nullptr) return Obeys::kUnknown;
  if (key != "properties" && key != "additionalProperties") return Obeys::kUnknown;
  const Json* properties = schema.find("properties");
  Obeys all = Obeys::kYes;
  for (const auto& [name, member] : value.as_object()) {
    const Json* declared = properties == nullptr ? nullptr : properties->find(name);
    const Json* says = key == "properties" ? declared : declared == nullptr ? &of_key : nullptr;
    if (says == nullptr) continue;
    const Obeys one = obeys(member, *says);
    if (one == Obeys::kNo) return one;
    if (one == Obeys::kUnknown) all = one;
  }
  return all;
}

Obeys obeys_array(const Json& value, const std::string& key, const Json& of_key, const Json& schema) {
  if (key == "minItems") return of(value.as_array().size() >= bound(of_key));
  if (key == "maxItems") return of(value.as_array().size() <= bound(of_key));
  if (key == "items" && schema.find("prefixItems") == nullptr) return all_obey(value.as_array(), of_key);
  const Json::Array& items = value.as_array();
  if (key == "uniqueItems" && (of_key == Json(false) || items.size() <= 64)) {
    for (size_t i = 0; of_key == Json(true) && i < items.size(); ++i)
      if (std::any_of(items.begin(), items.begin() + static_cast<int64_t>(i),
                      [&](const Json& o) { return equal(o, items[i]); }))
        return Obeys::kNo;
    return Obeys::kYes;
  }
  return Obeys::kUnknown;
}

Obeys obeys_scalar(const Json& value, const std::string& key, const Json& of_key) {
  if (value.is_number()) {
    const double x = value.as_double(), y = bound(of_key);
    if (key == "minimum") return of(x >= y);
    if (key == "maximum") return of(x <= y);
    if (key == "exclusiveMinimum") return of(x > y);
    if (key == "exclusiveMaximum") return of(x < y);
    if (key == "multipleOf" && value.is_int() && of_key.is_int() && of_key.as_int() > 0)
      return of(value.as_int() % of_key.as_int() == 0);
    return Obeys::kUnknown;
  }
  if (key == "minLength") return of(length_of(value.as_string()) >= bound(of_key));
  if (key == "maxLength") return of(length_of(value.as_string()) <= bound(of_key));
  if (key == "pattern" && of_key.is_string()) {
    auto pattern = Pattern::parse(of_key.as_string(), Pattern::Whole::kSearched);
    if (pattern.ok()) return of(pattern->matches(value.as_string()));
  }
  return Obeys::kUnknown;
}

// Of which type of values a keyword speaks; nullptr: of all, or unknown.
const char* speaks_of(const std::string& key) {
  static const std::pair<const char*, const char*> kTypes[] = {{"minimum", "number"},
                                                               {"maximum", "number"},
                                                               {"exclusiveMinimum", "number"},
                                                               {"exclusiveMaximum", "number"},
                                                               {"multipleOf", "number"},
                                                               {"minLength", "string"},
                                                               {"maxLength", "string"},
                                                               {"pattern", "string"},
                                                               {"format", "string"},
                                                               {"items", "array"},
                                                               {"prefixItems", "array"},
                                                               {"minItems", "array"},
                                                               {"maxItems", "array"},
                                                               {"uniqueItems", "array"},
                                                               {"contains", "array"},
                                                               {"minContains", "array"},
                                                               {"maxContains", "array"},
                                                               {"unevaluatedItems", "array"},
                                                               {"additionalItems", "array"},
                                                               {"properties", "object"},
                                                               {"required", "object"},
                                                               {"additionalProperties", "object"},
                                                               {"patternProperties", "object"},
                                                               {"propertyNames", "object"},
                                                               {"minProperties", "object"},
                                                               {"maxProperties", "object"},
                                                               {"dependentRequired", "object"},
                                                               {"dependentSchemas", "object"},
                                                               {"dependencies", "object"},
                                                               {"unevaluatedProperties", "object"}};
  for (const auto& [name, type] : kTypes)
    if (key == name) return type;
  return nullptr;
}

Obeys obeys_keyword(const Json& value, const std::string& key, const Json& of_key, const Json& schema) {
  if (is_annotation(key)) return Obeys::kYes;
  if (key == "type") {
    const std::vector<std::string> types = listed_types(of_key);
    return of(std::any_of(types.begin(), types.end(), [&](const std::string& t) { return has_type(value, t); }));
  }
  if (key == "const") return of(equal(value, of_key));
  if (key == "enum" && of_key.is_array()) {
    return of(std::any_of(of_key.as_array().begin(), of_key.as_array().end(),
                          [&](const Json& each) { return equal(each, value); }));
  }
  if (key == "not") return negated(obeys(value, of_key));
  if (key == "allOf" || key == "anyOf" || key == "oneOf") return obeys_applicator(value, key, of_key);
  if (key == "if" || key == "then" || key == "else") {
    const Json* condition = schema.find("if");
    if (key == "if" || condition == nullptr) return Obeys::kYes;
    const Obeys holds = obeys(value, *condition);
    if (holds == Obeys::kUnknown) return holds;
    return (key == "then") == (holds == Obeys::kYes) ? obeys(value, of_key) : Obeys::kYes;
  }
  const char* type = speaks_of(key);
  if (type == nullptr) return key.starts_with("$") ? Obeys::kUnknown : Obeys::kYes;
  if (!has_type(value, type)) return Obeys::kYes;
  if (value.is_object()) return obeys_object(value, key, of_key, schema);
  if (value.is_array()) return obeys_array(value, key, of_key, schema);
  return obeys_scalar(value, key, of_key);
}

}  // namespace

Obeys obeys(const Json& value, const Json& schema) {
  if (schema.is_bool()) return of(schema.as_bool());
  if (!schema.is_object()) return Obeys::kUnknown;
  Obeys all = Obeys::kYes;
  for (const auto& [key, of_key] : schema.as_object()) {
    const Obeys one = obeys_keyword(value, key, of_key, schema);
    if (one == Obeys::kNo) return one;
    if (one == Obeys::kUnknown) all = one;
  }
  return all;
}

std::vector<std::string> schema_types(const Json& schema) {
  static const std::vector<std::string> kAll = {"object", "array", "string", "number", "boolean", "null"};
  if (!schema.is_object()) return kAll;
  if (const Json* type = schema.find("type")) return listed_types(*type);
  std::vector<std::string> spoken;
  for (const std::string& type : kAll) {
    const bool any = std::any_of(schema.as_object().begin(), schema.as_object().end(), [&](const Json::Member& m) {
      const char* of = speaks_of(m.first);
      return of != nullptr && type == of;
    });
    if (any) spoken.push_back(type);
  }
  return spoken.empty() ? kAll : spoken;
}

Result<Json> merge_schemas(const Json& a, const Json& b) {
  if (a.is_bool() || b.is_bool()) return conjunction(a, b);
  if (!a.is_object() || !b.is_object()) return Error(Code::kBadInput, "a schema is an object, true or false");
  const auto has_any = [](const Json& schema, std::initializer_list<const char*> keys) {
    return std::any_of(keys.begin(), keys.end(), [&](const char* key) { return schema.find(key) != nullptr; });
  };
  for (const auto& [one, two] : {std::pair<const Json*, const Json*>{&a, &b}, {&b, &a}}) {
    if (one->find("patternProperties") != nullptr &&
        has_any(*two, {"patternProperties", "properties", "additionalProperties", "unevaluatedProperties"}))
      return Error(Code::kBadInput, "patternProperties: cannot be put together with another schema of properties");
    if (one->find("prefixItems") != nullptr && has_any(*two, {"items", "unevaluatedItems"}) && !(*one == *two))
      return Error(Code::kBadInput, "prefixItems: cannot be put together with another schema of items");
  }
  Json out = a;
  Json::Array parts;  // of what has no value of its own that says both
  for (const auto& [key, value] : b.as_object()) {
    const Json* own = a.find(key);
    if (own == nullptr || is_annotation(key)) {
      if (own == nullptr) out.set(key, value);
      continue;
    }
    if (key == "properties") continue;
    if (key == "allOf" || key == "anyOf" || key == "oneOf" || key == "not") {
      if (!(*own == value)) parts.push_back(Json(Json::Object{{key, value}}));
      continue;
    }
    Json both = merged_keyword(key, *own, value);
    if (both.is_null() && key != "const") {
      if (key == "const" || key == "enum") return Json(false);
      return Error(Code::kBadInput, key + ": two of them cannot be put together");
    }
    if (key == "const" && !equal(*own, value)) return Json(false);
    if (key == "const") both = *own;
    out.set(key, std::move(both));
  }
  if (a.find("properties") != nullptr || b.find("properties") != nullptr) {
    out.set("properties", merged_properties(a, b));
    // What one closes, the other's properties may not open: they are conjunctions with it now, and so is the rest.
  }
  if (const Json* type = out.find("type"); type != nullptr && type->is_array() && type->as_array().empty())
    return Json(false);
  if (!parts.empty()) {
    Json::Array all;
    if (const Json* own = out.find("allOf"); own != nullptr && own->is_array()) all = own->as_array();
    for (Json& part : parts) all.push_back(std::move(part));
    out.set("allOf", Json(std::move(all)));
  }
  return out;
}

bool surely_disjoint(const Json& a, const Json& b) {
  if (is_false(a) || is_false(b)) return true;
  if (!a.is_object() || !b.is_object()) return false;
  for (const auto& [one, two] : {std::pair<const Json*, const Json*>{&a, &b}, {&b, &a}}) {
    Json::Array values;
    if (const Json* fixed = one->find("const")) values = {*fixed};
    if (const Json* listed = one->find("enum"); values.empty() && listed != nullptr && listed->is_array())
      values = listed->as_array();
    if (!values.empty() && std::all_of(values.begin(), values.end(), [&, other = two](const Json& value) {
          return obeys(value, *other) == Obeys::kNo;
        }))
      return true;
  }
  const Json *type_a = a.find("type"), *type_b = b.find("type");
  if (type_a != nullptr && type_b != nullptr && listed_types(merged_types(*type_a, *type_b)).empty()) return true;
  const Json *in_a = a.find("properties"), *in_b = b.find("properties");
  const auto requires_it = [](const Json& schema, const std::string& name) {
    const Json* required = schema.find("required");
    if (required == nullptr || !required->is_array()) return false;
    const Json::Array& names = required->as_array();
    return std::find(names.begin(), names.end(), Json(name)) != names.end();
  };
  if (in_a == nullptr || in_b == nullptr || !in_a->is_object() || type_a == nullptr || type_b == nullptr) return false;
  if (!(*type_a == Json("object")) || !(*type_b == Json("object"))) return false;
  for (const auto& [name, schema] : in_a->as_object()) {
    const Json* other = in_b->find(name);
    if (other == nullptr || !(requires_it(a, name) || requires_it(b, name))) continue;
    // Present in whatever obeys one of them; if the other does not require it, that one's own schema still applies.
    if (surely_disjoint(schema, *other)) return true;
  }
  return false;
}

}  // namespace perigee

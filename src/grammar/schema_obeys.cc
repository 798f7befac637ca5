#include "grammar/schema_obeys.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/utf8.h"
#include "grammar/language.h"
#include "grammar/schema_keywords.h"

namespace perigee {

namespace {

// Below 0, 0, above 0. Integers of 64 bits are compared as such, also with doubles; none: numbers beyond both that
// have the same nearest double.
std::optional<int> compared(const Json& a, const Json& b) {
  if (a == b) return 0;
  const auto order = [](auto x, auto y) { return x < y ? -1 : x > y ? 1 : 0; };
  const auto whole = [](const Json& value) -> std::optional<int64_t> {
    if (value.is_int()) return value.as_int();
    const double number = value.as_double();
    constexpr double kEnd = 9223372036854775808.0;
    const bool fits = number == std::floor(number) && number >= -kEnd && number < kEnd;
    return fits && value.digits() == nullptr ? std::optional(static_cast<int64_t>(number)) : std::nullopt;
  };
  const auto x = whole(a), y = whole(b);
  if (x && y) return order(*x, *y);
  const int nearest = order(a.as_double(), b.as_double());
  if (nearest == 0 && (a.digits() != nullptr || b.digits() != nullptr)) return std::nullopt;
  return nearest;
}

}  // namespace

double bound(const Json& value) {
  return value.is_number() ? value.as_double() : 0;
}

bool equal(const Json& a, const Json& b) {
  if (a.is_number() && b.is_number()) {
    return compared(a, b).value_or(0) == 0;
  }
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

bool is_annotation(const std::string& key) {
  for (const char* each :
       {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment",
        "$anchor", "$id", "$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"})
    if (key == each) return true;
  return false;
}

namespace {

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

Obeys opposite(Obeys is) {
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
  if (key == kAbsent) {
    return of(std::none_of(of_key.as_array().begin(), of_key.as_array().end(), [&](const Json& name) {
      return name.is_string() && value.find(name.as_string()) != nullptr;
    }));
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

Obeys contains_enough(const Json::Array& items, const Json& schema) {
  const Json *least = schema.find("minContains"), *most = schema.find("maxContains");
  int64_t surely = 0, unsure = 0;
  for (const Json& item : items) {
    const Obeys one = obeys(item, *schema.find("contains"));
    surely += one == Obeys::kYes ? 1 : 0;
    unsure += one == Obeys::kUnknown ? 1 : 0;
  }
  const double low = least == nullptr ? 1 : bound(*least), high = most == nullptr ? HUGE_VAL : bound(*most);
  const auto sum = static_cast<double>(surely), all = static_cast<double>(surely + unsure);
  if (all < low || sum > high) return Obeys::kNo;
  return sum >= low && all <= high ? Obeys::kYes : Obeys::kUnknown;
}

Obeys obeys_array(const Json& value, const std::string& key, const Json& of_key, const Json& schema) {
  if (key == "minItems") return of(value.as_array().size() >= bound(of_key));
  if (key == "maxItems") return of(value.as_array().size() <= bound(of_key));
  const Json::Array& items = value.as_array();
  const Json* prefix = schema.find("prefixItems");
  const size_t listed = prefix != nullptr && prefix->is_array() ? std::min(prefix->as_array().size(), items.size()) : 0;
  if (key == "items") return all_obey({items.begin() + static_cast<ptrdiff_t>(listed), items.end()}, of_key);
  if (key == "prefixItems") {
    Obeys all = Obeys::kYes;
    for (size_t i = 0; i < listed && all != Obeys::kNo; ++i)
      if (const Obeys one = obeys(items[i], prefix->as_array()[i]); one != Obeys::kYes) all = one;
    return all;
  }
  if (key == "contains") return contains_enough(items, schema);
  if (key == "minContains" || key == "maxContains") return Obeys::kYes;  // asked with `contains`
  if (key == "uniqueItems" && (of_key == Json(false) || items.size() <= 64)) {
    for (size_t i = 0; of_key != Json(false) && i < items.size(); ++i)
      if (std::any_of(items.begin(), items.begin() + static_cast<int64_t>(i),
                      [&](const Json& o) { return equal(o, items[i]); }))
        return Obeys::kNo;
    return Obeys::kYes;
  }
  return Obeys::kUnknown;
}

Obeys matches_pattern(const std::string& text, const std::string& pattern) {
  const Result<bool> all = Language::pattern_matches(pattern, Reading::kNarrow, text);
  if (all.ok() && *all) return Obeys::kYes;
  const Result<bool> any = Language::pattern_matches(pattern, Reading::kWide, text);
  return all.ok() && any.ok() && !*any ? Obeys::kNo : Obeys::kUnknown;
}

Obeys is_no_multiple(const Json& value, const Json& steps) {
  for (const Json& step : steps.as_array()) {
    if (!value.is_int() || !step.is_int() || step.as_int() <= 0) return Obeys::kUnknown;
    if (value.as_int() % step.as_int() == 0) return Obeys::kNo;
  }
  return Obeys::kYes;
}

Obeys obeys_scalar(const Json& value, const std::string& key, const Json& of_key) {
  if (value.is_number()) {
    const bool below = key == "maximum" || key == "exclusiveMaximum";
    if (below || key == "minimum" || key == "exclusiveMinimum") {
      const std::optional<int> order = of_key.is_number() ? compared(value, of_key) : std::nullopt;
      if (!order) return Obeys::kUnknown;
      return of(*order == 0 ? !key.starts_with("exclusive") : (*order < 0) == below);
    }
    if (key == "multipleOf" && value.is_int() && of_key.is_int() && of_key.as_int() > 0)
      return of(value.as_int() % of_key.as_int() == 0);
    if (key == kFraction) return of(!has_type(value, "integer"));
    if (key == kNotMultiples && of_key.is_array()) return is_no_multiple(value, of_key);
    return Obeys::kUnknown;
  }
  if (key == "minLength") return of(length_of(value.as_string()) >= bound(of_key));
  if (key == "maxLength") return of(length_of(value.as_string()) <= bound(of_key));
  if ((key == "pattern" || key == kClass) && of_key.is_string())
    return matches_pattern(value.as_string(), of_key.as_string());
  if ((key == kPatterns || key == kNotPatterns) && of_key.is_array()) {
    Obeys all = Obeys::kYes;
    for (const Json& pattern : of_key.as_array()) {
      Obeys one = pattern.is_string() ? matches_pattern(value.as_string(), pattern.as_string()) : Obeys::kUnknown;
      if (key == kNotPatterns) one = opposite(one);
      if (one == Obeys::kNo) return one;
      if (one == Obeys::kUnknown) all = one;
    }
    return all;
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
                                                               {kPatterns, "string"},
                                                               {kNotPatterns, "string"},
                                                               {kFraction, "number"},
                                                               {kNotMultiples, "number"},
                                                               {kLastDigits, "number"},
                                                               {kClass, "string"},
                                                               {kAbsent, "object"},
                                                               {kContained, "array"},
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
  if (is_annotation(key) || key == "format") return Obeys::kYes;  // a format is one, too, unless a validator asserts it
  if (key == "type") {
    const std::vector<std::string> types = listed_types(of_key);
    return of(std::any_of(types.begin(), types.end(), [&](const std::string& t) { return has_type(value, t); }));
  }
  if (key == "const") return of(equal(value, of_key));
  if (key == "enum" && of_key.is_array()) {
    return of(std::any_of(of_key.as_array().begin(), of_key.as_array().end(),
                          [&](const Json& each) { return equal(each, value); }));
  }
  if (key == kExcept && of_key.is_array())
    return of(std::none_of(of_key.as_array().begin(), of_key.as_array().end(),
                           [&](const Json& each) { return equal(each, value); }));
  if (key == "not") return opposite(obeys(value, of_key));
  if (key == "allOf" || key == "anyOf" || key == "oneOf") return obeys_applicator(value, key, of_key);
  if (key == kContained) return obeys_applicator(value, "allOf", of_key);
  if (key == "then" || key == "else") return Obeys::kYes;  // asked with `if`
  if (key == "if") {
    const Json *then = schema.find("then"), *otherwise = schema.find("else");
    if (then == nullptr && otherwise == nullptr) return Obeys::kYes;
    const Obeys holds = obeys(value, of_key);
    if (holds == Obeys::kUnknown) return holds;
    const Json* next = holds == Obeys::kYes ? then : otherwise;
    return next == nullptr ? Obeys::kYes : obeys(value, *next);
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

}  // namespace perigee

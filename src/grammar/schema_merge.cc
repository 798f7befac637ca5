#include "grammar/schema_merge.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <string_view>
#include <unordered_set>

#include "grammar/schema_keywords.h"
#include "grammar/schema_obeys.h"

namespace perigee {
namespace {

bool is_false(const Json& schema) {
  return schema.is_bool() && !schema.as_bool();
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

// The members of both; of those with one name what both say.
Json united_members(const Json& a, const Json& b) {
  Json out = a;
  for (const auto& [name, needs] : b.as_object()) {
    const Json* own = a.find(name);
    if (own == nullptr) {
      out.set(name, needs);
    } else if (own->is_array() && needs.is_array()) {
      Json::Array all = own->as_array();
      all.insert(all.end(), needs.as_array().begin(), needs.as_array().end());
      out.set(name, Json(std::move(all)));
    } else {
      out.set(name, conjunction(*own, needs));
    }
  }
  return out;
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
  if (any_of({kExcept, kAbsent, kPatterns, kNotPatterns, kContained, kNotMultiples}) && a.is_array() && b.is_array()) {
    Json::Array both = a.as_array();
    both.insert(both.end(), b.as_array().begin(), b.as_array().end());
    return both;
  }
  if (key == "multipleOf" && a.is_int() && b.is_int() && a.as_int() > 0 && b.as_int() > 0) {
    const int64_t least = a.as_int() / std::gcd(a.as_int(), b.as_int());
    if (least < 1'000'000'000 && b.as_int() < 1'000'000'000) return Json(least * b.as_int());
  }
  if (any_of({"dependentRequired", "dependentSchemas", "patternProperties"}) && a.is_object() && b.is_object())
    return united_members(a, b);
  if (key == "not") return Json(Json::Object{{"anyOf", Json(Json::Array{a, b})}});
  if (key == "oneOf") return nullptr;
  if (key == "anyOf" && a.is_array() && b.is_array()) {
    constexpr size_t kMostPairs = 1024;
    if (a.as_array().size() * b.as_array().size() > kMostPairs) return nullptr;
    Json::Array pairs;
    for (const Json& x : a.as_array())
      for (const Json& y : b.as_array())
        if (Json both = conjunction(x, y); !is_false(both)) pairs.push_back(std::move(both));
    if (pairs.empty()) pairs.emplace_back(false);
    return pairs;
  }
  return nullptr;
}

// The items of two arrays of which one at least has prefixItems.
void merge_items(const Json& a, const Json& b, Json& out) {
  const auto listed = [](const Json& schema) {
    const Json* prefix = schema.find("prefixItems");
    return prefix != nullptr && prefix->is_array() ? prefix->as_array() : Json::Array{};
  };
  const Json::Array in_a = listed(a), in_b = listed(b);
  const auto at = [](const Json::Array& prefix, const Json& schema, size_t i) {
    if (i < prefix.size()) return prefix[i];
    const Json* items = schema.find("items");
    return items == nullptr ? Json(true) : *items;
  };
  Json::Array both;
  for (size_t i = 0; i < std::max(in_a.size(), in_b.size()); ++i)
    both.push_back(conjunction(at(in_a, a, i), at(in_b, b, i)));
  out.set("prefixItems", Json(std::move(both)));
  if (a.find("items") != nullptr || b.find("items") != nullptr)
    out.set("items", conjunction(at({}, a, 0), at({}, b, 0)));
}

// Whether a keyword can forbid a value. Any that nobody knows cannot; those of `$perigee:` are known.
bool says_something(const std::string& key) {
  static const std::unordered_set<std::string_view> kKnown = {"type",
                                                              "const",
                                                              "enum",
                                                              "not",
                                                              "allOf",
                                                              "anyOf",
                                                              "oneOf",
                                                              "if",
                                                              "then",
                                                              "else",
                                                              "minimum",
                                                              "maximum",
                                                              "exclusiveMinimum",
                                                              "exclusiveMaximum",
                                                              "multipleOf",
                                                              "minLength",
                                                              "maxLength",
                                                              "pattern",
                                                              "format",
                                                              "items",
                                                              "prefixItems",
                                                              "additionalItems",
                                                              "unevaluatedItems",
                                                              "minItems",
                                                              "maxItems",
                                                              "uniqueItems",
                                                              "contains",
                                                              "minContains",
                                                              "maxContains",
                                                              "properties",
                                                              "required",
                                                              "additionalProperties",
                                                              "patternProperties",
                                                              "propertyNames",
                                                              "unevaluatedProperties",
                                                              "minProperties",
                                                              "maxProperties",
                                                              "dependentRequired",
                                                              "dependentSchemas",
                                                              "dependencies"};
  return key.starts_with("$") || kKnown.contains(key);
}

// The two `contains` are equal here; one that does not say minContains says 1.
void merge_least_contained(const Json& a, const Json& b, Json& out) {
  const Json* least = out.find("minContains");
  if (least == nullptr || bound(*least) >= 1 || a.find("contains") == nullptr || b.find("contains") == nullptr) return;
  if (a.find("minContains") != nullptr && b.find("minContains") != nullptr) return;
  out.set("minContains", Json(1));
}

// Two schemas with different `contains`: the second one's goes on as a schema of its own.
Result<Json> merge_contained(const Json& a, const Json& b) {
  Json rest = b, own(Json::Object{});
  for (const char* key : {"contains", "minContains", "maxContains"}) {
    if (const Json* value = b.find(key)) own.set(key, *value);
    std::erase_if(rest.as_object(), [&](const Json::Member& member) { return member.first == key; });
  }
  ASSIGN_OR_RETURN(Json out, merge_schemas(a, rest));
  if (!out.is_object()) return out;
  const Json more(Json::Array{std::move(own)});
  const Json* known = out.find(kContained);
  out.set(kContained, known == nullptr ? more : merged_keyword(kContained, *known, more));
  return out;
}

void merge_patterns(Json& out, const Json& more) {
  const Json* own = out.find(kPatterns);
  out.set(kPatterns, own == nullptr ? more : merged_keyword(kPatterns, *own, more));
}

// Whether what each says of the rest of members and items can be said of both.
Status check_together(const Json& a, const Json& b) {
  const auto has_any = [](const Json& schema, std::initializer_list<const char*> keys) {
    return std::any_of(keys.begin(), keys.end(), [&](const char* key) { return schema.find(key) != nullptr; });
  };
  for (const auto& [one, two] : {std::pair<const Json*, const Json*>{&a, &b}, {&b, &a}}) {
    const bool closes = has_any(*one, {"additionalProperties", "unevaluatedProperties"});
    if (one->find("patternProperties") != nullptr &&
        (has_any(*two, {"additionalProperties", "unevaluatedProperties"}) ||
         (closes && has_any(*two, {"properties", "patternProperties"}))))
      return Error(
          Code::kBadInput,
          "patternProperties: cannot be put together with another schema's properties beside additionalProperties");
    if (one->find("prefixItems") != nullptr && has_any(*two, {"unevaluatedItems"}) && !(*one == *two))
      return Error(Code::kBadInput, "prefixItems: cannot be put together with another schema's unevaluatedItems");
  }
  return {};
}

}  // namespace

Result<Json> merge_schemas(const Json& a, const Json& b) {
  if (a.is_bool() || b.is_bool()) return conjunction(a, b);
  if (!a.is_object() || !b.is_object()) return Error(Code::kBadInput, "a schema is an object, true or false");
  RETURN_IF_ERROR(check_together(a, b));
  const Json *contains_a = a.find("contains"), *contains_b = b.find("contains");
  if (contains_a != nullptr && contains_b != nullptr && !(*contains_a == *contains_b)) return merge_contained(a, b);
  Json out = a;
  Json::Array parts;  // of what has no value of its own that says both
  Json::Array apart;  // the same, as choices of one
  for (const auto& [key, value] : b.as_object()) {
    const Json* own = a.find(key);
    if (own == nullptr || is_annotation(key)) {
      if (own == nullptr) out.as_object().emplace_back(key, value);
      continue;
    }
    if (!says_something(key)) continue;
    if (key == "properties" || key == "prefixItems") continue;
    if (key == "allOf" && !(*own == value)) {
      parts.push_back(Json(Json::Object{{key, value}}));
      continue;
    }
    if (key == "pattern" && !(*own == value)) {
      merge_patterns(out, Json(Json::Array{value}));
      continue;
    }
    if (key == "oneOf" && !(*own == value)) {
      apart.push_back(Json(Json::Object{{key, value}}));
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
  merge_least_contained(a, b, out);
  if (a.find("prefixItems") != nullptr || b.find("prefixItems") != nullptr) merge_items(a, b, out);
  if (const Json* type = out.find("type"); type != nullptr && type->is_array() && type->as_array().empty())
    return Json(false);
  for (Json& part : apart) {
    const Json choice(Json::Array{std::move(part)});
    const Json* own = out.find("anyOf");
    out.set("anyOf", own == nullptr ? choice : merged_keyword("anyOf", *own, choice));
  }
  if (!parts.empty()) {
    if (const Json* own = out.find("allOf"); own != nullptr && own->is_array())
      parts.insert(parts.begin(), own->as_array().begin(), own->as_array().end());
    out.set("allOf", Json(std::move(parts)));
  }
  return out;
}

Json both_of(const Json& a, const Json& b) {
  return Json(Json::Object{{"allOf", Json(Json::Array{a, b})}});
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

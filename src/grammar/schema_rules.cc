#include "grammar/schema_rules.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "grammar/schema_merge.h"

namespace perigee {
namespace {

// One token of a JSON pointer without its escapes.
std::string unescaped(std::string_view token) {
  std::string out;
  for (size_t i = 0; i < token.size(); ++i) {
    if (token[i] == '~' && i + 1 < token.size() && (token[i + 1] == '0' || token[i + 1] == '1')) {
      out += token[++i] == '0' ? '~' : '/';
    } else if (token[i] == '%' && i + 2 < token.size()) {
      out += static_cast<char>(std::stoi("0" + std::string(token.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    } else {
      out += token[i];
    }
  }
  return out;
}

// The values of a schema; long texts count for more.
int64_t weight(const Json& schema) {
  if (schema.is_string()) return 1 + static_cast<int64_t>(schema.as_string().size() / 64);
  int64_t sum = 1;
  if (schema.is_array())
    for (const Json& each : schema.as_array()) sum += weight(each);
  if (schema.is_object())
    for (const auto& [key, value] : schema.as_object()) sum += weight(value);
  return sum;
}

const char* const kOfProperties[] = {"properties", "patternProperties", "additionalProperties", "anyOf",
                                     "oneOf",      "dependentSchemas"};

// Whether unevaluatedProperties means something else beside it.
bool speaks_of_properties(const Json& schema) {
  return std::any_of(std::begin(kOfProperties), std::end(kOfProperties),
                     [&](const char* key) { return schema.find(key) != nullptr; });
}

const char* const kTypes[] = {"null", "boolean", "object", "array", "number", "string", "integer"};

// Every text of these would obey the schema only by chance.
const std::pair<const char*, const char*> kRefused[] = {
    {"if", "conditions are not supported: spell the cases out in anyOf"},
    {"then", "conditions are not supported: spell the cases out in anyOf"},
    {"else", "conditions are not supported: spell the cases out in anyOf"},
    {"contains", "not supported: use prefixItems or items"},
    {"minContains", "not supported"},
    {"maxContains", "not supported"},
    {"$dynamicRef", "not supported: use $ref"},
    {"$recursiveRef", "not supported: use $ref"},
    {"dependencies", "not supported: use dependentRequired or dependentSchemas"},
    {"additionalItems", "not supported: use prefixItems and items"},
};

}  // namespace

void SchemaRules::refuse(const std::string& place, std::string_view why) const {
  throw SchemaRefusal{Error(Code::kBadInput, (place.empty() ? "/" : place) + ": " + std::string(why))};
}

std::string SchemaRules::add(const std::string& body) {
  if (const auto known = by_body_.find(body); known != by_body_.end()) return known->second;
  std::string name = fmt::format("r{}", rules_.size());
  num_bytes_ += body.size() + 16;
  if (rules_.size() >= limits_.rules || num_bytes_ > limits_.grammar_bytes)
    refuse("", "as a grammar the schema is too large: make it smaller or less nested");
  rules_.push_back(body);
  by_body_.emplace(body, name);
  return name;
}

std::string SchemaRules::add_regex(const std::string& pattern) {
  return add("Regex(" + ebnf_literal(pattern) + ")");
}

std::string SchemaRules::choice(const std::vector<std::string>& rules) {
  std::string body;
  for (const std::string& rule : rules)
    if (!rule.empty()) body += (body.empty() ? "" : " | ") + rule;
  return body.empty() ? "" : add(body);
}

std::string SchemaRules::finish(const std::string& root) {
  std::string out = "root ::= " + root + "\n";
  for (size_t i = 0; i < rules_.size(); ++i) {
    // A body may begin with an attribute of its rule.
    const size_t attribute = rules_[i].starts_with("[max_tokens=") ? rules_[i].find(']') + 1 : 0;
    out += fmt::format("r{}{} ::= {}\n", i, rules_[i].substr(0, attribute), rules_[i].substr(attribute));
  }
  return out;
}

const Json& SchemaRules::target(const std::string& ref, const std::string& place) const {
  if (!ref.starts_with("#")) refuse(place + "/$ref", "only references into the schema itself (#/…) are supported");
  const Json* at = &root_;
  std::string_view rest = std::string_view(ref).substr(1);
  if (!rest.empty() && rest[0] != '/') refuse(place + "/$ref", "references by $anchor are not supported");
  while (!rest.empty()) {
    rest.remove_prefix(1);
    const size_t end = std::min(rest.find('/'), rest.size());
    const std::string token = unescaped(rest.substr(0, end));
    rest.remove_prefix(end);
    const Json* next = at->find(token);
    if (next == nullptr && at->is_array() && !token.empty() && token.size() < 6 &&
        token.find_first_not_of("0123456789") == std::string::npos) {
      const size_t index = static_cast<size_t>(std::stoi(token));
      if (index < at->as_array().size()) next = &at->as_array()[index];
    }
    if (next == nullptr) refuse(place + "/$ref", fmt::format("{} names nothing in the schema", ref));
    at = next;
  }
  return *at;
}

// The same definitions may be met again and again, and names and values are compared each with each.
void SchemaRules::charge(const Json& a, const Json& b) {
  constexpr int64_t kOfACall = 200, kMost = 50'000'000;  // about a quarter of a second
  work_ += kOfACall + weight(a) * weight(b);
  if (work_ > kMost) refuse("", "its $ref, allOf, anyOf and oneOf take too long to put together: use fewer or smaller");
}

// A schema's unevaluatedProperties does not see what the schemas around it evaluate. Once they are one it would, so
// additionalProperties takes its place.
Json SchemaRules::closed_for_itself(Json schema, const std::string& place) const {
  const Json* closed = schema.find("unevaluatedProperties");
  if (closed == nullptr || schema.find("additionalProperties") != nullptr) return schema;
  for (const char* key : {"anyOf", "oneOf", "dependentSchemas"})
    if (schema.find(key) != nullptr)
      refuse(place + "/unevaluatedProperties",
             fmt::format("not supported beside {} in a part of another schema: use additionalProperties", key));
  schema.set("additionalProperties", Json(*closed));
  return schema;
}

// Without $ref and allOf at its top.
Json SchemaRules::flattened(const Json& schema, const std::string& place, int depth) {
  if (depth > 32) refuse(place, "its $ref and allOf lead back to itself, or through more than 32 others");
  if (!schema.is_object()) return schema;
  const Json* ref = schema.find("$ref");
  const Json* all = schema.find("allOf");
  if (ref == nullptr && all == nullptr) return schema;
  Json out(Json::Object{});
  for (const auto& [key, value] : schema.as_object())
    if (key != "$ref" && key != "allOf") out.set(key, value);
  const bool several = all != nullptr && all->is_array() && all->as_array().size() + (ref != nullptr ? 1 : 0) > 1;
  const auto merge_with = [&](const Json& other, const std::string& where) {
    Json flat = flattened(other, where, depth + 1);
    if (several || speaks_of_properties(out)) flat = closed_for_itself(std::move(flat), where);
    charge(out, flat);
    auto merged = merge_schemas(out, flat);
    if (!merged.ok()) refuse(where, merged.error().message);
    out = flattened(*merged, where, depth + 1);
  };
  if (ref != nullptr) {
    if (!ref->is_string()) refuse(place + "/$ref", "expected a string");
    merge_with(target(ref->as_string(), place), place + "/$ref");
  }
  if (all != nullptr) {
    if (!all->is_array() || all->as_array().empty()) refuse(place + "/allOf", "expected an array of schemas");
    for (size_t i = 0; i < all->as_array().size(); ++i)
      merge_with(all->as_array()[i], fmt::format("{}/allOf/{}", place, i));
  }
  return out;
}

std::string SchemaRules::rule_of(const Json& schema, const std::string& place) {
  if (schema.is_bool()) return schema.as_bool() ? any_value() : "";
  if (!schema.is_object()) refuse(place, "a schema is an object, true or false");
  const std::string text = dump_json(schema);
  if (const auto known = by_schema_.find(text); known != by_schema_.end()) return known->second;
  if (++depth_ > 128) refuse(place, "its references are nested over 128 deep without meeting again");
  // Named before it is made, because it may contain itself.
  rules_.emplace_back();
  const size_t index = rules_.size() - 1;
  const std::string name = fmt::format("r{}", index);
  by_schema_.emplace(text, name);
  const std::string body = body_of(flattened(schema, place, 0), place);
  // What nothing obeys stays a rule without a text, in case it was used on the way.
  rules_[index] = body.empty() ? name : body;
  num_bytes_ += rules_[index].size() + 16;
  if (body.empty()) by_schema_[text] = "";
  --depth_;
  return body.empty() ? "" : name;
}

void SchemaRules::check_keywords(const Json& schema, const std::string& place) const {
  for (const auto& [key, why] : kRefused)
    if (schema.find(key) != nullptr) refuse(place + "/" + key, why);
  if (const Json* id = schema.find("$id"); id != nullptr && !place.empty())
    refuse(place + "/$id", "a schema within a schema cannot have an $id of its own");
  for (const std::string& type : schema_types(schema)) {
    if (std::find(std::begin(kTypes), std::end(kTypes), type) == std::end(kTypes))
      refuse(place + "/type", fmt::format("{} is not a type", type));
  }
}

std::string SchemaRules::body_of(const Json& schema, const std::string& place) {
  if (schema.is_bool()) return schema.as_bool() ? any_value() : "";
  if (const Json* fixed = schema.find("const")) return constants(schema, {*fixed}, place + "/const");
  if (const Json* listed = schema.find("enum")) {
    if (!listed->is_array()) refuse(place + "/enum", "expected an array");
    return constants(schema, listed->as_array(), place + "/enum");
  }
  check_keywords(schema, place);
  if (schema.find("anyOf") != nullptr) return branches(schema, "anyOf", place);
  if (schema.find("oneOf") != nullptr) return branches(schema, "oneOf", place);
  if (schema.find("dependentRequired") != nullptr || schema.find("dependentSchemas") != nullptr)
    return dependents(schema, place);
  std::vector<std::string> rules;
  std::vector<std::string> types = schema_types(schema);
  if (const Json* no = schema.find("not")) {
    // Types are all that can be left out of a grammar as such.
    const bool by_type = no->is_object() && no->as_object().size() == 1 && no->find("type") != nullptr;
    if (!by_type) refuse(place + "/not", "only enum and const, or a `not` of types, are supported beside it");
    for (const std::string& left_out : schema_types(*no)) {
      if (left_out == "integer") refuse(place + "/not", "integers cannot be left out");
      std::erase(types, left_out);
      if (left_out == "number") std::erase(types, std::string("integer"));
    }
  }
  for (const std::string& type : types) rules.push_back(of_type(type, schema, place));
  std::string body;
  for (const std::string& rule : rules)
    if (!rule.empty()) body += (body.empty() ? "" : " | ") + rule;
  return body;
}

std::string SchemaRules::of_type(const std::string& type, const Json& schema, const std::string& place) {
  if (type == "null") return "\"null\"";
  if (type == "boolean") return "\"true\" | \"false\"";
  if (type == "string") return string(schema, place);
  if (type == "array") return array(schema, place);
  if (type == "object") return object(schema, place);
  return number(schema, type == "integer", place);
}

std::string SchemaRules::constants(const Json& schema, const Json::Array& values, const std::string& place) {
  if (values.size() > 4096) refuse(place, "more than 4,096 values");
  Json others(Json::Object{});
  for (const auto& [key, value] : schema.as_object()) others.set(key, value);
  std::string body;
  for (const Json& value : values) {
    const Obeys is = obeys(value, others);
    if (is == Obeys::kNo) continue;
    if (is == Obeys::kUnknown) refuse(place, "another keyword beside it cannot be checked for its values");
    body += (body.empty() ? "" : " | ") + ebnf_literal(dump_json(value));
  }
  return body;
}

std::string SchemaRules::branches(const Json& schema, const char* key, const std::string& place) {
  const Json& listed = *schema.find(key);
  if (!listed.is_array() || listed.as_array().empty()) refuse(place + "/" + key, "expected an array of schemas");
  const Json::Array& parts = listed.as_array();
  Json rest(Json::Object{});
  for (const auto& [name, value] : schema.as_object())
    if (name != key) rest.set(name, value);
  std::vector<Json> flat;
  for (size_t i = 0; i < parts.size(); ++i)
    flat.push_back(flattened(parts[i], fmt::format("{}/{}/{}", place, key, i), 0));
  if (key == std::string_view("oneOf")) {
    for (size_t i = 0; i < flat.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        charge(flat[i], flat[j]);
        if (!surely_disjoint(flat[i], flat[j]))
          refuse(place + "/oneOf",
                 fmt::format("a value may obey branches {} and {} at once: use anyOf, or a required property with a "
                             "const of its own in each",
                             j, i));
      }
  }
  std::string body;
  for (size_t i = 0; i < flat.size(); ++i) {
    const std::string where = fmt::format("{}/{}/{}", place, key, i);
    if (speaks_of_properties(rest)) flat[i] = closed_for_itself(std::move(flat[i]), where);
    charge(rest, flat[i]);
    auto merged = merge_schemas(rest, flat[i]);
    if (!merged.ok()) refuse(where, merged.error().message);
    const std::string rule = rule_of(*merged, where);
    if (!rule.empty()) body += (body.empty() ? "" : " | ") + rule;
  }
  return body;
}

// For the first property that others depend on: without it, or with them.
std::string SchemaRules::dependents(const Json& schema, const std::string& place) {
  const char* key = schema.find("dependentRequired") != nullptr ? "dependentRequired" : "dependentSchemas";
  const Json& all = *schema.find(key);
  if (!all.is_object()) refuse(place + "/" + key, "expected an object");
  Json rest(Json::Object{});
  for (const auto& [name, value] : schema.as_object())
    if (name != key) rest.set(name, value);
  if (all.as_object().empty()) return rule_of(rest, place);
  const auto& [property, needs] = all.as_object().front();
  Json::Object left(all.as_object().begin() + 1, all.as_object().end());
  if (!left.empty()) rest.set(key, Json(std::move(left)));
  const Json closed(Json::Object{{property, Json(false)}});
  auto without = merge_schemas(rest, Json(Json::Object{{"properties", closed}}));
  const bool names = key == std::string_view("dependentRequired");
  auto with = merge_schemas(rest, names ? Json(Json::Object{{"required", needs}}) : flattened(needs, place, 0));
  if (!without.ok() || !with.ok()) refuse(place + "/" + key, "it cannot be put together with the rest of the schema");
  const std::string a = rule_of(*without, place), b = rule_of(*with, place);
  return a.empty() || b.empty() ? a + b : a + " | " + b;
}

std::string SchemaRules::any_object() {
  const std::string value = any_value();
  const std::string pair = add(string(Json(Json::Object{}), "") + " \":\" \" \"? " + value);
  return add("\"{\" (" + pair + " (\",\" \" \"? " + pair + ")*)? \"}\"");
}

std::string SchemaRules::any_value() {
  if (const auto known = by_body_.find("any value"); known != by_body_.end()) return known->second;
  rules_.emplace_back();
  const size_t index = rules_.size() - 1;
  std::string name = fmt::format("r{}", index);
  by_body_.emplace("any value", name);
  const Json none(Json::Object{});
  const std::string array = add("\"[\" (" + name + " (\",\" \" \"? " + name + ")*)? \"]\"");
  rules_[index] = any_object() + " | " + array + " | " + string(none, "") + " | " + number(none, false, "") +
                  " | \"true\" | \"false\" | \"null\"";
  return name;
}

}  // namespace perigee

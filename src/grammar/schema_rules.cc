#include "grammar/schema_rules.h"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_set>

#include "base/utf8.h"
#include "grammar/schema_evaluated.h"
#include "grammar/schema_keywords.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_modern.h"
#include "grammar/schema_negate.h"
#include "grammar/schema_obeys.h"

namespace perigee {
namespace {

bool refers(const Json& in) {
  if (in.is_array()) return std::any_of(in.as_array().begin(), in.as_array().end(), refers);
  return in.is_object() && std::any_of(in.as_object().begin(), in.as_object().end(), [](const Json::Member& member) {
           return member.first.starts_with('$') && member.first.ends_with("ef") ? true : refers(member.second);
         });
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

const char* const kTypes[] = {"null", "boolean", "object", "array", "number", "string", "integer"};

const char* const kConditions[] = {"if", "then", "else", "not"};

bool is_condition(const std::string& key) {
  return std::any_of(std::begin(kConditions), std::end(kConditions), [&](const char* each) { return key == each; });
}

}  // namespace

SchemaRules::SchemaRules(const Json& root, const SchemaLimits& limits)
    : root_(root), limits_(limits), speaks_of_unevaluated_(speaks_of_unevaluated(root)), names_(root) {}

void SchemaRules::refuse(const std::string& place, std::string_view why) const {
  throw SchemaRefusal{Error(Code::kBadInput, (place.empty() ? "/" : place) + ": " + std::string(why))};
}

void SchemaRules::check_time(const std::string& place) const {
  constexpr std::chrono::seconds kMost(5);
  if (std::chrono::steady_clock::now() - began_ > kMost)
    refuse(place, "its parts take over 5 s to put together: use fewer or smaller");
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

// Alternatives, each of them once; "" for none.
std::string SchemaRules::any_rule(const std::vector<std::string>& rules) {
  std::string body;
  std::unordered_set<std::string> seen;
  for (const std::string& rule : rules)
    if (!rule.empty() && seen.insert(rule).second) body += (body.empty() ? "" : " | ") + rule;
  return body;
}

std::string SchemaRules::choice(const std::vector<std::string>& rules) {
  const std::string body = any_rule(rules);
  return body.empty() ? "" : add(body);
}

std::string SchemaRules::rest_of(const std::string& more, bool may_end) {
  if (more.empty()) return may_end ? "\"\"" : "";
  return add(fmt::format("{}\",\" \" \"? {}", may_end ? "\"\" | " : "", more));
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
  const Json* found = names_.find(ref);
  if (found == nullptr)
    refuse(place + "/$ref",
           fmt::format("{} names nothing in the schema; only references into the schema itself (#/…) are supported",
                       ref.substr(0, 256)));
  return *found;
}

// The same definitions may be met again and again, and names and values are compared each with each.
void SchemaRules::charge(const Json& a, const Json& b) {
  constexpr int64_t kOfACall = 200, kMost = 50'000'000;  // about a quarter of a second
  work_ += kOfACall + weight(a) * weight(b);
  check_time("");
  if (work_ > kMost) refuse("", "its $ref, allOf, anyOf and oneOf take too long to put together: use fewer or smaller");
}

// A schema's unevaluatedProperties and unevaluatedItems do not see what the schemas around it evaluate. Once they are
// one they would, so additionalProperties and items take their place.
Json SchemaRules::closed_for_itself(Json schema, const std::string& place) const {
  const auto close = [&](const char* unevaluated, const char* by, std::initializer_list<const char*> unclear) {
    const Json* closed = schema.find(unevaluated);
    if (closed == nullptr) return;
    Json rest = *closed;
    std::erase_if(schema.as_object(), [&](const Json::Member& member) { return member.first == unevaluated; });
    if (schema.find(by) != nullptr) return;
    for (const char* key : unclear)
      if (schema.find(key) != nullptr && !(rest == Json(true)))
        refuse(place + "/" + unevaluated,
               fmt::format("not supported beside {} in a part of another schema: use {}", key, by));
    schema.set(by, std::move(rest));
  };
  if (!schema.is_object()) return schema;
  close("unevaluatedProperties", "additionalProperties", {"anyOf", "oneOf", "dependentSchemas"});
  close("unevaluatedItems", "items", {"anyOf", "oneOf", "contains", kContained});
  return schema;
}

// Without $ref, allOf and conditions at its top.
Json SchemaRules::flattened(const Json& schema, const std::string& place, int depth) {
  check_time(place);
  if (depth > 32) refuse(place, "its $ref and allOf lead back to itself, or through more than 32 others");
  if (!schema.is_object()) return schema;
  const Json *id = schema.find("$id"), *own = root_.find("$id");
  if (id != nullptr && (own == nullptr || !(*own == *id)) && refers(schema))
    refuse(place + "/$id", "a schema within a schema cannot have an $id of its own beside references");
  if (!is_modern(schema)) return flattened(modern(schema), place, depth);
  const Json* ref = schema.find("$ref");
  const Json* all = schema.find("allOf");
  if (ref == nullptr && all == nullptr) return without_conditions(schema, place, depth);
  Json out(Json::Object{});
  for (const auto& [key, value] : schema.as_object())
    if (key != "$ref" && key != "allOf") out.as_object().emplace_back(key, value);
  out = without_conditions(out, place, depth);
  const bool several = all != nullptr && all->is_array() && all->as_array().size() + (ref != nullptr ? 1 : 0) > 1;
  const auto add = [&](const Json& other, const std::string& where) {
    out = merged(std::move(out), other, where, depth, several);
  };
  if (ref != nullptr) {
    if (!ref->is_string()) refuse(place + "/$ref", "expected a string");
    add(target(ref->as_string(), place), place + "/$ref");
  }
  if (all != nullptr) {
    if (!all->is_array() || all->as_array().empty()) refuse(place + "/allOf", "expected an array of schemas");
    for (size_t i = 0; i < all->as_array().size(); ++i) add(all->as_array()[i], fmt::format("{}/allOf/{}", place, i));
  }
  return out;
}

// `out`, which is flat, and another one as one.
Json SchemaRules::merged(Json out, const Json& other, const std::string& place, int depth, bool several) {
  Json flat = flattened(other, place, depth + 1);
  if (several || evaluates(out)) flat = closed_for_itself(std::move(flat), place);
  charge(out, flat);
  auto both = merge_schemas(out, flat);
  if (!both.ok()) refuse(place, both.error().message);
  return flattened(*both, place, depth + 1);
}

// What does not obey `schema`, of what obeys `beside`.
std::vector<Json> SchemaRules::complement_of(const Json& schema, const std::string& place, const Json& beside) const {
  check_time(place);
  std::vector<std::string> names;
  if (const Json* properties = beside.find("properties"); properties != nullptr && properties->is_object())
    for (const auto& [name, value] : properties->as_object()) names.push_back(name);
  return negated(
      schema, [&](const std::string& ref) -> const Json& { return target(ref, place); }, names);
}

// Whether parts of a complement would change what is unevaluated.
bool SchemaRules::must_not_say(const std::vector<Json>& parts, const Json& beside) const {
  return speaks_of_unevaluated_ &&
         std::any_of(parts.begin(), parts.end(), [&](const Json& part) { return evaluates_more(part, beside); });
}

// `not` and `if` as choices of what is left. Beside constants they stay: each value is tried.
Json SchemaRules::without_conditions(const Json& schema, const std::string& place, int depth) {
  if (!schema.is_object() || schema.find("const") != nullptr || schema.find("enum") != nullptr) return schema;
  if (std::none_of(std::begin(kConditions), std::end(kConditions),
                   [&](const char* key) { return schema.find(key) != nullptr; }))
    return schema;
  ++num_complements_;
  Json out(Json::Object{});
  for (const auto& [key, value] : schema.as_object())
    if (!is_condition(key)) out.as_object().emplace_back(key, value);
  if (const Json* no = schema.find("not")) {
    std::vector<Json> left = complement_of(*no, place + "/not", out);
    if (left.empty() && !(*no == Json(true)) && !(*no == Json(Json::Object{})))
      refuse(place + "/not", "what it leaves over cannot be said: spell out what is allowed");
    if (left.empty()) return false;
    if (must_not_say(left, out))
      refuse(place + "/not",
             "with properties or items that nothing beside it names it is not supported in a schema with "
             "unevaluatedProperties or unevaluatedItems");
    out = merged(std::move(out), any_of(std::move(left)), place + "/not", depth, false);
  }
  const Json *condition = schema.find("if"), *then = schema.find("then"), *otherwise = schema.find("else");
  if (condition == nullptr || (then == nullptr && otherwise == nullptr)) return out;
  const auto both = [](const Json& a, const Json* b) {
    return b == nullptr ? a : Json(Json::Object{{"allOf", Json(Json::Array{a, *b})}});
  };
  std::vector<Json> cases = {both(*condition, then)};
  for (const Json& part : complement_of(*condition, place + "/if", out))
    if (!must_not_say({part}, out)) cases.push_back(both(part, otherwise));
  return merged(std::move(out), any_of(std::move(cases)), place + "/if", depth, false);
}

std::string SchemaRules::rule_of(const Json& schema, const std::string& place) {
  if (schema.is_bool()) return schema.as_bool() ? any_value() : "";
  if (!schema.is_object()) refuse(place, "a schema is an object, true or false");
  const std::string text = dump_json(schema);
  if (left_out_.contains(text)) return "";
  if (const auto known = by_schema_.find(text); known != by_schema_.end()) return known->second;
  constexpr size_t kMostTextBytes = 32 << 20;
  text_bytes_ += text.size();
  if (text_bytes_ > kMostTextBytes)
    refuse(place, "its parts have over 32 MiB together once they are put together: use fewer, or shorter texts");
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
  if (schema.find("oneOf") != nullptr) return branches(schema, "oneOf", place);
  if (schema.find("anyOf") != nullptr) return branches(schema, "anyOf", place);
  if (schema.find("dependentRequired") != nullptr || schema.find("dependentSchemas") != nullptr)
    return dependents(schema, place);
  std::vector<std::string> rules;
  for (const std::string& type : schema_types(schema)) rules.push_back(of_type(type, schema, place));
  return any_rule(rules);
}

std::string SchemaRules::of_type(const std::string& type, const Json& schema, const std::string& place) {
  if (type == "null" || type == "boolean") {
    const Json::Array all = type == "null" ? Json::Array{nullptr} : Json::Array{true, false};
    return constants(Json(Json::Object{{kExcept, Json(except_of(schema))}}), all, place);
  }
  if (type == "string") return string(schema, place);
  if (type == "array" || type == "object") {
    const Json left = without_exceptions(schema, type, place);
    return type == "array" ? array(left, place) : object(left, place);
  }
  return number(schema, type == "integer", place);
}

Json::Array SchemaRules::except_of(const Json& schema) {
  const Json* except = schema.find(kExcept);
  return except != nullptr && except->is_array() ? except->as_array() : Json::Array{};
}

// Of arrays and objects only the empty one can be left out, as a bound of their size.
Json SchemaRules::without_exceptions(const Json& schema, const std::string& type, const std::string& place) const {
  const Json::Array except = except_of(schema);
  if (except.empty()) return schema;
  Json out = schema;
  std::erase_if(out.as_object(), [](const Json::Member& member) { return member.first == kExcept; });
  const char* least = type == "array" ? "minItems" : "minProperties";
  for (const Json& value : except) {
    if (type != value.type_name() || obeys(value, out) == Obeys::kNo) continue;
    if (value.is_array() ? !value.as_array().empty() : !value.as_object().empty())
      refuse(place + "/not", "a constant that is an object or an array with anything in it is not supported");
    out.set(least, Json(std::max<int64_t>(1, count(schema, least, 0, place))));
  }
  return out;
}

std::string SchemaRules::constants(const Json& schema, const Json::Array& values, const std::string& place) {
  if (values.size() > 4096) refuse(place, "more than 4,096 values");
  Json others(Json::Object{});
  for (const auto& [key, value] : schema.as_object()) others.as_object().emplace_back(key, value);
  std::vector<std::string> texts;
  for (const Json& value : values) {
    check_time(place);
    const Obeys is = obeys(value, others);
    if (is == Obeys::kNo) continue;
    if (is == Obeys::kUnknown) refuse(place, "another keyword beside it cannot be checked for its values");
    texts.push_back(dump_json(value));
  }
  constexpr size_t kFew = 8;
  std::string body;
  if (texts.size() > kFew) {
    std::sort(texts.begin(), texts.end());
    texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
    return one_of(texts, 0, texts.size(), 0);
  }
  for (const std::string& text : texts) body += (body.empty() ? "" : " | ") + ebnf_literal(text);
  return body;
}

// What follows the first `depth` bytes of sorted texts, as an automaton: a rule for each place where they part, and for
// each different rest.
std::string SchemaRules::one_of(const std::vector<std::string>& texts, size_t first, size_t last, size_t depth) {
  const std::string &low = texts[first], &high = texts[last - 1];
  size_t parts = std::mismatch(low.begin(), low.end(), high.begin(), high.end()).first - low.begin();
  while (parts > depth && parts < low.size() && (low[parts] & 0xC0) == 0x80) --parts;  // at a character
  std::string head = parts > depth ? ebnf_literal(low.substr(depth, parts - depth)) : "";
  if (first + 1 == last) return head.empty() ? "\"\"" : head;
  std::string body;
  for (size_t i = first; i < last;) {
    const std::string& text = texts[i];
    size_t next = parts, end = i;
    if (parts < text.size()) next += utf8_at(text, parts).length;
    while (end < last && texts[end].compare(0, next, text, 0, next) == 0 &&
           (next > parts || texts[end].size() == parts))
      ++end;
    body += body.empty() ? "" : " | ";
    body +=
        next > parts ? ebnf_literal(text.substr(parts, next - parts)) + " " + add(one_of(texts, i, end, next)) : "\"\"";
    i = end;
  }
  return head.empty() ? body : head + " " + add(body);
}

std::string SchemaRules::branches(const Json& schema, const char* key, const std::string& place) {
  const Json& listed = *schema.find(key);
  if (!listed.is_array() || listed.as_array().empty()) refuse(place + "/" + key, "expected an array of schemas");
  const Json::Array& parts = listed.as_array();
  Json rest(Json::Object{});
  for (const auto& [name, value] : schema.as_object())
    // What forbids nothing is not copied into each branch: $defs and texts may be long.
    if (name != key && !is_annotation(name)) rest.as_object().emplace_back(name, value);
  std::vector<Json> flat, whole;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t before = num_complements_;
    flat.push_back(flattened(parts[i], fmt::format("{}/{}/{}", place, key, i), 0));
    // What is said of a complement may be a part of it: then other branches are compared with the schema as it came.
    whole.push_back(num_complements_ == before ? flat.back() : parts[i]);
    // Branches are told apart by what stands beside them, too.
    for (Json* each : {&flat.back(), &whole.back()})
      if (const Json* type = rest.find("type"); type != nullptr && each->is_object() && each->find("type") == nullptr)
        each->set("type", *type);
  }
  if (key == std::string_view("oneOf")) make_exclusive(flat, whole, place);
  std::vector<std::string> rules;
  for (size_t i = 0; i < flat.size(); ++i) {
    const std::string where = fmt::format("{}/{}/{}", place, key, i);
    if (evaluates(rest)) flat[i] = closed_for_itself(std::move(flat[i]), where);
    charge(rest, flat[i]);
    auto both = merge_schemas(rest, flat[i]);
    if (!both.ok()) refuse(where, both.error().message);
    rules.push_back(rule_of(*both, where));
  }
  return any_rule(rules);
}

// Takes from each branch of a oneOf what obeys another one, as the client wrote it, as well.
void SchemaRules::make_exclusive(std::vector<Json>& branches, const std::vector<Json>& whole,
                                 const std::string& place) {
  std::vector<Json> alone;
  size_t first = 0, second = 0;  // branches that cannot be told apart
  for (size_t i = 0; i < branches.size(); ++i) {
    Json::Array all = {branches[i]};
    for (size_t j = 0; j < branches.size(); ++j) {
      if (i == j) continue;
      charge(branches[i], whole[j]);
      if (surely_disjoint(branches[i], whole[j])) continue;
      std::vector<Json> left = complement_of(whole[j], fmt::format("{}/oneOf/{}", place, j), branches[i]);
      if (left.empty()) {
        all.assign(1, Json(false));
        first = std::min(i, j);
        second = std::max(i, j);
        break;
      }
      if (must_not_say(left, branches[i]))
        refuse(place + "/oneOf",
               "branches with properties or items of their own that one value may obey at once are not "
               "supported in a schema with unevaluatedProperties or unevaluatedItems");
      all.push_back(any_of(std::move(left)));
    }
    alone.push_back(all.size() == 1 ? std::move(all[0])
                                    : flattened(Json(Json::Object{{"allOf", Json(std::move(all))}}), place, 0));
  }
  if (second != 0 && std::all_of(alone.begin(), alone.end(), [](const Json& one) { return one == Json(false); }))
    refuse(place + "/oneOf",
           fmt::format("a value may obey branches {} and {} at once: use anyOf, or a required property with a const of "
                       "its own in each",
                       first, second));
  branches = std::move(alone);
}

// For the first property that others depend on: without it, or with them.
std::string SchemaRules::dependents(const Json& schema, const std::string& place) {
  const char* key = schema.find("dependentRequired") != nullptr ? "dependentRequired" : "dependentSchemas";
  const Json& all = *schema.find(key);
  if (!all.is_object()) refuse(place + "/" + key, "expected an object");
  Json rest(Json::Object{});
  for (const auto& [name, value] : schema.as_object())
    if (name != key && !is_annotation(name)) rest.as_object().emplace_back(name, value);
  if (all.as_object().empty()) return rule_of(rest, place);
  const auto& [property, needs] = all.as_object().front();
  Json::Object left(all.as_object().begin() + 1, all.as_object().end());
  if (!left.empty()) rest.set(key, Json(std::move(left)));
  const Json closed(Json::Object{{property, Json(false)}});
  auto without = merge_schemas(rest, Json(Json::Object{{"properties", closed}}));
  const bool names = key == std::string_view("dependentRequired");
  Json then = names ? Json(Json::Object{{"required", needs}}) : flattened(needs, place, 0);
  if (evaluates(rest)) then = closed_for_itself(std::move(then), place + "/" + key);
  auto with = merge_schemas(rest, then);
  // Only where the property is there does what it asks for count as evaluated.
  if (with.ok()) with = merge_schemas(*with, Json(Json::Object{{"required", Json(Json::Array{Json(property)})}}));
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

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/utf8.h"
#include "grammar/pattern.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_rules.h"

namespace perigee {

// What an object is made of: its declared members in order, then others.
struct SchemaRules::Members {
  struct Member {
    std::string rule;  // "key":value
    bool required;
  };
  std::vector<Member> declared;
  std::string other;             // the rule of "key":value of any other; "" if there are none
  int64_t least = 0, most = -1;  // members in all; most < 0: any number
  std::map<std::pair<size_t, int64_t>, std::string> known;  // members_from()
};

namespace {

constexpr size_t kMostNameBytes = 1024, kMostNamesBytes = 8192;  // where properties are open to others

const Json* closing_keyword(const Json& schema) {
  const Json* closed = schema.find("additionalProperties");
  return closed != nullptr ? closed : schema.find("unevaluatedProperties");
}

// Texts of plain characters other than the names, which must be sorted and begin with the same `depth` bytes.
std::string none_of(const std::vector<std::string>& names, size_t first, size_t last, size_t depth) {
  bool is_name = false;
  CodePoints begun;
  std::string longer;
  for (size_t i = first; i < last;) {
    if (names[i].size() == depth) {
      is_name = true;
      ++i;
      continue;
    }
    const Utf8Char c = utf8_at(names[i], depth);
    const std::string prefix = names[i].substr(0, depth + c.length);
    size_t end = i;
    while (end < last && names[end].starts_with(prefix)) ++end;
    const CodePoints one = {{c.code_point, c.code_point}};
    begun.push_back(one[0]);
    longer += "|" + spell_set(one, true) + "(" + none_of(names, i, end, depth + c.length) + ")";
    i = end;
  }
  std::sort(begun.begin(), begun.end());
  CodePoints plain;  // characters that JSON does not escape, so that no name is spelt in another way
  uint32_t next = 0x20;
  const auto up_to = [&](uint32_t c) {
    for (const auto& [low, high] :
         {std::pair<uint32_t, uint32_t>{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0xD7FF}, {0xE000, 0x10FFFF}})
      if (c > 0 && std::max(low, next) <= std::min(high, c - 1))
        plain.emplace_back(std::max(low, next), std::min(high, c - 1));
    next = c + 1;
  };
  for (const auto& range : begun) up_to(range.first);
  up_to(0x110000);
  static const std::string any = spell_set({{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0xD7FF}, {0xE000, 0x10FFFF}}, true);
  const std::string other = spell_set(plain, true) + spell_repeat(any, 0) + longer;
  return spell_repeat(other, is_name ? 1 : 0, 1);
}

}  // namespace

// The key of a member that is not declared, as a regular expression of the string.
std::string SchemaRules::other_key(const Json& schema, const std::vector<std::string>& declared,
                                   const std::string& place) {
  const Json* names = schema.find("propertyNames");
  if (names != nullptr && !(*names == Json(true))) {
    if (!declared.empty())
      refuse(place + "/propertyNames", "not supported where properties and additionalProperties are open as well");
    auto merged = merge_schemas(flattened(*names, place + "/propertyNames", 0), Json(Json::Object{{"type", "string"}}));
    if (!merged.ok() || !merged->is_object()) refuse(place + "/propertyNames", "no name obeys it");
    return rule_of(*merged, place + "/propertyNames");
  }
  if (declared.empty()) return string(Json(Json::Object{}), place);
  // none_of() goes as deep as a name is long.
  size_t bytes = 0;
  for (const std::string& name : declared) {
    bytes += name.size();
    if (name.size() > kMostNameBytes || bytes > kMostNamesBytes)
      refuse(place + "/additionalProperties",
             fmt::format("beside other properties a name has at most {} bytes, and all names {}: shorten them, or say "
                         "\"additionalProperties\": false",
                         kMostNameBytes, kMostNamesBytes));
  }
  std::vector<std::string> sorted = declared;
  std::sort(sorted.begin(), sorted.end());
  return add_regex("\\u0022" + none_of(sorted, 0, sorted.size(), 0) + "\\u0022");
}

std::string SchemaRules::other_members(const Json& schema, Members& members, const std::string& place) {
  const Json* properties = schema.find("properties");
  std::vector<std::string> names;
  if (properties != nullptr)
    for (const auto& [name, value] : properties->as_object()) names.push_back(name);
  if (const Json* required = schema.find("required"))
    for (const Json& name : required->as_array()) names.push_back(name.as_string());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (const Json* patterns = schema.find("patternProperties"); patterns != nullptr && !patterns->as_object().empty()) {
    if (patterns->as_object().size() > 1)
      refuse(place + "/patternProperties", "more than one pattern is not supported: a name might match two");
    const auto& [pattern, value] = patterns->as_object().front();
    const std::string where = place + "/patternProperties/" + pattern;
    auto parsed = Pattern::parse(pattern, Pattern::Whole::kSearched);
    if (!parsed.ok()) refuse(where, parsed.error().message);
    // A declared name that matches could come twice.
    if (std::any_of(names.begin(), names.end(), [&](const std::string& name) { return parsed->matches(name); }))
      return "";
    if (schema.find("propertyNames") != nullptr)
      refuse(place + "/propertyNames", "not supported beside patternProperties");
    const std::string rule = rule_of(value, where);
    if (rule.empty()) return "";
    return add(add_regex("\\u0022(" + parsed->spelt_in_json() + ")\\u0022") + " \":\" \" \"? " + rule);
  }
  const Json* closed = closing_keyword(schema);
  const bool open = closed != nullptr ? !(*closed == Json(false))
                                      : names.empty() || members.least > static_cast<int64_t>(names.size());
  if (!open) return "";
  const Json anything(true);
  const std::string value = rule_of(closed == nullptr ? anything : *closed, place + "/additionalProperties");
  if (value.empty()) return "";
  const std::string key = other_key(schema, names, place);
  return key.empty() ? "" : add(key + " \":\" \" \"? " + value);
}

SchemaRules::Members SchemaRules::members_of(const Json& schema, const std::string& place) {
  Members members;
  members.least = count(schema, "minProperties", 0, place);
  members.most = count(schema, "maxProperties", -1, place);
  const Json *properties = schema.find("properties"), *required = schema.find("required");
  if (properties != nullptr && !properties->is_object()) refuse(place + "/properties", "expected an object");
  if (const Json* patterns = schema.find("patternProperties"); patterns != nullptr && !patterns->is_object())
    refuse(place + "/patternProperties", "expected an object");
  Json::Object declared = properties == nullptr ? Json::Object{} : properties->as_object();
  std::vector<std::string> needed;
  if (required != nullptr) {
    if (!required->is_array()) refuse(place + "/required", "expected an array of names");
    for (const Json& name : required->as_array()) {
      if (!name.is_string()) refuse(place + "/required", "expected an array of names");
      needed.push_back(name.as_string());
    }
  }
  for (const std::string& name : needed) {
    if (std::none_of(declared.begin(), declared.end(), [&](const Json::Member& m) { return m.first == name; })) {
      const Json* closed = closing_keyword(schema);
      declared.emplace_back(name, closed == nullptr ? Json(true) : *closed);
    }
  }
  const Json* patterns = schema.find("patternProperties");
  const Json* names = schema.find("propertyNames");
  for (auto& [name, value] : declared) {
    const std::string where = fmt::format("{}/properties/{}", place, name);
    if (patterns != nullptr) {
      for (const auto& [pattern, says] : patterns->as_object()) {
        auto parsed = Pattern::parse(pattern, Pattern::Whole::kSearched);
        if (!parsed.ok()) refuse(fmt::format("{}/patternProperties/{}", place, pattern), parsed.error().message);
        if (parsed->matches(name)) value = Json(Json::Object{{"allOf", Json(Json::Array{value, says})}});
      }
    }
    const bool must = std::find(needed.begin(), needed.end(), name) != needed.end();
    std::string rule;
    if (names != nullptr && obeys(Json(name), *names) != Obeys::kYes) {
      if (must && obeys(Json(name), *names) == Obeys::kUnknown)
        refuse(place + "/propertyNames", "not supported for declared names");
    } else {
      rule = rule_of(value, where);
    }
    if (rule.empty() && must) {
      members.declared.assign(1, {"", true});
      return members;
    }
    if (!rule.empty())
      members.declared.push_back({add(ebnf_literal(dump_json(Json(name)) + ":") + " \" \"? " + rule), must});
  }
  members.other = other_members(schema, members, place);
  return members;
}

// What follows when `before` members are there (counted only where their number matters) and the next is `at`.
std::string SchemaRules::members_from(Members& members, size_t at, int64_t before) {
  if (const auto known = members.known.find({at, before}); known != members.known.end()) return known->second;
  std::string made = at == members.declared.size() ? others_after(members, before) : members_after(members, at, before);
  return members.known[{at, before}] = std::move(made);
}

std::string SchemaRules::others_after(const Members& members, int64_t before) {
  const int64_t low = std::max<int64_t>(0, members.least - before);
  if (members.other.empty() || (members.most >= 0 && before >= members.most)) return low > 0 ? "" : "\"\"";
  const std::string next = add("\",\" \" \"? " + members.other);
  const int64_t first = before > 0 ? 0 : 1;  // without a comma
  const int64_t least = std::max<int64_t>(0, low - first), most = members.most - before - first;
  std::string more =
      members.most < 0 ? fmt::format("{}{{{},}}", next, least) : fmt::format("{}{{{},{}}}", next, least, most);
  if (members.most >= 0 && most == 0) more = "\"\"";
  if (before > 0) return more;
  return add((low > 0 ? "" : "\"\" | ") + members.other + " " + more);
}

std::string SchemaRules::members_after(Members& members, size_t at, int64_t before) {
  const Members::Member& member = members.declared[at];
  const bool counted = members.least > 0 || members.most >= 0;
  std::string body;
  if (members.most < 0 || before < members.most) {
    const std::string rest = members_from(members, at + 1, counted ? before + 1 : 1);
    if (!rest.empty()) body = (before > 0 ? "\",\" \" \"? " : "") + member.rule + " " + rest;
  }
  if (!member.required) {
    const std::string rest = members_from(members, at + 1, before);
    if (!rest.empty()) body += (body.empty() ? "" : " | ") + rest;
  }
  return body.empty() ? "" : add(body);
}

std::string SchemaRules::object(const Json& schema, const std::string& place) {
  Members members = members_of(schema, place);
  for (const Members::Member& member : members.declared)
    if (member.rule.empty()) return "";
  int64_t needed = 0;
  for (const Members::Member& member : members.declared) needed += member.required ? 1 : 0;
  // Others may repeat a name, which then counts once.
  if (!members.other.empty() && members.least > std::max<int64_t>(1, needed)) {
    if (members.least > static_cast<int64_t>(members.declared.size()))
      refuse(place + "/minProperties", "more than 1 is supported for declared properties only");
    members.other.clear();
  }
  if (members.least <= needed) members.least = 0;
  if (members.declared.size() > 2000) refuse(place + "/properties", "more than 2,000 properties");
  const bool counted = members.least > 0 || members.most >= 0;
  if (counted && members.declared.size() > 64) refuse(place + "/maxProperties", "supported for up to 64 properties");
  const std::string inside = members_from(members, 0, 0);
  return inside.empty() ? "" : "\"{\" " + inside + " \"}\"";
}

}  // namespace perigee

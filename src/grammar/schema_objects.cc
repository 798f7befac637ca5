#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <unordered_set>

#include "base/utf8.h"
#include "grammar/pattern.h"
#include "grammar/schema_keywords.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_obeys.h"
#include "grammar/schema_rules.h"

namespace perigee {

// What an object is made of: its declared members in order, then others.
struct SchemaRules::Members {
  struct Member {
    std::string key;   // its text with the colon; "" where the rule has it
    std::string rule;  // of what comes after that
    bool required;
  };
  std::vector<Member> declared;
  std::string other;             // the rule of "key":value of any other; "" if there are none
  int64_t least = 0, most = -1;  // members in all; most < 0: any number
  std::map<std::pair<size_t, int64_t>, std::string> known;  // members_from()

  // Whether it matters how many there are before.
  bool counted() const { return least > 0 || most >= 0; }
  bool any_required(size_t first, size_t last) const {
    return std::any_of(declared.begin() + static_cast<ptrdiff_t>(first),
                       declared.begin() + static_cast<ptrdiff_t>(last),
                       [](const Member& member) { return member.required; });
  }
  bool may_end(size_t at, int64_t before) const { return before >= least && !any_required(at, declared.size()); }
  // Members come in groups of 16, in which what their names begin with is spelt once: a place in a text is then in one
  // of the names, and not in each. From a place in a group on the next members are in blocks of 1, 2, 4 and 8 up to the
  // group's end, so that a few blocks have all that may be next and many places share one.
  static constexpr size_t kGroup = 16;
  size_t group_end(size_t i) const { return std::min(declared.size(), i / kGroup * kGroup + kGroup); }
  bool is_grouped(size_t i) const {
    return !counted() && std::none_of(declared.begin() + static_cast<ptrdiff_t>(i / kGroup * kGroup),
                                      declared.begin() + static_cast<ptrdiff_t>(group_end(i)),
                                      [](const Member& member) { return member.key.empty(); });
  }
  size_t block_end(size_t at) const {
    const size_t alike = at % kGroup;  // the lowest bit of it that is set is how many
    return is_grouped(at) ? std::min(group_end(at), at + (alike == 0 ? kGroup : alike & (~alike + 1))) : at + 1;
  }
  // The bytes by which a key differs from the others of its group.
  size_t told_apart(size_t i) const {
    const std::string& key = declared[i].key;
    size_t most = 0;
    for (size_t j = i / kGroup * kGroup; j < group_end(i); ++j) {
      if (j == i) continue;
      const std::string& other = declared[j].key;
      most =
          std::max<size_t>(most, std::mismatch(key.begin(), key.end(), other.begin(), other.end()).first - key.begin());
    }
    size_t end = 0;
    while (end <= most && end < key.size()) end += utf8_at(key, end).length;
    return end;
  }
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

// The names that propertyNames allows; all texts without it.
Language SchemaRules::names_of(const Json& schema, const std::string& place) {
  const Json* names = schema.find("propertyNames");
  if (names == nullptr) return Language::all();
  const std::string where = place + "/propertyNames";
  const Json flat = flattened(*names, where, 0);
  if (flat.is_bool()) return flat.as_bool() ? Language::all() : Language();
  const std::vector<std::string> types = schema_types(flat);
  if (std::find(types.begin(), types.end(), "string") == types.end()) return {};
  if (flat.find("anyOf") != nullptr || flat.find("oneOf") != nullptr)
    refuse(where, "anyOf and oneOf are not supported beside other properties");
  const Json *fixed = flat.find("const"), *listed = flat.find("enum");
  if (fixed == nullptr && listed == nullptr) return language_of(flat, where);
  std::vector<std::string> texts;
  for (const Json& name : fixed != nullptr ? Json::Array{*fixed} : listed->as_array())
    if (name.is_string() && obeys(name, flat) == Obeys::kYes) texts.push_back(name.as_string());
  return Language::of_texts(texts);
}

// The same without some names.
Language SchemaRules::without(Language names, const std::vector<std::string>& left_out,
                              const std::string& place) const {
  if (left_out.empty()) return names;
  auto rest = names.intersected(Language::of_texts(left_out).complement());
  if (!rest.ok()) refuse(place, rest.error().message);
  return *std::move(rest);
}

// The key of a member that is not declared, as a rule.
std::string SchemaRules::other_key(const Json& schema, const std::vector<std::string>& declared,
                                   const std::string& place) {
  const Json* names = schema.find("propertyNames");
  if (names != nullptr && !(*names == Json(true))) {
    if (!declared.empty()) return quoted(without(names_of(schema, place), declared, place + "/propertyNames"));
    const Json text(Json::Object{{"type", "string"}});
    auto merged = merge_schemas(flattened(*names, place + "/propertyNames", 0), text);
    if (!merged.ok()) refuse(place + "/propertyNames", merged.error().message);
    return rule_of(*merged, place + "/propertyNames");
  }
  if (declared.empty()) return string(Json(Json::Object{}), place);
  check_names(declared, place);
  std::vector<std::string> sorted = declared;
  std::sort(sorted.begin(), sorted.end());
  return add_regex("\\u0022" + none_of(sorted, 0, sorted.size(), 0) + "\\u0022");
}

// Automata go as deep as a name is long.
void SchemaRules::check_names(const std::vector<std::string>& declared, const std::string& place) const {
  size_t bytes = 0;
  for (const std::string& name : declared) {
    bytes += name.size();
    if (name.size() > kMostNameBytes || bytes > kMostNamesBytes)
      refuse(place + "/additionalProperties",
             fmt::format("beside other properties a name has at most {} bytes, and all names {}: shorten them, or say "
                         "\"additionalProperties\": false",
                         kMostNameBytes, kMostNamesBytes));
  }
}

std::string SchemaRules::quoted(const Language& names) {
  const std::string inside = add_language(names);
  return inside.empty() ? "" : add("\"\\\"\" " + inside + " \"\\\"\"");
}

// "key":value of names that some patterns match and others do not, for each such set of patterns.
std::string SchemaRules::pattern_members(const Json& schema, const std::vector<std::string>& declared,
                                         const std::string& place) {
  const Json::Object& patterns = schema.find("patternProperties")->as_object();
  check_names(declared, place);
  const auto settled = [&](Result<Language> made) {
    if (!made.ok()) refuse(place + "/patternProperties", made.error().message);
    return *std::move(made);
  };
  check_time(place);
  const Language names = without(names_of(schema, place), declared, place + "/patternProperties");
  const Json* closed = closing_keyword(schema);
  std::vector<std::string> rules;
  std::vector<Language> matching, others;
  for (const auto& [pattern, value] : patterns) {
    check_time(place);
    matching.push_back(settled(Language::of_pattern(pattern, Reading::kNarrow)));
    others.push_back(settled(Language::of_pattern(pattern, Reading::kWide)).complement());
  }
  for (size_t set = 0; set < size_t{1} << patterns.size(); ++set) {
    Language those = names;
    Json::Array values;
    std::string where = place + "/patternProperties";
    for (size_t i = 0; i < patterns.size(); ++i) {
      check_time(place);
      const bool in = (set >> i & 1) != 0;
      const auto& [pattern, value] = patterns[i];
      those = settled(those.intersected(in ? matching[i] : others[i]));
      if (!in) continue;
      values.push_back(value);
      where = fmt::format("{}/patternProperties/{}", place, pattern);
    }
    if (those.is_empty() || (values.empty() && closed == nullptr)) continue;
    const Json value = values.empty()       ? *closed
                       : values.size() == 1 ? values[0]
                                            : Json(Json::Object{{"allOf", Json(std::move(values))}});
    const std::string rule = rule_of(value, where);
    if (!rule.empty()) rules.push_back(add(fmt::format("{} \":\" \" \"? {}", quoted(those), rule)));
  }
  return choice(rules);
}

std::string SchemaRules::other_members(const Json& schema, const Members& members, const std::string& place) {
  std::vector<std::string> names = named_in(schema);
  const bool declares = names.size() > absent_of(schema).size();
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (const Json* patterns = schema.find("patternProperties"); patterns != nullptr && !patterns->as_object().empty())
    return pattern_members(schema, names, place);
  const Json* closed = closing_keyword(schema);
  const bool open =
      closed != nullptr ? !(*closed == Json(false)) : !declares || members.least > static_cast<int64_t>(names.size());
  if (!open) return "";
  const Json anything(true);
  const std::string value = rule_of(closed == nullptr ? anything : *closed, place + "/additionalProperties");
  if (value.empty()) return "";
  const std::string key = other_key(schema, names, place);
  return key.empty() ? "" : add(key + " \":\" \" \"? " + value);
}

std::vector<std::string> SchemaRules::absent_of(const Json& schema) {
  std::vector<std::string> out;
  if (const Json* absent = schema.find(kAbsent); absent != nullptr && absent->is_array())
    for (const Json& name : absent->as_array())
      if (name.is_string()) out.push_back(name.as_string());
  return out;
}

// All names of which a schema speaks.
std::vector<std::string> SchemaRules::named_in(const Json& schema) {
  std::vector<std::string> out = absent_of(schema);
  if (const Json* properties = schema.find("properties"))
    for (const auto& [name, value] : properties->as_object()) out.push_back(name);
  if (const Json* required = schema.find("required"))
    for (const Json& name : required->as_array()) out.push_back(name.as_string());
  return out;
}

// As many members of names that nobody declared as are needed beside the required ones. Their names are different
// because each begins, or ends, with letters or digits of its own.
void SchemaRules::add_distinct(const Json& schema, Members& members, int64_t missing, const std::string& place) {
  constexpr int64_t kLetters = 26, kDigits = 10;
  if (missing > kLetters) refuse(place + "/minProperties", "at most 26 members of any name are supported");
  const std::vector<std::string> declared = named_in(schema);
  check_names(declared, place);
  const auto settled = [&](Result<Language> made) {
    if (!made.ok()) refuse(place + "/minProperties", made.error().message);
    return *std::move(made);
  };
  const Language names = without(names_of(schema, place), declared, place + "/minProperties");
  const Json* closed = closing_keyword(schema);
  for (const auto& [those, value] : open_names(schema, names, closed == nullptr ? Json(true) : *closed, place)) {
    for (const auto& [symbols, last] :
         {std::pair{kLetters, false}, {kLetters, true}, {kDigits, false}, {kDigits, true}}) {
      std::vector<std::string> keys;
      for (int64_t i = 0; i < missing && i == std::ssize(keys); ++i) {
        check_time(place);
        const auto from = static_cast<char>(symbols * i / missing),
                   to = static_cast<char>(symbols * (i + 1) / missing - 1);
        if (to < from) break;
        const std::string own =
            symbols == kDigits ? fmt::format("{}-{}", static_cast<char>('0' + from), static_cast<char>('0' + to))
                               : fmt::format("{}-{}{}-{}", static_cast<char>('A' + from), static_cast<char>('A' + to),
                                             static_cast<char>('a' + from), static_cast<char>('a' + to));
        const std::string pattern = fmt::format("{}[{}]{}", last ? "" : "^", own, last ? "$" : "");
        std::string key = quoted(settled(those.intersected(settled(Language::of_pattern(pattern, Reading::kNarrow)))));
        if (!key.empty()) keys.push_back(std::move(key));
      }
      const std::string rule = std::ssize(keys) == missing ? rule_of(value, place + "/minProperties") : "";
      if (rule.empty()) continue;
      for (const std::string& key : keys)
        members.declared.push_back({"", fmt::format("{} \":\" \" \"? {}", key, rule), true});
      return;
    }
  }
  refuse(place + "/minProperties", "supported where names may begin or end with any letter or digit");
}

// Names that patternProperties tell apart, and what the values of each obey: those that one pattern alone matches, and
// those that none does, to which `closed` speaks. All of `names` where there are no patterns.
std::vector<std::pair<Language, Json>> SchemaRules::open_names(const Json& schema, const Language& names,
                                                               const Json& closed, const std::string& place) {
  const Json* patterns = schema.find("patternProperties");
  const Json::Object none;
  const Json::Object& all = patterns != nullptr && patterns->is_object() ? patterns->as_object() : none;
  std::vector<std::pair<Language, Json>> out;
  const auto settled = [&](Result<Language> made) {
    if (!made.ok()) refuse(place + "/patternProperties", made.error().message);
    return *std::move(made);
  };
  for (size_t i = 0; i <= all.size(); ++i) {
    Language those = names;
    for (size_t j = 0; j < all.size(); ++j) {
      check_time(place);
      const Language one = settled(Language::of_pattern(all[j].first, i == j ? Reading::kNarrow : Reading::kWide));
      those = settled(those.intersected(i == j ? one : one.complement()));
    }
    if (!those.is_empty()) out.emplace_back(std::move(those), i < all.size() ? all[i].second : closed);
  }
  return out;
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
  std::unordered_set<std::string> known;
  for (const auto& [name, value] : declared) known.insert(name);
  const Json* closed = closing_keyword(schema);
  const size_t num_properties = declared.size();
  for (const std::string& name : needed)
    if (known.insert(name).second) declared.emplace_back(name, true);
  const std::unordered_set<std::string> must_be(needed.begin(), needed.end());
  const std::vector<std::string> absent = absent_of(schema);
  const Json* patterns = schema.find("patternProperties");
  const Json* names = schema.find("propertyNames");
  // Each name meets each pattern.
  constexpr size_t kMostPatterns = 6, kMostMembers = 2000;
  if (patterns != nullptr && patterns->as_object().size() > kMostPatterns)
    refuse(place + "/patternProperties", "at most 6 patterns are supported");
  if (declared.size() > kMostMembers) refuse(place + "/properties", "more than 2,000 properties");
  for (size_t i = 0; i < declared.size(); ++i) {
    check_time(place);
    auto& [name, value] = declared[i];
    bool is_other = i >= num_properties;  // what neither properties nor patternProperties speaks of
    const std::string where = fmt::format("{}/properties/{}", place, name);
    if (patterns != nullptr) {
      for (const auto& [pattern, says] : patterns->as_object()) {
        const Obeys matches = obeys(Json(name), Json(Json::Object{{"pattern", pattern}}));
        if (matches == Obeys::kUnknown)
          refuse(fmt::format("{}/patternProperties/{}", place, pattern),
                 fmt::format("whether {} matches it is unclear", name));
        if (matches != Obeys::kYes) continue;
        value = Json(Json::Object{{"allOf", Json(Json::Array{value, says})}});
        is_other = false;
      }
    }
    if (is_other && closed != nullptr) value = *closed;
    const bool must = must_be.contains(name);
    std::string rule;
    if (std::find(absent.begin(), absent.end(), name) != absent.end()) value = false;
    if (names != nullptr && obeys(Json(name), *names) != Obeys::kYes) {
      if (must && obeys(Json(name), *names) == Obeys::kUnknown)
        refuse(place + "/propertyNames", "not supported for declared names");
    } else {
      rule = rule_of(value, where);
    }
    if (rule.empty() && must) {
      members.declared.assign(1, {"", "", true});
      return members;
    }
    if (!rule.empty()) members.declared.push_back({dump_json(Json(name)) + ":", "\" \"? " + rule, must});
  }
  members.other = other_members(schema, members, place);
  return members;
}

// One or more members, from declared[at] on, when `before` are there (counted only where their number matters); ""
// where there can be none.
std::string SchemaRules::members_from(Members& members, size_t at, int64_t before) {
  if (const auto known = members.known.find({at, before}); known != members.known.end()) return known->second;
  std::string made;
  if (members.most < 0 || before < members.most)
    made = at == members.declared.size() ? others_after(members, before) : declared_from(members, at, before);
  return members.known[{at, before}] = std::move(made);
}

std::string SchemaRules::others_after(const Members& members, int64_t before) {
  const int64_t least = std::max<int64_t>(0, members.least - before - 1), most = members.most - before - 1;
  if (members.other.empty() || (members.most >= 0 && least > most)) return "";
  if (members.most >= 0 && most == 0) return members.other;
  const std::string next = add("\",\" \" \"? " + members.other);
  const std::string upto = members.most < 0 ? "" : std::to_string(most);
  return add(fmt::format("{} {}{{{},{}}}", members.other, next, least, upto));
}

std::string SchemaRules::declared_from(Members& members, size_t at, int64_t before) {
  const size_t end = members.block_end(at);
  std::vector<std::pair<std::string, std::string>> ways;  // by what their keys begin with
  for (size_t i = at; i < end && !members.any_required(at, i); ++i) {
    const Members::Member& member = members.declared[i];
    const int64_t then = members.counted() ? before + 1 : 0;
    const std::string rest = rest_of(members_from(members, i + 1, then), members.may_end(i + 1, then));
    if (rest.empty()) continue;
    const size_t told_apart = members.is_grouped(i) ? members.told_apart(i) : 0;
    const std::string key = told_apart < member.key.size() ? ebnf_literal(member.key.substr(told_apart)) + " " : "";
    ways.emplace_back(member.key.substr(0, told_apart), add(fmt::format("{}{} {}", key, member.rule, rest)));
  }
  std::sort(ways.begin(), ways.end());
  return choice({ways.empty() ? "" : one_of(ways, 0, ways.size(), 0),
                 members.any_required(at, end) ? "" : members_from(members, end, before)});
}

// One of some texts and what comes after it, from the byte at `depth` on, before which they are alike.
std::string SchemaRules::one_of(const std::vector<std::pair<std::string, std::string>>& sorted, size_t first,
                                size_t last, size_t depth) {
  const std::string &text = sorted[first].first, &other = sorted[last - 1].first;
  const auto literal = [&](size_t end) {
    return end > depth ? ebnf_literal(text.substr(depth, end - depth)) + " " : std::string();
  };
  if (last - first == 1) return literal(text.size()) + sorted[first].second;
  size_t shared = depth;
  while (shared < text.size() &&
         text.compare(shared, utf8_at(text, shared).length, other, shared, utf8_at(text, shared).length) == 0)
    shared += utf8_at(text, shared).length;
  std::vector<std::string> ways;
  for (size_t i = first, end = first; i < last; i = end) {
    const size_t length = shared < sorted[i].first.size() ? utf8_at(sorted[i].first, shared).length : 0;
    const std::string begins = sorted[i].first.substr(0, shared + length);
    while (end < last && (length == 0 ? end == i : sorted[end].first.starts_with(begins))) ++end;
    ways.push_back(one_of(sorted, i, end, shared));
  }
  return literal(shared) + choice(ways);
}

std::string SchemaRules::object(const Json& schema, const std::string& place) {
  Members members = members_of(schema, place);
  for (const Members::Member& member : members.declared)
    if (member.rule.empty()) return "";
  int64_t needed = 0;
  for (const Members::Member& member : members.declared) needed += member.required ? 1 : 0;
  // Others may repeat a name, which then counts once.
  if (!members.other.empty() && members.least > std::max<int64_t>(1, needed)) {
    if (members.least > static_cast<int64_t>(members.declared.size())) {
      add_distinct(schema, members, members.least - needed, place);
      needed = members.least;
    } else {
      members.other.clear();
    }
  }
  if (members.least <= needed) members.least = 0;
  if (members.counted() && members.declared.size() > 64)
    refuse(place + "/maxProperties", "supported for up to 64 properties");
  // From the last, so that calls do not go as deep as there are members.
  for (size_t at = members.declared.size(); !members.counted() && at-- > 0;) members_from(members, at, 0);
  const std::string inside = choice({members.may_end(0, 0) ? "\"\"" : "", members_from(members, 0, 0)});
  return inside.empty() ? "" : "\"{\" " + inside + " \"}\"";
}

}  // namespace perigee

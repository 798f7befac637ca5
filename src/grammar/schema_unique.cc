// Arrays with uniqueItems. A grammar has no memory, so items are told apart by what they are made of: the values of a
// short list, or classes of which each item takes one that no other item has.
#include <fmt/core.h>

#include <algorithm>
#include <span>

#include "grammar/schema_keywords.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_negate.h"
#include "grammar/schema_rules.h"

namespace perigee {
namespace {

constexpr int kClasses = 8;
constexpr size_t kMostNames = 8;       // that are tried as what tells objects apart
constexpr int kClassesOfPatterns = 4;  // each costs as much as the pattern to compile

Json made_of(Json::Object members) {
  return Json(std::move(members));
}

// Letters and digits by their number modulo `classes`; the last class has all other characters and the empty text.
std::string letters_of(int number, int classes) {
  std::string out;
  for (const auto& [first, count] : {std::pair{'a', 26}, {'A', 26}, {'0', 10}})
    for (int i = number; i < count; i += classes) out += static_cast<char>(first + i);
  return out;
}

// What comes before and after the character that tells texts apart: the first, the first of a host, or the last.
constexpr std::pair<const char*, const char*> kPlaces[] = {{"^", ""}, {"^https?:\\/\\/", ""}, {"", "$"}};

Json text_class(int number, int classes, const std::pair<const char*, const char*>& around) {
  std::string others;
  for (int i = 0; i + 1 < classes; ++i) others += letters_of(i, classes);
  std::string pattern =
      number + 1 < classes ? fmt::format("[{}]", letters_of(number, classes)) : fmt::format("[^{}]", others);
  pattern = around.first + pattern + around.second;
  if (number + 1 == classes) pattern += "|^$";
  return made_of({{"type", "string"}, {kClass, Json(pattern)}});
}

Json number_class(int number, const char* type) {
  std::string digits;
  for (int i = number; i < 10; i += kClasses) digits += static_cast<char>('0' + i);
  return made_of({{"type", Json(type)}, {kLastDigits, Json(digits)}});
}

}  // namespace

// One or more distinct items of a longer enumeration, in its order.
std::string SchemaRules::unique_in_order(const std::vector<std::string>& values, int64_t least, int64_t most,
                                         const std::string& place) {
  const int64_t size = static_cast<int64_t>(values.size());
  if (least > (most < 0 ? size : std::min(most, size))) return "";
  // Items are counted up to where their number matters.
  const bool bounded = most >= 0 && most < size;
  const int64_t counted = bounded ? most : std::max<int64_t>(least, 1);
  constexpr int64_t kMostPlaces = 64 * 65;
  if (size * (counted + 1) > kMostPlaces)
    refuse(place, fmt::format("{} values beside minItems and maxItems of {}: use fewer, or no bounds", size, counted));
  // later[n]: items from values[i + 1] on, at least one, when n are there; now[n]: from values[i] on.
  std::vector<std::string> later(counted + 1), now(counted + 1);
  for (int64_t i = size; i-- > 0;) {
    for (int64_t n = 0; n <= counted; ++n) {
      const int64_t after = bounded ? n + 1 : std::min(n + 1, counted);
      const std::string rest = after <= counted ? rest_of(later[after], after >= least) : "";
      now[n] = choice({later[n], rest.empty() ? "" : values[i] + " " + rest});
    }
    std::swap(now, later);
  }
  return later[0];
}

// One or more items in any order, each of another one of the rules.
std::string SchemaRules::unique_in_any_order(const std::vector<std::string>& rules, int64_t least, int64_t most) {
  const size_t sets = size_t{1} << rules.size();
  std::vector<std::string> more(sets), rest(sets);  // by the set of rules that were taken
  for (size_t set = sets; set-- > 0;) {
    const int64_t taken = __builtin_popcountll(set);
    if (most >= 0 && taken > most) continue;
    std::vector<std::string> ways;
    for (size_t i = 0; i < rules.size(); ++i) {
      const size_t next = set | size_t{1} << i;
      if (next != set && !rest[next].empty()) ways.push_back(rules[i] + " " + rest[next]);
    }
    more[set] = choice(ways);
    rest[set] = rest_of(more[set], taken >= least);
  }
  return more[0];
}

// The rule of a schema; "" also where it is refused.
std::string SchemaRules::rule_if_any(const Json& schema, const std::string& place) {
  const size_t first = rules_.size();
  const int depth = depth_;
  try {
    return rule_of(schema, place);
  } catch (const SchemaRefusal&) {
    check_time(place);
    // What was begun stays as rules without a text, and is not known by its schema.
    depth_ = depth;
    for (size_t i = first; i < rules_.size(); ++i)
      if (rules_[i].empty()) rules_[i] = fmt::format("r{}", i);
    const auto is_begun = [&](const std::string& rule) {
      return !rule.empty() && rules_[std::stoul(rule.substr(1))] == rule;
    };
    std::erase_if(by_schema_, [&](const auto& known) { return is_begun(known.second); });
    return "";
  }
}

// Rules of classes of items such that values of two of them are never equal; of `listed`, as many as there are, if it
// is not empty: the first one of the first class and so on.
std::vector<std::string> SchemaRules::classes_of(const Json& items, const Json::Array& listed,
                                                 const std::string& place) {
  const Json flat = flattened(listed.empty() ? items : listed[0], place, 0);
  const bool plain = flat.is_bool() || (flat.find("pattern") == nullptr && flat.find("format") == nullptr &&
                                        flat.find("properties") == nullptr && flat.find("prefixItems") == nullptr);
  const int classes = plain ? kClasses : kClassesOfPatterns;
  std::vector<std::string> best;
  const auto consider = [&](int count, const auto& class_of) {
    if (best.size() >= (listed.empty() ? static_cast<size_t>(kClassesOfPatterns) : listed.size())) return;
    std::vector<std::string> rules;
    for (int i = 0; i < count && (listed.empty() || i < std::ssize(listed)); ++i) {
      const Json both = both_of(listed.empty() ? items : listed[static_cast<size_t>(i)], class_of(i));
      if (std::string rule = rule_if_any(both, place); !rule.empty()) rules.push_back(std::move(rule));
    }
    if (rules.size() > best.size()) best = std::move(rules);
  };
  const auto of_scalar = [&](const auto& around) {
    for (const auto& at : kPlaces) consider(classes, [&](int i) { return around(text_class(i, classes, at)); });
    for (const char* type : {"number", "integer"})
      consider(kClasses, [&](int i) { return around(number_class(i, type)); });
  };
  of_scalar([](Json value) { return value; });
  if (!best.empty() || !flat.is_object()) return best;
  // Objects by a member, which each then has, and arrays by their first item.
  std::vector<std::string> names;
  const Json *required = flat.find("required"), *properties = flat.find("properties");
  if (required != nullptr && required->is_array())
    for (const Json& name : required->as_array())
      if (name.is_string()) names.push_back(name.as_string());
  if (properties != nullptr && properties->is_object())
    for (const auto& [name, value] : properties->as_object()) names.push_back(name);
  for (const std::string& name : std::span(names).first(std::min(names.size(), kMostNames)))
    of_scalar([&](Json value) {
      return made_of({{"type", "object"},
                      {"required", Json(Json::Array{Json(name)})},
                      {"properties", made_of({{name, std::move(value)}})}});
    });
  of_scalar([](Json value) {
    return made_of({{"type", "array"}, {"minItems", 1}, {"prefixItems", Json(Json::Array{std::move(value)})}});
  });
  // By how much is in them.
  consider(kClasses, [](int i) {
    return made_of({{"type", "object"}, {"minProperties", Json(i)}, {"maxProperties", Json(i)}});
  });
  consider(kClasses, [](int i) { return made_of({{"type", "array"}, {"minItems", Json(i)}, {"maxItems", Json(i)}}); });
  return best;
}

// Whether all items are those of prefixItems, and no two of these can be equal.
bool SchemaRules::listed_apart(const Json& schema, int64_t most, const std::string& place) {
  const Json *prefix = schema.find("prefixItems"), *items = schema.find("items");
  if (prefix == nullptr || !prefix->is_array()) return false;
  const auto size = static_cast<int64_t>(prefix->as_array().size());
  if ((items == nullptr || !(*items == Json(false))) && (most < 0 || most > size)) return false;
  std::vector<Json> flat;
  for (const Json& each : prefix->as_array()) {
    flat.push_back(flattened(each, place + "/prefixItems", 0));
    for (size_t i = 0; i + 1 < flat.size(); ++i) {
      charge(flat[i], flat.back());
      if (!surely_disjoint(flat[i], flat.back())) return false;
    }
  }
  return true;
}

std::string SchemaRules::unique_array(const Json& schema, const Json& items, int64_t least, int64_t most,
                                      const std::string& place) {
  const Json *prefix = schema.find("prefixItems"), *contains = schema.find("contains");
  if ((prefix != nullptr && contains != nullptr) || schema.find(kContained) != nullptr)
    refuse(place + "/uniqueItems", "not supported beside several contains, or contains and prefixItems");
  std::vector<std::string> first;  // rules of the items that come one by one
  Json others = items;
  bool open = most < 0 || prefix == nullptr || most > std::ssize(prefix->as_array());
  if (prefix != nullptr) {
    open = open && !(others == Json(false));
    first = listed_apart_from(prefix->as_array(), open ? &others : nullptr, place);
    if (first.empty())
      refuse(place + "/uniqueItems",
             "supported beside prefixItems where no two items can be equal, or all are listed and alike");
  } else if (contains != nullptr) {
    const int64_t low = count(schema, "minContains", 1, place), high = count(schema, "maxContains", -1, place);
    const std::vector<Json> left = complement_of(*contains, place + "/contains");
    const Json lacking = both_of(items, any_of(left));
    if (left.empty() || rule_of(lacking, place + "/contains").empty()) {
      others = both_of(items, *contains);  // all are, since no other item surely is not
      least = std::max(least, low);
      if (high >= 0) most = most < 0 ? high : std::min(most, high);
    } else if (low > 1) {
      refuse(place + "/minContains", "more than 1 is not supported beside uniqueItems");
    } else if (low > 0) {
      first.push_back(high == 0 ? "" : rule_of(both_of(items, *contains), place + "/contains"));
      if (first[0].empty()) return "";
      least = std::max<int64_t>(least, 1);
      others = lacking;
    } else if (high >= 0) {
      others = lacking;
    }
    if (most >= 0 && least > most) return "";
  }
  const auto listed = std::ssize(first);
  std::string more = open && (most < 0 || most > listed)
                         ? unique_items(others, std::max<int64_t>(0, least - listed), most < 0 ? most : most - listed,
                                        listed > 0, place)
                         : "";
  for (int64_t i = listed; i-- > 0;) {
    const std::string rest = rest_of(most >= 0 && i + 1 >= most ? "" : more, i + 1 >= least);
    more = rest.empty() ? "" : add(first[static_cast<size_t>(i)] + " " + rest);
  }
  const std::string inside = choice({least <= 0 ? "\"\"" : "", more});
  return inside.empty() ? "" : "\"[\" " + inside + " \"]\"";
}

// One or more items of a schema, no two of them equal. `may_be_none`: where it is not known how, there are none.
std::string SchemaRules::unique_items(const Json& items, int64_t least, int64_t most, bool may_be_none,
                                      const std::string& place) {
  std::vector<std::string> rules;
  if (const std::optional<std::vector<Json>> listed = listed_values(items, place + "/items")) {
    for (const Json& value : *listed) rules.push_back(ebnf_literal(dump_json(value)));
    if (rules.size() > static_cast<size_t>(kClasses)) return unique_in_order(rules, least, most, place + "/items");
    return unique_in_any_order(rules, least, most);
  }
  rules = classes_of(items, {}, place + "/items");
  if (rules.empty() && !(may_be_none && least <= 0))
    refuse(place + "/uniqueItems",
           "supported for items that are strings, numbers or of at most 1,024 values (of a range 64), "
           "and for objects and arrays of these");
  if (least > static_cast<int64_t>(rules.size()))
    refuse(place + "/minItems",
           fmt::format("at most {} beside uniqueItems, unless the items are an enum", rules.size()));
  return unique_in_any_order(rules, least, most);
}

// The rules of listed items of which no two can be equal, nor any of them and one of `others`, if there are any; none
// where that cannot be had.
std::vector<std::string> SchemaRules::listed_apart_from(const Json::Array& listed, const Json* others,
                                                        const std::string& place) {
  std::vector<Json> flat;
  for (const Json& each : listed) flat.push_back(flattened(each, place + "/prefixItems", 0));
  if (others != nullptr) flat.push_back(flattened(*others, place + "/items", 0));
  bool apart = true;
  for (size_t i = 0; i < flat.size(); ++i)
    for (size_t j = 0; j < i && apart; ++j) {
      charge(flat[i], flat[j]);
      apart = surely_disjoint(flat[i], flat[j]);
    }
  std::vector<std::string> rules;
  if (!apart) {
    if (others == nullptr) rules = classes_of(true, listed, place + "/prefixItems");
    return rules.size() == listed.size() ? rules : std::vector<std::string>();
  }
  for (size_t i = 0; i < listed.size(); ++i) {
    rules.push_back(rule_of(listed[i], fmt::format("{}/prefixItems/{}", place, i)));
    if (rules.back().empty()) return {};
  }
  return rules;
}

}  // namespace perigee

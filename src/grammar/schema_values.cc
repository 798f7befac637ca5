#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "grammar/number_language.h"
#include "grammar/number_pattern.h"
#include "grammar/pattern.h"
#include "grammar/schema_keywords.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_negate.h"
#include "grammar/schema_obeys.h"
#include "grammar/schema_rules.h"

namespace perigee {

int64_t SchemaRules::count(const Json& schema, const char* key, int64_t otherwise, const std::string& place) const {
  const Json* value = schema.find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_number() || value->as_double() < 0 || value->as_double() != std::floor(value->as_double()))
    refuse(place + "/" + key, "expected a whole number of 0 or more");
  constexpr double kMost = 1e15;
  return static_cast<int64_t>(std::min(value->as_double(), kMost));
}

namespace {

const char* bound_named(const NumberRange& range) {
  if (range.least) return range.above_least ? "exclusiveMinimum" : "minimum";
  return range.below_most ? "exclusiveMaximum" : "maximum";
}

}  // namespace

std::string SchemaRules::number(const Json& schema, bool integer, const std::string& place) {
  NumberRange range;
  range.integer = integer;
  const auto bound = [&](const char* key) -> const Json* {
    const Json* value = schema.find(key);
    if (value != nullptr && !value->is_number()) refuse(place + "/" + key, "expected a number");
    return value;
  };
  const Json *least = bound("minimum"), *above = bound("exclusiveMinimum");
  const Json *most = bound("maximum"), *below = bound("exclusiveMaximum");
  range.above_least = above != nullptr && (least == nullptr || above->as_double() >= least->as_double());
  if (range.above_least) least = above;
  range.below_most = below != nullptr && (most == nullptr || below->as_double() <= most->as_double());
  if (range.below_most) most = below;
  if (least != nullptr) range.least = dump_json(*least);
  if (most != nullptr) range.most = dump_json(*most);
  const Json* step = schema.find("multipleOf");
  const bool any_step = step == nullptr || (*step == Json(1) && integer);
  const Json::Array except = except_of(schema);
  const bool excepts = std::any_of(except.begin(), except.end(), [](const Json& each) { return each.is_number(); });
  const char* const of_language[] = {kFraction, kNotMultiples, kLastDigits};
  if (!any_step || excepts || std::any_of(std::begin(of_language), std::end(of_language), [&](const char* key) {
        return schema.find(key) != nullptr;
      })) {
    return add_language(other_numbers(schema, range, place));
  }
  auto pattern = number_pattern(range);
  if (!pattern.ok()) refuse(place + "/" + bound_named(range), pattern.error().message);
  return pattern->empty() ? "" : add_regex(*pattern);
}

// Numbers that are multiples of some, no multiples of others, or none of a list.
Language SchemaRules::other_numbers(const Json& schema, const NumberRange& range, const std::string& place) const {
  const auto settled = [&](Result<Language> made, const char* key) {
    if (!made.ok()) refuse(place + "/" + key, made.error().message);
    return *std::move(made);
  };
  // With bounds there are no exponents, and with large ones no digits after the point.
  std::string regex = "-?(0|[1-9][0-9]{0,8})(\\.[0-9]{1,9})?";
  if (range.least || range.most) {
    auto pattern = number_pattern(range);
    if (!pattern.ok()) refuse(place + "/" + bound_named(range), pattern.error().message);
    if (pattern->empty()) return {};
    regex = *pattern;
  } else if (range.integer) {
    regex = "-?(0|[1-9][0-9]{0,14})";
  }
  Language out = settled(Language::of_pattern("^(" + regex + ")$", Reading::kNarrow), "minimum");
  const auto also = [&](const Language& other, const char* key) {
    check_time(place);
    out = settled(out.intersected(other), key);
  };
  const auto matching = [&](const std::string& regex) {
    return settled(Language::of_pattern("^(" + regex + ")$", Reading::kNarrow), "not");
  };
  if (const Json* step = schema.find("multipleOf")) {
    Result<Language> multiples = multiples_of(dump_json(*step), !range.integer);
    if (!multiples.ok() && range.least && range.most)
      multiples = multiples_between(dump_json(*step), std::stod(*range.least), std::stod(*range.most));
    also(settled(std::move(multiples), "multipleOf"), "multipleOf");
  }
  if (schema.find(kFraction) != nullptr) also(matching("-?[0-9]+\\.[0-9]*[1-9]"), "not");
  if (const Json* steps = schema.find(kNotMultiples); steps != nullptr && steps->is_array()) {
    also(matching("-?[0-9]+"), "not");
    for (const Json& step : steps->as_array()) {
      if (!step.is_int()) refuse(place + "/not", "a multipleOf in it that is not whole is not supported");
      also(settled(multiples_of(dump_json(step), false), "not").complement(), "not");
    }
  }
  const Json* last = schema.find(kLastDigits);
  if (last != nullptr && last->is_string()) {  // and no 0 at the end of a fraction: a value has one text
    std::string of_fraction;
    for (const char digit : last->as_string())
      if (digit != '0') of_fraction += digit;
    also(matching(fmt::format("-?[0-9]*[{}]", last->as_string()) +
                  (of_fraction.empty() ? "" : fmt::format("|-?[0-9]+\\.[0-9]*[{}]", of_fraction))),
         "uniqueItems");
  }
  const Json::Array except = except_of(schema);
  const bool excepts = std::any_of(except.begin(), except.end(), [](const Json& each) { return each.is_number(); });
  // More digits than a double has would be read as a number without a fraction, or as one of the list.
  if (schema.find(kFraction) != nullptr || excepts || last != nullptr)
    also(matching("-?([0-9]{1,15}|[0-9]{1,6}\\.[0-9]{1,9}|[0-9]{1,12}\\.[0-9]{1,3})"), "not");
  for (const Json& value : except) {
    if (!value.is_number()) continue;
    if (dump_json(value).find('e') != std::string::npos)
      refuse(place + "/not", "a number with an exponent in it is not supported");
    also(matching(spellings_of_number(dump_json(value))).complement(), "not");
  }
  return out;
}

// The values that obey a schema, where they are few; none: they are not known, or many.
std::optional<std::vector<Json>> SchemaRules::listed_values(const Json& schema, const std::string& place) {
  constexpr size_t kMostValues = 1024, kMostOfRange = 64;
  const Json flat = flattened(schema, place, 0);
  if (!flat.is_object()) return flat == Json(false) ? std::optional(std::vector<Json>()) : std::nullopt;
  Json::Array candidates;
  const auto add = [&](const Json& value) {
    if (std::none_of(candidates.begin(), candidates.end(), [&](const Json& each) { return equal(each, value); }))
      candidates.push_back(value);
  };
  const Json *fixed = flat.find("const"), *listed = flat.find("enum"), *any = flat.find("anyOf");
  if (fixed != nullptr) {
    add(*fixed);
  } else if (listed != nullptr && listed->is_array() && listed->as_array().size() <= kMostValues) {
    for (const Json& value : listed->as_array()) add(value);
  } else if (any != nullptr && any->is_array()) {
    for (const Json& branch : any->as_array()) {
      const auto values = listed_values(branch, place);
      if (!values) return std::nullopt;
      for (const Json& value : *values) add(value);
    }
  } else {
    for (const std::string& type : schema_types(flat)) {
      if (type == "null") add(nullptr);
      if (type == "boolean") add(false), add(true);
      if (type == "null" || type == "boolean") continue;
      const Json *least = flat.find("minimum"), *most = flat.find("maximum");
      if (type != "integer" || least == nullptr || most == nullptr || !least->is_int() || !most->is_int())
        return std::nullopt;
      if (least->as_int() > most->as_int()) continue;
      const uint64_t span = static_cast<uint64_t>(most->as_int()) - static_cast<uint64_t>(least->as_int());
      if (span >= kMostOfRange) return std::nullopt;
      for (uint64_t i = 0; i <= span; ++i) add(Json(least->as_int() + static_cast<int64_t>(i)));
    }
  }
  std::vector<Json> out;
  for (const Json& value : candidates) {
    check_time(place);
    const Obeys is = obeys(value, flat);
    if (is == Obeys::kUnknown) return std::nullopt;
    if (is == Obeys::kYes) out.push_back(value);
  }
  return out.size() > kMostValues ? std::nullopt : std::optional(std::move(out));
}

// Items that `contains` asks for come right after those that prefixItems lists.
struct SchemaRules::Items {
  std::vector<std::string> first;  // rules of the items that come one by one
  std::string more;                // the rule of all after them; "" for none
  int64_t least = 0, most = -1;
};

// What one `contains` asks for. `several`: others ask, too.
void SchemaRules::add_contained(const Json& asks, const Json& schema, bool open, bool several, Items& out,
                                const std::string& place) {
  const Json& contains = *asks.find("contains");
  const int64_t low = count(asks, "minContains", 1, place), high = count(asks, "maxContains", -1, place);
  if (low == 0 && high < 0) return;
  constexpr int64_t kMostContained = 1000;
  if (low > kMostContained) refuse(place + "/minContains", "at most 1,000 is supported");
  const Json* prefix = schema.find("prefixItems");
  if (high >= 0 && !out.first.empty()) refuse(place + "/maxContains", "not supported beside prefixItems");
  if (high >= 0 && several) refuse(place + "/maxContains", "not supported beside another contains");
  if (high >= 0 && low > high) {
    out.least = 1;
    out.most = 0;
    return;
  }
  // What obeys `contains` is evaluated, so unevaluatedItems is not asked.
  const Json* items = schema.find("items");
  const Json beside = items == nullptr ? Json(true) : *items;
  const std::string wanted = open && low > 0 ? rule_of(both_of(beside, contains), place + "/contains") : "";
  if (wanted.empty() && low > 0) {
    if (several && !out.first.empty())
      refuse(place + "/contains", "several are not supported where only items of prefixItems can be counted");
    if (low > 1 && !out.first.empty())
      refuse(place + "/minContains", "more than 1 is not supported where only items of prefixItems can be counted");
    for (size_t i = 0; i < out.first.size(); ++i) {  // the first of the listed ones that can
      const std::string rule = rule_of(both_of(prefix->as_array()[i], contains), place + "/contains");
      if (rule.empty()) continue;
      out.first[i] = rule;
      out.least = std::max(out.least, static_cast<int64_t>(i) + 1);
      return;
    }
    out.least = 1;
    out.most = 0;
    return;
  }
  out.first.insert(out.first.end(), static_cast<size_t>(low), wanted);
  out.least = std::max(out.least, static_cast<int64_t>(out.first.size()));
  if (high < 0) return;
  const std::vector<Json> left = complement_of(contains, place + "/contains");
  const Json* others = items == nullptr ? schema.find("unevaluatedItems") : items;
  const Json more = others == nullptr ? Json(true) : *others;
  out.more = left.empty() ? "" : rule_of(both_of(more, any_of(left)), place + "/maxContains");
}

std::string SchemaRules::array(const Json& schema, const std::string& place) {
  constexpr int64_t kMostItems = 10'000;
  Items out;
  out.least = count(schema, "minItems", 0, place);
  out.most = count(schema, "maxItems", -1, place);
  if (out.least > kMostItems) refuse(place + "/minItems", "at most 10,000 is supported");
  out.most = std::min(out.most, kMostItems);
  const Json* items = schema.find("items");
  if (items == nullptr) items = schema.find("unevaluatedItems");
  const Json* prefix = schema.find("prefixItems");
  if (prefix != nullptr && !prefix->is_array()) refuse(place + "/prefixItems", "expected an array of schemas");
  const Json* unique = schema.find("uniqueItems");
  if (unique != nullptr && *unique != Json(false) && out.most != 0 && out.most != 1 &&
      !listed_apart(schema, out.most, place))
    return unique_array(schema, items == nullptr ? Json(true) : *items, out.least, out.most, place);
  for (size_t i = 0; prefix != nullptr && i < prefix->as_array().size(); ++i) {
    if (out.most >= 0 && static_cast<int64_t>(i) >= out.most) break;
    const std::string rule = rule_of(prefix->as_array()[i], fmt::format("{}/prefixItems/{}", place, i));
    if (rule.empty()) {
      out.most = static_cast<int64_t>(i);
      break;
    }
    out.first.push_back(rule);
  }
  const int64_t listed = static_cast<int64_t>(out.first.size());
  // Items after the listed ones only where they are spoken of, or needed.
  const Json* contained = schema.find(kContained);
  const bool contains = schema.find("contains") != nullptr || contained != nullptr;
  const bool open =
      (prefix == nullptr || items != nullptr || contains || out.least > listed) && (out.most < 0 || out.most > listed);
  if (open) out.more = items == nullptr ? any_value() : rule_of(*items, place + "/items");
  if (schema.find("contains") != nullptr) add_contained(schema, schema, open, contained != nullptr, out, place);
  if (contained != nullptr && !contained->is_array()) refuse(place + "/" + kContained, "expected an array");
  for (const Json& asks : contained != nullptr ? contained->as_array() : Json::Array()) {
    if (asks.find("contains") == nullptr) refuse(place + "/" + kContained, "expected schemas with contains");
    add_contained(asks, schema, open, true, out, place);
  }
  return spell_items(out);
}

std::string SchemaRules::spell_items(const Items& items) {
  const int64_t given = static_cast<int64_t>(items.first.size());
  const std::string& item = items.more;
  int64_t most = items.most;
  const int64_t least = items.least;
  if (item.empty()) most = most < 0 ? given : std::min(most, given);
  if (most >= 0 && least > most) return "";
  const auto more = [&](int64_t before) {  // items after `before`, all of them `item`
    if (item.empty()) return std::string();
    const std::string pair = add("\",\" \" \"? " + item);
    const int64_t low = std::max<int64_t>(0, least - before);
    if (most < 0) return fmt::format(" {}{{{},}}", pair, low);
    return most > before ? fmt::format(" {}{{{},{}}}", pair, low, most - before) : std::string();
  };
  if (given == 0) {
    if (most == 0) return "\"[]\"";
    const std::string some = item + more(1);
    return least > 0 ? "\"[\" " + some + " \"]\"" : "\"[\" (" + some + ")? \"]\"";
  }
  std::string inside = more(given);
  for (int64_t i = given; i-- > 0;) {
    const std::string part = (i > 0 ? "\",\" \" \"? " : "") + items.first[i] + inside;
    inside = i >= least ? " (" + part + ")?" : " " + part;
  }
  return "\"[\"" + inside + " \"]\"";
}

}  // namespace perigee

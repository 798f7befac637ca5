#include <fmt/core.h>

#include <algorithm>

#include "grammar/number_pattern.h"
#include "grammar/pattern.h"
#include "grammar/schema_merge.h"
#include "grammar/schema_rules.h"

namespace perigee {
namespace {

// The inside of a JSON string of any text: each part is one code point. Escaped surrogates are left out, since two of
// them would be one.
constexpr const char* kCharacter =
    R"(([\u0020-\u0021\u0023-\u005b\u005d-\u007f]|[\u0080-\u07ff]|[\u0800-\ud7ff\ue000-\uffff]|[\u{10000}-\u{10ffff}]|\u005c(["\u005c/bfnrt]|u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))))";

// Formats as regular expressions over texts of ASCII; a part of what the format allows.
const std::pair<const char*, const char*> kFormats[] = {
    {"date", R"([0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))"},
    {"time", R"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))"},
    {"date-time",
     R"([0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))"},
    {"duration", R"(P([1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}H)?|T[1-9][0-9]{0,3}[HMS]|[1-9][0-9]{0,3}W))"},
    {"email",
     R"([A-Za-z0-9_]{1,20}([.+-][A-Za-z0-9_]{1,20}){0,3}@[a-z0-9]{1,20}(-[a-z0-9]{1,20})?(\.[a-z]{2,12}){1,3})"},
    {"hostname", R"([a-z0-9]{1,20}(-[a-z0-9]{1,20}){0,2}(\.[a-z0-9]{1,20}){0,4})"},
    {"ipv4", R"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3})"},
    {"ipv6", R"([0-9a-f]{1,4}(:[0-9a-f]{1,4}){7})"},
    {"uuid", R"([0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})"},
    {"uri", R"(https?:\/\/[a-z0-9]{1,20}(-[a-z0-9]{1,20})?(\.[a-z]{2,12}){1,3}(\/[A-Za-z0-9_.~-]{0,64}){0,8})"},
};

}  // namespace

int64_t SchemaRules::count(const Json& schema, const char* key, int64_t otherwise, const std::string& place) const {
  const Json* value = schema.find(key);
  if (value == nullptr) return otherwise;
  const bool whole =
      value->is_int() || (value->is_double() && value->as_double() == static_cast<int64_t>(value->as_double()));
  if (!whole || value->as_double() < 0) refuse(place + "/" + key, "expected a whole number of 0 or more");
  return value->is_int() ? value->as_int() : static_cast<int64_t>(value->as_double());
}

std::string SchemaRules::string_pattern(const Json& schema, const std::string& place) {
  const Json *pattern = schema.find("pattern"), *format = schema.find("format");
  const int64_t least = count(schema, "minLength", 0, place), most = count(schema, "maxLength", -1, place);
  if (least > 20'000) refuse(place + "/minLength", "at most 20,000 is supported");
  const int32_t longest = most < 0 || most > 20'000 ? Pattern::kNoEnd : static_cast<int32_t>(most);
  if (longest < least) return "";
  std::string text;
  Pattern::Whole whole = Pattern::Whole::kSearched;
  const char* key = "pattern";
  if (pattern != nullptr) {
    if (!pattern->is_string()) refuse(place + "/pattern", "expected a string");
    text = pattern->as_string();
  }
  if (format != nullptr) {
    const auto known = std::find_if(std::begin(kFormats), std::end(kFormats),
                                    [&](const auto& each) { return *format == Json(each.first); });
    if (known == std::end(kFormats))
      refuse(place + "/format",
             "supported are date, time, date-time, duration, email, hostname, ipv4, ipv6, uuid, uri");
    if (pattern != nullptr) refuse(place + "/format", "not supported beside pattern");
    text = known->second;
    whole = Pattern::Whole::kYes;
    key = "format";
  }
  if (pattern == nullptr && format == nullptr) {
    return spell_repeat(kCharacter, least, longest);
  }
  auto parsed = Pattern::parse(text, whole);
  if (!parsed.ok()) refuse(place + "/" + key, parsed.error().message);
  if (!parsed->restrict_length(static_cast<int32_t>(least), longest))
    refuse(place + (schema.find("minLength") != nullptr ? "/minLength" : "/maxLength"),
           fmt::format("it cannot be followed beside this {}", key));
  const std::string spelt = parsed->spelt_in_json();
  return spelt.empty() ? "()" : spelt;  // "" says that there is none
}

std::string SchemaRules::string(const Json& schema, const std::string& place) {
  const int64_t most = count(schema, "maxLength", -1, place), least = count(schema, "minLength", 0, place);
  if (most >= 1 && most >= least && schema.find("pattern") == nullptr && schema.find("format") == nullptr) {
    // Characters are counted, not spelt out: each would have a table of tokens of its own.
    Json unbounded(Json::Object{{"minLength", Json(least)}});
    const int64_t bound = std::min<int64_t>(most, 1 << 24);
    return add("\"\\\"\" " +
               add(fmt::format("[max_tokens={}]Regex({})", bound, ebnf_literal(string_pattern(unbounded, place)))) +
               " \"\\\"\"");
  }
  const std::string inside = string_pattern(schema, place);
  return inside.empty() ? "" : add_regex("\\u0022(" + inside + ")\\u0022");
}

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
  if (const Json* step = schema.find("multipleOf"); step != nullptr && !(*step == Json(1) && integer)) {
    const bool unbounded = !range.least && !range.most;
    const int64_t by = step->is_int() ? step->as_int() : 0;
    const std::string digits = "(()|-)(()|[1-9]" + spell_repeat("[0-9]", 0, 14) + ")";
    if (unbounded && by == 2) return add_regex(digits + "[02468]");
    if (unbounded && by == 5) return add_regex(digits + "[05]");
    for (int64_t power = 1, zeros = 0; unbounded && power <= 1'000'000; power *= 10, ++zeros)
      if (by == power)
        return add_regex("(()|-)(0|[1-9]" + spell_repeat("[0-9]", 0, 14) + std::string(zeros, '0') + ")");
    refuse(place + "/multipleOf", "supported are 1, 2, 5 and powers of ten, without bounds beside them");
  }
  auto pattern = number_pattern(range);
  if (!pattern.ok()) refuse(place, pattern.error().message);
  return add_regex(*pattern);
}

// Distinct items of a small enumeration, in its order.
std::string SchemaRules::unique_array(const Json& schema, const Json& items, int64_t least, int64_t most,
                                      const std::string& place) {
  const Json flat = flattened(items, place + "/items", 0);
  const Json* listed = flat.find("enum");
  const bool known = listed != nullptr && listed->is_array() && listed->as_array().size() <= 64;
  if (!known || schema.find("prefixItems") != nullptr)
    refuse(place + "/uniqueItems", "supported for items with an enum of up to 64 values, and for at most one item");
  std::vector<Json> values;
  for (const Json& value : listed->as_array()) {
    if (!constants(flat, {value}, place + "/items/enum").empty() &&
        std::find(values.begin(), values.end(), value) == values.end())
      values.push_back(value);
  }
  const int64_t size = static_cast<int64_t>(values.size());
  if (most < 0 || most > size) most = size;
  if (least > most) return "";
  // rules[n]: what may follow value i when n items are there.
  std::vector<std::string> next(most + 2), now(most + 2);
  for (int64_t n = 0; n <= most; ++n) next[n] = n >= least ? "\"\"" : "";
  for (int64_t i = size; i-- > 0;) {
    for (int64_t n = 0; n <= most; ++n) {
      std::string body = next[n];
      if (n < most && !next[n + 1].empty()) {
        body +=
            (body.empty() ? "" : " | ") + ebnf_literal((n > 0 ? "," : "") + dump_json(values[i])) + " " + next[n + 1];
      }
      now[n] = body.empty() ? "" : add(body);
    }
    std::swap(now, next);
  }
  return next[0].empty() ? "" : "\"[\" " + next[0] + " \"]\"";
}

std::string SchemaRules::array(const Json& schema, const std::string& place) {
  int64_t least = count(schema, "minItems", 0, place), most = count(schema, "maxItems", -1, place);
  if (least > 10'000) refuse(place + "/minItems", "at most 10,000 is supported");
  if (most > 10'000) most = -1;
  const Json* items = schema.find("items");
  if (items == nullptr) items = schema.find("unevaluatedItems");
  const Json* prefix = schema.find("prefixItems");
  if (prefix != nullptr && !prefix->is_array()) refuse(place + "/prefixItems", "expected an array of schemas");
  if (items != nullptr && items->is_array()) refuse(place + "/items", "expected a schema: use prefixItems for a list");
  const Json* unique = schema.find("uniqueItems");
  if (unique != nullptr && *unique == Json(true) && most != 0 && most != 1)
    return unique_array(schema, items == nullptr ? Json(true) : *items, least, most, place);
  std::vector<std::string> first;
  for (size_t i = 0; prefix != nullptr && i < prefix->as_array().size(); ++i) {
    if (most >= 0 && static_cast<int64_t>(i) >= most) break;
    const std::string rule = rule_of(prefix->as_array()[i], fmt::format("{}/prefixItems/{}", place, i));
    if (rule.empty()) {
      most = static_cast<int64_t>(i);
      break;
    }
    first.push_back(rule);
  }
  const int64_t given = static_cast<int64_t>(first.size());
  std::string item;
  if (most < 0 || most > given) {
    // Items after the listed ones only where they are spoken of, or needed.
    const bool open = prefix == nullptr || items != nullptr || least > given;
    if (open) item = items == nullptr ? any_value() : rule_of(*items, place + "/items");
  }
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
    const std::string part = (i > 0 ? "\",\" \" \"? " : "") + first[i] + inside;
    inside = i >= least ? " (" + part + ")?" : " " + part;
  }
  return "\"[\"" + inside + " \"]\"";
}

}  // namespace perigee

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>

#include "grammar/language.h"
#include "grammar/pattern.h"
#include "grammar/schema_keywords.h"
#include "grammar/schema_rules.h"

namespace perigee {
namespace {

// The inside of a JSON string of any text: each part is one code point. Escaped surrogates are left out, since two of
// them would be one.
constexpr const char* kCharacter =
    R"(([\u0020-\u0021\u0023-\u005b\u005d-\u007f]|[\u0080-\u07ff]|[\u0800-\ud7ff\ue000-\uffff]|[\u{10000}-\u{10ffff}]|\u005c(["\u005c/bfnrt]|u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))))";

// Formats as regular expressions over texts of ASCII; a part of what the format allows, and none of what common readers
// refuse: Python's dates have no year 0, and its jsonschema no relative pointer with a digit after a 0. Any other
// format is an annotation.
const std::map<std::string, std::string>& formats() {
  static const auto made = [] {
    const std::string date = R"([1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))";
    const std::string time =
        R"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))";
    const std::string email =
        R"([A-Za-z0-9_]{1,20}([.+-][A-Za-z0-9_]{1,20}){0,2}@[a-z0-9]{1,20}(-[a-z0-9]{1,20})?(\.[a-z]{2,12}){1,3})";
    const std::string hostname = R"([a-z0-9]{1,20}(-[a-z0-9]{1,20}){0,2}(\.[a-z0-9]{1,20}){0,4})";
    const std::string byte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    const std::string path = R"((\/[A-Za-z0-9_.~-]*)*)";
    const std::string uri = R"(https?:\/\/[a-z0-9]{1,20}(-[a-z0-9]{1,20})?(\.[a-z]{2,12}){1,3})" + path;
    const std::string reference = R"([A-Za-z0-9_.~-]*)" + path;
    const std::string pointer = R"((\/[A-Za-z0-9_.-]*)*)";
    return std::map<std::string, std::string>{
        {"date", date},
        {"time", time},
        {"date-time", date + "T" + time},
        {"duration", R"(P([1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}H)?|T[1-9][0-9]{0,3}[HMS]|[1-9][0-9]{0,3}W))"},
        {"email", email},
        {"idn-email", email},
        {"hostname", hostname},
        {"idn-hostname", hostname},
        {"ipv4", byte + R"((\.)" + byte + "){3}"},
        {"ipv6", "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}"},
        {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"},
        {"uri", uri},
        {"iri", uri},
        {"uri-template", uri},
        {"uri-reference", reference},
        {"iri-reference", reference},
        {"json-pointer", pointer},
        {"relative-json-pointer", "(0|[1-9]{1,3})(#|" + pointer + ")"},
        {"regex", "[A-Za-z0-9_ -]*"},
        {"byte", R"(([A-Za-z0-9+\/]{4})*)"},
    };
  }();
  return made;
}

const std::string* regex_of_format(const Json* format) {
  if (format == nullptr || !format->is_string()) return nullptr;
  const auto known = formats().find(format->as_string());
  return known == formats().end() ? nullptr : &known->second;
}

constexpr int64_t kMostCharacters = 20'000;
// A larger maxLength beside a pattern is taken as this: each length is a state of its own.
constexpr int64_t kMostBesidePattern = 128;

// A set as alternatives of EBNF inside a JSON string, each of one character.
std::vector<std::string> ebnf_of_set(const CodePoints& set) {
  std::vector<std::string> out;
  const auto spell = [](uint32_t c) { return c <= 0xFFFF ? fmt::format("\\u{:04x}", c) : fmt::format("\\U{:08x}", c); };
  for (const auto& [c, letter] : std::initializer_list<std::pair<uint32_t, char>>{
           {'"', '"'}, {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'}, {'\n', 'n'}, {'\r', 'r'}, {'\t', 't'}})
    if (contains(set, c)) out.push_back(ebnf_literal(std::string("\\") + letter));
  for (uint32_t c = 0; c < 0x20; ++c)
    if (contains(set, c) && std::string_view("\b\f\n\r\t").find(static_cast<char>(c)) == std::string_view::npos)
      out.push_back(ebnf_literal(fmt::format("\\u{:04x}", c)));
  // One class for each number of UTF-8 bytes, and without what JSON escapes and surrogates.
  for (const auto& parts : std::initializer_list<CodePoints>{{{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0x7F}},
                                                             {{0x80, 0x7FF}},
                                                             {{0x800, 0xD7FF}, {0xE000, 0xFFFF}},
                                                             {{0x10000, kLastCodePoint}}}) {
    std::string ranges;
    for (const auto& [first, last] : parts)
      for (const auto& [low, high] : within(set, first, last)) ranges += spell(low) + "-" + spell(high);
    if (!ranges.empty()) out.push_back("[" + ranges + "]");
  }
  return out;
}

int64_t wide_states(const Language& language) {
  int64_t count = 0;
  for (const Language::State& state : language.states())
    count += std::any_of(state.edges.begin(), state.edges.end(), [](const auto& e) { return e.high - e.low > 0x400; })
                 ? 1
                 : 0;
  return count;
}

}  // namespace

// What a schema's keywords say of the characters of a string, as one automaton.
Language SchemaRules::language_of(const Json& schema, const std::string& place) const {
  const auto settled = [&](Result<Language> made, const char* key) {
    if (!made.ok()) refuse(place + "/" + key, made.error().message);
    return *std::move(made);
  };
  const auto texts = [&](const char* key) {
    std::vector<std::string> out;
    const Json* listed = schema.find(key);
    if (listed == nullptr) return out;
    const Json::Array all = listed->is_array() ? listed->as_array() : Json::Array{*listed};
    for (const Json& each : all) {
      if (!each.is_string() && key != std::string_view(kExcept)) refuse(place + "/pattern", "expected a string");
      if (each.is_string()) out.push_back(each.as_string());
    }
    return out;
  };
  Language out = Language::all();
  const auto also = [&](const Language& other, const char* key) {
    check_time(place);
    out = settled(out.intersected(other), key);
  };
  for (const char* key : {"pattern", kPatterns})
    for (const std::string& each : texts(key))
      also(settled(Language::of_pattern(each, Reading::kNarrow), "pattern"), "pattern");
  for (const std::string& each : texts(kNotPatterns))
    also(settled(Language::of_pattern(each, Reading::kWide), "not").complement(), "not");
  if (const std::vector<std::string> except = texts(kExcept); !except.empty())
    also(Language::of_texts(except).complement(), "not");
  if (const std::string* regex = regex_of_format(schema.find("format"))) {
    const Language format = settled(Language::of_pattern(fmt::format("^({})$", *regex), Reading::kNarrow), "format");
    // An annotation: where a pattern contradicts it, the pattern holds.
    if (Result<Language> both = out.intersected(format); both.ok() && !both->is_empty()) out = *std::move(both);
  }
  for (const std::string& each : texts(kClass))
    also(settled(Language::of_pattern(each, Reading::kNarrow), "uniqueItems"), "uniqueItems");
  const int64_t least = count(schema, "minLength", 0, place), most = count(schema, "maxLength", -1, place);
  if (least == 0 && most < 0) return out;
  if (most < 0) return settled(out.intersected(Language::of_lengths(least, -1)), "minLength");
  // The largest bound that makes an automaton of a size that can be compiled.
  constexpr int64_t kMostWide = 40;
  for (int64_t bound = std::min(most, std::max(least, kMostBesidePattern));; bound = std::max(least, bound / 2)) {
    Result<Language> both = out.intersected(Language::of_lengths(least, bound));
    const bool is_last = bound <= std::max<int64_t>(least, 8);
    if (both.ok() && ((is_last || (wide_states(*both) <= kMostWide && both->states().size() <= Language::kMostStates))))
      if (is_last || !both->is_empty() || bound == most) return *std::move(both);
    if (is_last) return settled(std::move(both), "maxLength");
  }
}

// The rule of its texts inside a JSON string; "" for none.
std::string SchemaRules::add_language(const Language& language) {
  if (language.is_empty()) return "";
  std::string key = "language";
  for (const Language::State& state : language.states()) {
    key += state.accepts ? ";!" : ";";
    for (const Language::Edge& edge : state.edges) key += fmt::format(" {}-{}>{}", edge.low, edge.high, edge.to);
  }
  if (const auto known = by_body_.find(key); known != by_body_.end()) return known->second;
  const size_t first = rules_.size();
  if (first + language.states().size() >= limits_.rules)
    refuse("", "as a grammar the schema is too large: make it smaller or less nested");
  rules_.resize(first + language.states().size());
  for (size_t i = 0; i < language.states().size(); ++i) {
    const Language::State& state = language.states()[i];
    std::map<int32_t, CodePoints> targets;
    for (const Language::Edge& edge : state.edges) targets[edge.to].emplace_back(edge.low, edge.high);
    std::string body = state.accepts ? "\"\"" : "";
    for (const auto& [to, set] : targets)
      for (const std::string& each : ebnf_of_set(set))
        body += fmt::format("{}{} r{}", body.empty() ? "" : " | ", each, first + static_cast<size_t>(to));
    num_bytes_ += body.size() + 16;
    if (num_bytes_ > limits_.grammar_bytes)
      refuse("", "as a grammar the schema is too large: make it smaller or less nested");
    rules_[first + i] = body.empty() ? fmt::format("r{}", first + i) : body;
  }
  std::string name = fmt::format("r{}", first);
  by_body_.emplace(std::move(key), name);
  return name;
}

// Characters are counted, not spelt out: each would have a table of tokens of its own.
std::string SchemaRules::counted_string(const std::string& character, int64_t least, int64_t most) {
  const std::string inside = ebnf_literal(spell_repeat(character, least));
  return add("\"\\\"\" " + add(fmt::format("[max_tokens={}]Regex({})", std::min<int64_t>(most, 1 << 24), inside)) +
             " \"\\\"\"");
}

std::string SchemaRules::string(const Json& schema, const std::string& place) {
  const int64_t least = count(schema, "minLength", 0, place), most = count(schema, "maxLength", -1, place);
  if (least > kMostCharacters) refuse(place + "/minLength", "at most 20,000 is supported");
  if (most >= 0 && most < least) return "";
  if (most == 0) return language_of(schema, place).matches("") ? "\"\\\"\\\"\"" : "";
  const Json::Array except = except_of(schema);
  const bool excepts = std::any_of(except.begin(), except.end(), [](const Json& each) { return each.is_string(); });
  const bool only_one = schema.find(kClass) == nullptr && schema.find(kPatterns) == nullptr &&
                        schema.find(kNotPatterns) == nullptr && !excepts;
  const Json* pattern = schema.find("pattern");
  const std::string* format = regex_of_format(schema.find("format"));
  if (only_one && pattern == nullptr && format == nullptr) {
    if (most >= 1) return counted_string(kCharacter, least, most);
    return add_regex("\\u0022(" + spell_repeat(kCharacter, least) + ")\\u0022");
  }
  if (pattern != nullptr && !pattern->is_string()) refuse(place + "/pattern", "expected a string");
  if (only_one && (pattern == nullptr || format == nullptr)) {
    const auto whole = pattern == nullptr ? Pattern::Whole::kYes : Pattern::Whole::kSearched;
    const std::string& text = pattern == nullptr ? *format : pattern->as_string();
    if (const auto one = Pattern::repeated_set(text, whole)) {
      const int64_t low = std::max<int64_t>(least, one->least);
      int64_t high = one->most == Pattern::kNoEnd ? most : one->most;
      if (most >= 0) high = std::min(high, most);
      if (high >= 0 && low > high) return "";
      if (high > kMostBesidePattern) return counted_string(spell_set(one->set, true), low, high);
    }
    const int64_t longest = most < 0 ? Pattern::kNoEnd : std::min(most, kMostCharacters);
    auto parsed = Pattern::parse(text, whole);
    if (parsed.ok() && parsed->restrict_length(static_cast<int32_t>(least), static_cast<int32_t>(longest))) {
      const std::string spelt = parsed->spelt_in_json();
      return add_regex("\\u0022(" + (spelt.empty() ? "()" : spelt) + ")\\u0022");
    }
  }
  const std::string inside = add_language(language_of(schema, place));
  return inside.empty() ? "" : add("\"\\\"\" " + inside + " \"\\\"\"");
}

}  // namespace perigee

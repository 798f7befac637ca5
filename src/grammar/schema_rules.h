// Only schema_grammar.cc and schema_rules*.cc: the rules that a schema becomes.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "grammar/language.h"
#include "grammar/number_pattern.h"
#include "grammar/schema_grammar.h"
#include "grammar/schema_names.h"

namespace perigee {

// Thrown and caught inside schema_grammar() only: the recursion is as deep as the schema, and any place may refuse.
struct SchemaRefusal {
  Error error;
};

class SchemaRules {
 public:
  SchemaRules(const Json& root, const SchemaLimits& limits);

  // The name of the rule of a schema's instances; "" where no value obeys it.
  std::string rule_of(const Json& schema, const std::string& place);
  std::string any_value();
  std::string any_object();

  std::string finish(const std::string& root);  // the grammar

  // The schemas, as texts, of which no text ever ends: recursion without a way out.
  std::unordered_set<std::string> endless() const;
  void leave_out(std::unordered_set<std::string> endless) { left_out_ = std::move(endless); }  // they have no rule

 private:
  [[noreturn]] void refuse(const std::string& place, std::string_view why) const;

  void check_time(const std::string& place) const;  // refuses where automata have taken too long already

  std::string add(const std::string& body);           // a rule, or the one that has this body
  std::string add_regex(const std::string& pattern);  // the same of a regular expression
  static std::string any_rule(const std::vector<std::string>& rules);
  std::string choice(const std::vector<std::string>& rules);
  // What follows an item or a member: a comma and `more`, or the end. "" where neither can be. Spelt so, and not with
  // the comma in each way to go on, a place after a value is in one text and not in each of many.
  std::string rest_of(const std::string& more, bool may_end);

  // Counts what it takes to put two schemas together or to compare them; refuses what would take too long.
  void charge(const Json& a, const Json& b);

  // schema_rules.cc: what becomes of a schema before its types.
  Json flattened(const Json& schema, const std::string& place, int depth);
  Json merged(Json out, const Json& other, const std::string& place, int depth, bool several);
  Json without_conditions(const Json& schema, const std::string& place, int depth);
  std::vector<Json> complement_of(const Json& schema, const std::string& place, const Json& beside = true) const;
  bool must_not_say(const std::vector<Json>& parts, const Json& beside) const;
  Json closed_for_itself(Json schema, const std::string& place) const;
  const Json& target(const std::string& ref, const std::string& place) const;
  std::string body_of(const Json& schema, const std::string& place);
  std::string branches(const Json& schema, const char* key, const std::string& place);
  void make_exclusive(std::vector<Json>& branches, const std::vector<Json>& whole, const std::string& place);
  std::string dependents(const Json& schema, const std::string& place);
  std::string constants(const Json& schema, const Json::Array& values, const std::string& place);
  std::string one_of(const std::vector<std::string>& texts, size_t first, size_t last, size_t depth);
  static Json::Array except_of(const Json& schema);
  Json without_exceptions(const Json& schema, const std::string& type, const std::string& place) const;
  std::string of_type(const std::string& type, const Json& schema, const std::string& place);
  void check_keywords(const Json& schema, const std::string& place) const;

  // schema_strings.cc
  std::string string(const Json& schema, const std::string& place);
  std::string counted_string(const std::string& character, int64_t least, int64_t most);
  Language language_of(const Json& schema, const std::string& place) const;
  std::string add_language(const Language& language);

  // schema_values.cc: of one type.
  std::string number(const Json& schema, bool integer, const std::string& place);
  Language other_numbers(const Json& schema, const NumberRange& range, const std::string& place) const;
  struct Items;
  std::string array(const Json& schema, const std::string& place);
  void add_contained(const Json& asks, const Json& schema, bool open, bool several, Items& out,
                     const std::string& place);
  std::string spell_items(const Items& items);
  std::optional<std::vector<Json>> listed_values(const Json& schema, const std::string& place);
  int64_t count(const Json& schema, const char* key, int64_t otherwise, const std::string& place) const;

  // schema_unique.cc
  std::string unique_array(const Json& schema, const Json& items, int64_t least, int64_t most,
                           const std::string& place);
  bool listed_apart(const Json& schema, int64_t most, const std::string& place);
  std::string unique_in_order(const std::vector<std::string>& values, int64_t least, int64_t most,
                              const std::string& place);
  std::string rule_if_any(const Json& schema, const std::string& place);
  std::string unique_in_any_order(const std::vector<std::string>& rules, int64_t least, int64_t most);
  std::vector<std::string> classes_of(const Json& items, const Json::Array& listed, const std::string& place);
  std::string unique_items(const Json& items, int64_t least, int64_t most, bool may_be_none, const std::string& place);
  std::vector<std::string> listed_apart_from(const Json::Array& listed, const Json* others, const std::string& place);

  // schema_objects.cc
  struct Members;
  std::string object(const Json& schema, const std::string& place);
  Members members_of(const Json& schema, const std::string& place);
  std::string other_members(const Json& schema, const Members& members, const std::string& place);
  std::string pattern_members(const Json& schema, const std::vector<std::string>& declared, const std::string& place);
  std::vector<std::pair<Language, Json>> open_names(const Json& schema, const Language& names, const Json& closed,
                                                    const std::string& place);
  void add_distinct(const Json& schema, Members& members, int64_t missing, const std::string& place);
  Language names_of(const Json& schema, const std::string& place);
  Language without(Language names, const std::vector<std::string>& left_out, const std::string& place) const;
  void check_names(const std::vector<std::string>& declared, const std::string& place) const;
  std::string quoted(const Language& names);
  static std::vector<std::string> absent_of(const Json& schema);
  static std::vector<std::string> named_in(const Json& schema);
  std::string members_from(Members& members, size_t at, int64_t before);
  std::string declared_from(Members& members, size_t at, int64_t before);
  std::string one_of(const std::vector<std::pair<std::string, std::string>>& sorted, size_t first, size_t last,
                     size_t depth);
  std::string others_after(const Members& members, int64_t before);
  std::string other_key(const Json& schema, const std::vector<std::string>& declared, const std::string& place);

  const Json& root_;
  SchemaLimits limits_;
  const bool speaks_of_unevaluated_;
  const SchemaNames names_;
  std::unordered_map<std::string, std::string> by_schema_;  // the rule of a schema's text
  std::unordered_map<std::string, std::string> by_body_;
  std::unordered_set<std::string> left_out_;
  std::vector<std::string> rules_;
  size_t num_bytes_ = 0;
  size_t text_bytes_ = 0;  // of the keys of by_schema_
  int64_t work_ = 0;
  int64_t num_complements_ = 0;  // of `not` and `if`
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  int depth_ = 0;
};

}  // namespace perigee

#include "grammar/regex_grammar.h"

#include <fmt/core.h>

#include <map>

#include "grammar/language.h"
#include "grammar/pattern.h"
#include "grammar/schema_grammar.h"

namespace perigee {
namespace {

// A rule for each state.
std::string spelt(const Language& language) {
  std::string out = "root ::= s0\n";
  for (size_t i = 0; i < language.states().size(); ++i) {
    const Language::State& state = language.states()[i];
    std::map<int32_t, CodePoints> targets;
    for (const Language::Edge& edge : state.edges) targets[edge.to].emplace_back(edge.low, edge.high);
    std::string ways = state.accepts ? "\"\"" : "";
    for (const auto& [to, set] : targets)
      ways += fmt::format("{}Regex({}) s{}", ways.empty() ? "" : " | ", ebnf_literal(spell_set(set, false)), to);
    out += fmt::format("s{} ::= {}\n", i, ways);
  }
  return out;
}

}  // namespace

Result<std::string> regex_grammar(std::string_view regex) {
  const auto pattern = Pattern::parse(regex, Pattern::Whole::kYes);
  if (pattern.ok()) return "root ::= Regex(" + ebnf_literal(pattern->spelt()) + ")\n";
  if (!parse_pattern(regex, Reading::kNarrow).ok()) return pattern.error();
  const size_t flags = flags_length(regex);
  ASSIGN_OR_RETURN(
      const Language language,
      Language::of_pattern(fmt::format("{}^(?:{})$", regex.substr(0, flags), regex.substr(flags)), Reading::kNarrow));
  if (language.is_empty()) return Error(Code::kBadInput, "no text matches the whole expression");
  return spelt(language);
}

}  // namespace perigee

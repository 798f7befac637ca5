// GrammarSpec: what a client asked of a reply's form, as a value: the input of GrammarCompiler.
//
// All of it is untrusted. JSON comes out on one line, with at most a space after each comma and colon, as models write
// it, and the members of an object in the order of `properties`.
#pragma once

#include <string>
#include <vector>

namespace perigee {

struct GrammarSpec {
  enum class Kind {
    kJsonObject,     // any JSON object
    kJsonSchema,     // `text`: a JSON schema, draft 2020-12 (schema_grammar.h says which keywords)
    kRegex,          // `text`: a regular expression that the whole reply matches
    kChoice,         // one of `choices`
    kEbnf,           // `text`: a grammar in xgrammar's EBNF (GBNF), its first rule `root`
    kStructuralTag,  // `text`: xgrammar's structural tags
    kToolCalls,      // `tools`, `calls`: Kimi's markers
  };
  enum class Calls {
    kAuto,        // free text; once a call begins, its name is declared and its arguments validate
    kAutoOne,     // the same, at most one call (parallel_tool_calls: false)
    kRequired,    // at least one call and nothing else
    kExactlyOne,  // tool_choice of a name, or required with parallel_tool_calls: false
  };
  struct Tool {
    std::string name;
    std::string parameters;  // a JSON schema; "" takes any object
    bool operator==(const Tool&) const = default;
  };

  Kind kind = Kind::kJsonObject;
  std::string text;
  std::vector<std::string> choices;
  std::vector<Tool> tools;
  Calls calls = Calls::kAuto;
  bool after_reasoning = false;  // the prompt leaves reasoning open: free until </think>, then the grammar

  bool operator==(const GrammarSpec&) const = default;
};

}  // namespace perigee

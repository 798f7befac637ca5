// The JSON schemas and regular expressions of a structural tag, as grammars of schema_grammar.h and pattern.h.
//
// xgrammar's own reading of schemas ignores keywords, and some of its regular expressions take other texts than they
// should. So each format of type `json_schema` or `regex` becomes one of type `grammar`.
#pragma once

#include <string>

#include "base/json.h"
#include "base/result.h"

namespace perigee {

// Errors: kBadInput, beginning with the place: what schema_grammar, Pattern and TextGrammar::check_ebnf refuse,
// and options that a grammar cannot have (`excludes`, `max_tokens`, `max_chars`; of a schema `style` other than "json",
// and `max_whitespace_cnt` 0).
Result<Json> with_own_grammars(const Json& tag);

}  // namespace perigee

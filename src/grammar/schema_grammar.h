// From a JSON schema (draft 2020-12) to a grammar of its instances, on one line and with members in the declared order.
//
// Every text of the grammar parses as JSON that the schema accepts; not every such text is in the grammar: an object
// whose schema has `properties` has no others unless it says additionalProperties, `$ref` and `allOf` are put together
// before anything else, and of `oneOf` and `dependentRequired` only what is sure is kept. A keyword that would make a
// text invalid and is not followed here is refused by its place: "/properties/a/uniqueItems: …". Keywords that no
// version of JSON Schema has are annotations, as the standard says.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace perigee {

struct SchemaLimits {
  size_t bytes = 256 << 10;
  size_t depth = 128;
  size_t rules = 8192;
  size_t grammar_bytes = 1 << 20;
};

// EBNF with the rule `root`. Errors: kBadInput, beginning with the place.
Result<std::string> schema_grammar(std::string_view schema, const SchemaLimits& limits = {});

// Whether schema_grammar takes it: the same work, without the grammar.
inline Status check_json_schema(std::string_view schema, const SchemaLimits& limits = {}) {
  auto made = schema_grammar(schema, limits);
  if (!made.ok()) return made.error();
  return {};
}

// The grammar of any JSON object.
std::string json_object_grammar();

// A string literal of EBNF.
std::string ebnf_literal(std::string_view text);

}  // namespace perigee

// JSON schemas as values: one schema that says what two say together, and whether a value obeys one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace perigee {

// A schema that accepts exactly what both accept (true and false are schemas too). Conflicts that no value can resolve
// give `false`. Errors: a keyword that the two have with values that cannot be put together, by name.
Result<Json> merge_schemas(const Json& a, const Json& b);

enum class Obeys { kYes, kNo, kUnknown };
// Whether a value obeys a schema without $ref; kUnknown where a keyword says something that is not looked at here.
Obeys obeys(const Json& value, const Json& schema);

// The types that a schema allows, of null, boolean, object, array, number, string, integer. Without `type` those that
// its keywords speak of; all of them when none does.
std::vector<std::string> schema_types(const Json& schema);

// Whether no value obeys both, as far as types, constants, and the required properties of objects tell.
bool surely_disjoint(const Json& a, const Json& b);

}  // namespace perigee

// One schema that says what two say together.
#pragma once

#include "base/json.h"
#include "base/result.h"

namespace perigee {

// A schema that accepts exactly what both accept (true and false are schemas too). Conflicts that no value can resolve
// give `false`. Errors: a keyword that the two have with values that cannot be put together, by name.
Result<Json> merge_schemas(const Json& a, const Json& b);

Json both_of(const Json& a, const Json& b);  // the two as allOf

// Whether no value obeys both, as far as types, constants, and the required properties of objects tell.
bool surely_disjoint(const Json& a, const Json& b);

}  // namespace perigee

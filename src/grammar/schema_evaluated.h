// What unevaluatedProperties and unevaluatedItems depend on: which properties and items other keywords evaluate.
#pragma once

#include "base/json.h"

namespace perigee {

// Whether unevaluatedProperties or unevaluatedItems means something else beside a schema.
bool evaluates(const Json& schema);

// Whether any place of a schema speaks of what other keywords left unevaluated.
bool speaks_of_unevaluated(const Json& in);

// Whether a part of a complement names properties or items that `beside` does not evaluate itself. A schema that a
// value does not obey evaluates nothing, and once the two are one schema nobody can tell.
bool evaluates_more(const Json& part, const Json& beside);

}  // namespace perigee

// What obeys no schema: complements, as far as schemas can say them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"

namespace perigee {

// The schema that a $ref names.
using ResolveRef = std::function<const Json&(const std::string&)>;

// Schemas whose values do not obey `schema`: each of them takes only such values, and together they take as many of
// those as can be said here. None: nothing can be said, or everything obeys it. `names`: members whose presence may
// tell that an object has others than a schema allows.
std::vector<Json> negated(const Json& schema, const ResolveRef& resolve, const std::vector<std::string>& names = {});

// A schema that takes what any of `schemas` takes; requires one.
Json any_of(std::vector<Json> schemas);

}  // namespace perigee

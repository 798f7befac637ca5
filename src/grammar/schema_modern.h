// Older spellings of JSON Schema.
#pragma once

#include "base/json.h"

namespace perigee {

// Whether the keywords at the top of a schema are those of draft 2020-12.
bool is_modern(const Json& schema);

// The same in the words of draft 2020-12: is_modern() of it is true. The schema is an object.
Json modern(const Json& schema);

}  // namespace perigee

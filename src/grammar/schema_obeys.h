// Whether a value obeys a JSON schema, and what else a schema's keywords say by themselves.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"

namespace perigee {

enum class Obeys { kYes, kNo, kUnknown };
// Whether a value obeys a schema without $ref; kUnknown where a keyword says something that is not looked at here.
Obeys obeys(const Json& value, const Json& schema);

// The types that a schema allows, of null, boolean, object, array, number, string, integer. Without `type` those that
// its keywords speak of; all of them when none does.
std::vector<std::string> schema_types(const Json& schema);

bool equal(const Json& a, const Json& b);                 // as JSON Schema has it: 1 is 1.0, and members have no order
std::vector<std::string> listed_types(const Json& type);  // the value of `type`: a name or an array of names
bool is_annotation(const std::string& key);               // a keyword that forbids nothing

double bound(const Json& value);  // the value of a keyword such as minLength; 0 for no number

}  // namespace perigee

// Keywords that schemas have here after they were put together, beside those of JSON Schema. A client may send them,
// too: they only ever forbid.
#pragma once

namespace perigee {

inline constexpr const char* kExcept = "$perigee:except";            // values that it is not: an array
inline constexpr const char* kFraction = "$perigee:fraction";        // true: no whole number
inline constexpr const char* kAbsent = "$perigee:absent";            // names that an object does not have
inline constexpr const char* kPatterns = "$perigee:patterns";        // that a string matches as well as `pattern`
inline constexpr const char* kNotPatterns = "$perigee:notPatterns";  // that it does not match
inline constexpr const char* kContained = "$perigee:contained";      // schemas, each with a `contains` that holds, too
inline constexpr const char* kNotMultiples = "$perigee:notMultiples";  // numbers that it is no multiple of

inline constexpr const char* kClass = "$perigee:class";            // a pattern that its `format` may not outdo
inline constexpr const char* kLastDigits = "$perigee:lastDigits";  // that a number may end with: a string

}  // namespace perigee

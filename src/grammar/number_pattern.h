// Regular expressions of the JSON numbers in a range.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace perigee {

struct NumberRange {
  // Decimal texts as JSON spells numbers; none: no bound.
  std::optional<std::string> least, most;
  bool above_least = false, below_most = false;  // the bound itself is not in it
  bool integer = false;
};

// In xgrammar's syntax. With a bound there are no exponents, and up to 9 digits after the point where bounds are below
// 10^6, up to 3 below 10^12, none below 10^15. Empty: no number is in the range. Errors: a
// bound that fits none of these, bounds without a number of so many digits between them.
Result<std::string> number_pattern(const NumberRange& range);

}  // namespace perigee

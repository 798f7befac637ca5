// Languages of JSON numbers.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "grammar/language.h"

namespace perigee {

// Texts of multiples of `step`, a positive number as JSON spells it, without exponents. Not all of them where the step
// is not whole: those that validators which divide in double precision take, too. `fractions`: also numbers with digits
// after the point. Errors: a step of too many digits.
Result<Language> multiples_of(const std::string& step, bool fractions);

// The same, of the whole multiples from `least` to `most`: few enough to be listed, of a step of any size.
Result<Language> multiples_between(const std::string& step, double least, double most);

// A regular expression of all texts of that number without an exponent.
std::string spellings_of_number(std::string number);

}  // namespace perigee

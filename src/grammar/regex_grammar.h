// A grammar of the texts that are wholly matched by a regular expression (`structured_outputs.regex` and structural
// tags).
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace perigee {

// As xgrammar's EBNF. Errors: what Pattern refuses; where it is refused for look-ahead, look-behind, \b or an anchor
// within, what Language refuses.
Result<std::string> regex_grammar(std::string_view regex);

}  // namespace perigee

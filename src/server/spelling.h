// Which known name a client probably meant: misspelt fields are refused instead of having no effect.
#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace perigee {

// The name in `known` that `given` most resembles, or nothing. Case, '_' and '-' make no difference; names of 4 letters
// may differ by one inserted, missing, wrong or swapped letter, those of 8 by two.
std::optional<std::string_view> nearest_name(std::string_view given, std::span<const std::string_view> known);

}  // namespace perigee

// The seeds that a simulation's flags ask for.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace perigee::sim {

struct Seeds {
  uint64_t first = 0, end = 0;
};

// "2000": seeds 0 ... 1999; "500..900": that range, without its end. Anything else, or no seed at all, is false.
inline bool parse_seeds(const std::string& text, Seeds& to) {
  const auto number = [](const std::string& digits, uint64_t& value) {
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return false;
    value = std::strtoull(digits.c_str(), nullptr, 10);
    return true;
  };
  const size_t dots = text.find("..");
  if (dots == std::string::npos) return number(text, to.end) && (to.first = 0, to.end > 0);
  return number(text.substr(0, dots), to.first) && number(text.substr(dots + 2), to.end) && to.end > to.first;
}

}  // namespace perigee::sim

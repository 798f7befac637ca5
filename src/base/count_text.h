// How messages and logs name a number of things.
#pragma once

#include <cstdint>
#include <string>

namespace perigee {

// "70,272": digits in threes.
inline std::string grouped(int64_t value) {
  std::string text = std::to_string(value);
  const auto first = static_cast<std::ptrdiff_t>(value < 0);
  for (auto at = std::ssize(text) - 3; at > first; at -= 3) text.insert(static_cast<size_t>(at), 1, ',');
  return text;
}

// "1 page", "70,272 pages".
inline std::string count_text(int64_t count, const char* noun) {
  return grouped(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace perigee

// How much time tests may take: more when PERIGEE_SOAK is set in the environment (make soak), less in a build whose
// every access is checked (the sanitizer presets define PERIGEE_SANITIZED).
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <vector>

namespace perigee {

#ifdef PERIGEE_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline bool soak_requested() {
  return std::getenv("PERIGEE_SOAK") != nullptr;
}

// All cases, or under sanitizers the first and the last.
template <typename T>
std::vector<T> ends_if_sanitized(std::initializer_list<T> all) {
  if (kSanitized && all.size() > 2) return {*all.begin(), *(all.end() - 1)};
  return all;
}

}  // namespace perigee

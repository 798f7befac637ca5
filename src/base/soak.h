// Whether tests should take their time: PERIGEE_SOAK is set in the environment (make soak).
#pragma once

#include <cstdlib>

namespace perigee {

inline bool soak_requested() {
  return std::getenv("PERIGEE_SOAK") != nullptr;
}

}  // namespace perigee

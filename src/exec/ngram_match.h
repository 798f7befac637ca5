// NgramMatch: what a rank is told of drafts by prompt lookup. Plain values.
#pragma once

#include <cstdint>

namespace perigee {

// How many of the last tokens must be there again, at least and at most.
struct NgramMatch {
  int32_t least = 5, most = 5;
};

}  // namespace perigee

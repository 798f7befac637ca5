// PlaceId: a page of any of the pools, as one number for the books' arrays: the pages of dcp index 0 come first. Plans
// name the same page by its Placement.
#pragma once

#include <array>
#include <cstdint>

#include "control/plan_ids.h"

namespace perigee {

using PlaceId = Id<struct PlaceTag>;

using CountAtIndex = std::array<int32_t, kMaxDcpSize>;  // of each dcp index

}  // namespace perigee

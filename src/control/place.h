// PlaceId: a page of any of the pools, as one number for the books' arrays: the pages of dcp index 0 come first. Plans
// name the same page by its Placement.
#pragma once

#include <array>
#include <cstdint>

#include "control/plan_ids.h"

namespace perigee {

using PlaceId = Id<struct PlaceTag>;

using CountAtIndex = std::array<int32_t, kMaxDcpSize>;  // of each dcp index

// How the blocks of a sequence are dealt to the dcp indices: where it has fewest (DESIGN D6), or in turn, so that where
// a block lies follows from its number alone (deterministic mode).
enum class Dealing { kFewest, kInTurn };

// Of a sequence's first num_blocks blocks, dealt in turn, those at the index.
constexpr int32_t num_dealt_in_turn(int32_t num_blocks, int32_t dcp_index, int32_t dcp_size) {
  return (num_blocks - dcp_index + dcp_size - 1) / dcp_size;
}

}  // namespace perigee

// What plans name: sequences, slots, pages and where they lie, positions as far as they are known. Plain values.
#pragma once

#include <compare>
#include <cstdint>

#include "base/ids.h"

namespace perigee {

inline constexpr int32_t kBlockTokens = 64;
inline constexpr int32_t kMaxPlansInFlight = 2;
inline constexpr int32_t kMaxDrafts = 7;  // of a verify row
inline constexpr int32_t kMaxDcpSize = 16;

using SequenceId = Id<struct SequenceTag, int64_t>;
using SlotId = Id<struct SlotTag>;
using PageId = Id<struct PageTag>;
using StepId = Id<struct StepTag, int64_t>;

// A page of the pool that the ranks with this dcp index have: each of them has its own pool, with equal page ids.
struct Placement {
  PageId page;
  int32_t dcp_index = 0;
  constexpr auto operator<=>(const Placement&) const = default;
};

// What is known of a position: at least `least`, at most `most`.
struct PositionRange {
  int32_t least = 0, most = 0;

  static constexpr PositionRange at(int32_t position) { return {position, position}; }
  constexpr bool contains(int32_t position) const { return least <= position && position <= most; }
  constexpr bool operator==(const PositionRange&) const = default;
};

}  // namespace perigee

// Strong ids: a dense integer that cannot be mistaken for another kind of integer.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>

namespace perigee {

template <typename Tag, typename Int = int32_t>
struct Id {
  Int value = -1;
  constexpr Id() = default;
  constexpr explicit Id(Int v) : value(v) {}
  constexpr bool valid() const { return value >= 0; }
  constexpr auto operator<=>(const Id&) const = default;
};

template <typename Tag, typename Int>
std::ostream& operator<<(std::ostream& out, Id<Tag, Int> id) {
  return out << id.value;
}

}  // namespace perigee

template <typename Tag, typename Int>
struct std::hash<perigee::Id<Tag, Int>> {
  size_t operator()(perigee::Id<Tag, Int> id) const { return std::hash<Int>()(id.value); }
};

// One term of unit_digest() (shared_area.h), for host and device code: of each index a permutation of all words, so
// that one word that differs always changes the sum.
#pragma once

#include <cstdint>

namespace perigee {

constexpr uint64_t digest_word(uint64_t word, uint64_t index) {
  uint64_t x = word + (index + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  return x ^ x >> 29;
}

}  // namespace perigee

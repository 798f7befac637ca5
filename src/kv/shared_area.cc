#include "kv/shared_area.h"

#include <cstring>

#include "kv/digest_word.h"

namespace perigee {

uint64_t unit_digest(std::span<const uint8_t> unit) {
  uint64_t sum = 0;
  for (size_t i = 0; i < unit.size() / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    std::memcpy(&word, unit.data() + i * sizeof(word), sizeof(word));
    sum += digest_word(word, i);
  }
  return sum;
}

}  // namespace perigee

// Asks for memory before it is read, so that several cache misses take the time of one.
#pragma once

#include <cstddef>

namespace perigee {

inline void prefetch(const void* begin, size_t bytes) {
  constexpr size_t kLine = 64;
  const auto* byte = static_cast<const char*>(begin);
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(byte + i);
}

}  // namespace perigee

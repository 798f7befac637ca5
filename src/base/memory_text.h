// How messages and logs name an amount of memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace perigee {

// "13.5 GiB", "0.6 MiB".
inline std::string memory_text(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / 0x1p20;
  char text[40];
  std::snprintf(text, sizeof(text), mib < 1024 ? "%.1f MiB" : "%.1f GiB", mib < 1024 ? mib : mib / 1024);
  return text;
}

}  // namespace perigee

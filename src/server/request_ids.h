// RequestIds: the names of requests, by which the logs of a router and of the servers behind it belong together.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <string>

#include "base/rng.h"
#include "server/http_types.h"

namespace perigee {

class RequestIds {
 public:
  // The request's X-Request-Id, when it is at most 128 letters, digits, '-', '_' and '.'; else one made here, which no
  // other request has. Thread-safe.
  std::string of(const HttpRequest& request) {
    const std::string* given = request.header("X-Request-Id");
    if (given != nullptr && !given->empty() && given->size() <= kMaxBytes &&
        std::all_of(given->begin(), given->end(), is_id_char))
      return *given;
    const uint64_t n = counter_++;
    return fmt::format("{:016x}{:016x}", random_u64(key_, 2 * n), random_u64(key_, 2 * n + 1));
  }
  uint64_t seed() { return random_u64(key_ ^ kSeeds, counter_++); }  // for a request that gives none

 private:
  static constexpr size_t kMaxBytes = 128;
  static constexpr uint64_t kSeeds = 0x5EED;

  static bool is_id_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  }
  static uint64_t random_key() {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32) | device();
  }

  const uint64_t key_ = random_key();
  std::atomic<uint64_t> counter_{0};
};

}  // namespace perigee

#include "server/request_ids.h"

#include <fmt/core.h>

#include <algorithm>
#include <random>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr size_t kMaxBytes = 128;
constexpr uint64_t kSeeds = 0x5EED;

uint64_t random_key() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

bool is_id_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
}

}  // namespace

RequestIds::RequestIds() : key_(random_key()) {}

std::string RequestIds::of(const HttpRequest& request) {
  const std::string* given = request.header("X-Request-Id");
  if (given != nullptr && !given->empty() && given->size() <= kMaxBytes &&
      std::all_of(given->begin(), given->end(), is_id_char))
    return *given;
  const uint64_t n = counter_++;
  return fmt::format("{:016x}{:016x}", random_u64(key_, 2 * n), random_u64(key_, 2 * n + 1));
}

uint64_t RequestIds::seed() {
  return random_u64(key_ ^ kSeeds, counter_++);
}

}  // namespace perigee

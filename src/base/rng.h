// Counter-based random numbers: value = f(key, counter), no state to keep, the same on every device.
//
// The mixing function is SplitMix64's (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
#pragma once

#include <cstdint>
#include <string_view>

namespace perigee {

constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The counter-th value of the stream `key`.
constexpr uint64_t random_u64(uint64_t key, uint64_t counter) {
  return mix64(key + (counter + 1) * 0x9E3779B97F4A7C15ull);
}

// Uniform in (0, 1), never an end point, so that its logarithm is finite. 23 bits, exact in float.
constexpr float random_unit(uint64_t key, uint64_t counter) {
  return (static_cast<float>(random_u64(key, counter) >> 41) + 0.5f) * (1.0f / 8388608.0f);
}

// 64-bit FNV-1a: turns a name into a stream key.
constexpr uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return hash;
}

// A sequential generator over one stream, for tests and the simulator.
class Rng {
 public:
  explicit Rng(uint64_t seed) : key_(mix64(seed)) {}
  uint64_t next() { return random_u64(key_, counter_++); }
  uint64_t below(uint64_t n) { return next() % n; }  // n > 0
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low + 1)));
  }
  float unit() { return random_unit(key_, counter_++); }
  bool chance(double probability) { return unit() < probability; }

 private:
  uint64_t key_;
  uint64_t counter_ = 0;
};

}  // namespace perigee

// Terms of reduce points as they travel between GPUs: f16 of a sixteenth of the number (ADR 0011). So they hold numbers
// up to 1,048,064 in 11 bits; larger ones become infinite, and show.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace perigee {

struct Term {
  uint16_t bits;
};
constexpr float kTermUnit = 16;

__host__ __device__ inline Term to_term(float x) {
  return {__half_as_ushort(__float2half_rn(x / kTermUnit))};
}
__host__ __device__ inline float from_term(uint16_t bits) {
  return kTermUnit * __half2float(__ushort_as_half(bits));
}
// Two of them, `low` in the low half.
__host__ __device__ inline uint32_t to_terms(float low, float high) {
  const __half2 pair = __floats2half2_rn(low / kTermUnit, high / kTermUnit);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace perigee

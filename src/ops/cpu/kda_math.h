// Functions of sixteen numbers for kda_loops.h and its parts; relative errors about 2e-7. Included only by files
// compiled for one instruction set (see vector16.h).
#pragma once

#include "ops/cpu/kda_kernels.h"
#include "ops/cpu/vector16.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLanes = 16;

// e^x, clamped to [2^-126, 2^127]; NaN stays NaN. x = n ln 2 + r, ln 2 in two parts (Cody, Waite 1980); the series of
// e^r on [-0.35, 0.35]. Adding kRound leaves n + 127, the exponent field of 2^n, in the lowest bits.
inline V16 exp16(V16 x) {
  constexpr float kRound = 12582912.0f + 127;
  x = max16(all16(-87.33f), x);
  x = min16(all16(88.02f), x);
  const V16 shifted = fma16(x, all16(1.44269504f), all16(kRound));
  const V16 n = sub16(shifted, all16(kRound));
  V16 r = fma16(n, all16(-0.693359375f), x);
  r = fma16(n, all16(2.12194440e-4f), r);
  V16 p = fma16(all16(1.0f / 720), r, all16(1.0f / 120));
  p = fma16(p, r, all16(1.0f / 24));
  p = fma16(p, r, all16(1.0f / 6));
  p = fma16(p, r, all16(0.5f));
  p = fma16(p, r, all16(1.0f));
  p = fma16(p, r, all16(1.0f));
  return mul16(p, shift_left16<23>(shifted));
}

inline V16 sigmoid16(V16 x) {
  return reciprocal16(add16(all16(1.0f), exp16(sub16(all16(0.0f), x))));
}

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) = 2 artanh(u / (2 + u)), whose argument is <= 1/3.
inline V16 softplus16(V16 x) {
  const V16 positive = max16(all16(0.0f), x);
  const V16 u = exp16(sub16(x, add16(positive, positive)));  // -|x|
  const V16 s = mul16(u, reciprocal16(add16(all16(2.0f), u)));
  const V16 s2 = mul16(s, s);
  V16 p = fma16(all16(1.0f / 13), s2, all16(1.0f / 11));
  p = fma16(p, s2, all16(1.0f / 9));
  p = fma16(p, s2, all16(1.0f / 7));
  p = fma16(p, s2, all16(1.0f / 5));
  p = fma16(p, s2, all16(1.0f / 3));
  p = fma16(p, s2, all16(1.0f));
  return fma16(add16(s, s), p, positive);
}

inline float dot(const float* a, const float* b) {
  V16 sum = mul16(load16(a), load16(b));
  for (int64_t i = kLanes; i < kKdaDim; i += kLanes) sum = fma16(load16(a + i), load16(b + i), sum);
  return sum16(sum);
}

}  // namespace
}  // namespace perigee::cpu

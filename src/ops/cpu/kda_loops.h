// Bodies of kda_kernels.h, included by kda_avx2.cc and kda_avx512.cc.
#pragma once

#include <cmath>

#include "ops/cpu/kda_chunk_loops.h"
#include "ops/cpu/kda_math.h"
#include "ops/cpu/kda_step_loops.h"

namespace perigee::cpu {
namespace {

void convolve(const KdaConvolution& c) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    V16 weight[kKdaTaps], window[kKdaTaps];
    for (int64_t j = 0; j < kKdaTaps; ++j) weight[j] = load16(c.weights + j * c.stride + i);
    for (int64_t j = 0; j + 1 < kKdaTaps; ++j) window[j] = load16(c.rows[j] + i);
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      window[kKdaTaps - 1] = load16(c.rows[t + kKdaTaps - 1] + i);
      V16 sum = mul16(weight[0], window[0]);
      for (int64_t j = 1; j < kKdaTaps; ++j) sum = fma16(weight[j], window[j], sum);
      for (int64_t j = 0; j + 1 < kKdaTaps; ++j) window[j] = window[j + 1];
      store16(c.out + t * kKdaDim + i, mul16(sum, sigmoid16(sum)));
    }
  }
}

void normalise(float* rows, int64_t num_rows, float gain) {
  for (float* x = rows; x < rows + num_rows * kKdaDim; x += kKdaDim) {
    const V16 scale = all16(gain / std::sqrt(dot(x, x) + 1e-6f));
    for (int64_t i = 0; i < kKdaDim; i += kLanes) store16(x + i, mul16(load16(x + i), scale));
  }
}

void log_decay(const float* a, const float* bias, float rate, float* g) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    store16(g + i, mul16(all16(-rate), softplus16(add16(load16(a + i), load16(bias + i)))));
  }
}

void exponential(const float* x, float* y) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) store16(y + i, exp16(load16(x + i)));
}

void gated_norm(const float* o, const float* weight, const float* z, float eps, float* out) {
  const V16 scale = all16(1.0f / std::sqrt(dot(o, o) * (1.0f / kKdaDim) + eps));
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    const V16 y = mul16(mul16(load16(o + i), scale), load16(weight + i));
    store16(out + i, mul16(y, sigmoid16(load16(z + i))));
  }
}

constexpr KdaKernels kKdaLoops = {
    .convolve = convolve,
    .normalise = normalise,
    .log_decay = log_decay,
    .exponential = exponential,
    .steps = steps,
    .to_slabs = to_slabs,
    .from_slabs = from_slabs,
    .relate = relate,
    .apply = apply,
    .gated_norm = gated_norm,
};

}  // namespace
}  // namespace perigee::cpu

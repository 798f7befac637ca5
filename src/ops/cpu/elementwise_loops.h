// Bodies of elementwise_kernels.h, included by elementwise_avx2.cc and elementwise_avx512.cc. Plain loops that the
// compiler vectorises; sums run in 32 fixed lanes, so that a row's result does not depend on anything but the row.
#pragma once

#include <cmath>

#include "ops/cpu/elementwise_kernels.h"
#include "ops/cpu/vector_math.h"

namespace perigee::cpu {
namespace {

inline float as_float(float x) {
  return x;
}
inline float as_float(uint16_t x) {
  return exact_float(x);
}

template <typename T>
float sum_of_squares(const T* x, int64_t d) {
  constexpr int64_t kLanes = 32;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const float v = as_float(x[i + j]);
      lanes[j] = __builtin_fmaf(v, v, lanes[j]);
    }
  }
  float tail = 0;
  for (; i < d; ++i) tail = __builtin_fmaf(as_float(x[i]), as_float(x[i]), tail);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0] + tail;
}

template <typename T>
void rms_norm(const T* x, const float* weight, float eps, int64_t d, uint16_t* out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, d) / static_cast<float>(d) + eps);
  for (int64_t i = 0; i < d; ++i) out[i] = static_cast<uint16_t>(bf16_bits(as_float(x[i]) * scale * weight[i]));
}

void rms_norm_wide(const float* x, const float* weight, float eps, int64_t d, float* out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, d) / static_cast<float>(d) + eps);
  for (int64_t i = 0; i < d; ++i) out[i] = x[i] * scale * weight[i];
}

void add(float* x, const float* y, int64_t d) {
  for (int64_t i = 0; i < d; ++i) x[i] += y[i];
}

void silu_mul(const float* gate, const float* up, int64_t d, uint16_t* out) {
  constexpr float kLog2E = 1.44269504f;
  for (int64_t i = 0; i < d; ++i) {
    const float sigmoid = 1.0f / (1.0f + exp2_vector(-kLog2E * gate[i]));
    out[i] = static_cast<uint16_t>(bf16_bits(gate[i] * sigmoid * up[i]));
  }
}

void rotate_f32(float* x, const float* cos_sin, int64_t num_pairs) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
}

void rotate_bf16(uint16_t* x, const float* cos_sin, int64_t num_pairs) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float a = exact_float(x[2 * i]), b = exact_float(x[2 * i + 1]);
    x[2 * i] = static_cast<uint16_t>(bf16_bits(a * c - b * s));
    x[2 * i + 1] = static_cast<uint16_t>(bf16_bits(b * c + a * s));
  }
}

void rotate_halves(float* x, const float* cos_sin, int64_t num_pairs) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float a = x[i], b = x[i + num_pairs];
    x[i] = a * c - b * s;
    x[i + num_pairs] = b * c + a * s;
  }
}

void narrow(const float* x, int64_t d, uint16_t* out) {
  for (int64_t i = 0; i < d; ++i) out[i] = static_cast<uint16_t>(bf16_bits(x[i]));
}

void widen(const uint16_t* x, int64_t d, float* out) {
  for (int64_t i = 0; i < d; ++i) out[i] = exact_float(x[i]);
}

constexpr ElementwiseKernels kLoops = {
    .rms_norm_f32 = rms_norm<float>,
    .rms_norm_bf16 = rms_norm<uint16_t>,
    .rms_norm_wide = rms_norm_wide,
    .add = add,
    .silu_mul = silu_mul,
    .rotate_f32 = rotate_f32,
    .rotate_bf16 = rotate_bf16,
    .rotate_halves = rotate_halves,
    .narrow = narrow,
    .widen = widen,
};

}  // namespace
}  // namespace perigee::cpu

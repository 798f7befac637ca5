// Bodies of full_kernels.h, included by full_avx2.cc and full_avx512.cc.
#pragma once

#include <cmath>

#include "ops/cpu/full_kernels.h"
#include "ops/cpu/vector16.h"
#include "ops/cpu/vector_math.h"

namespace perigee::cpu {
namespace {

void widen_bf16(const uint16_t* x, int64_t rows, int64_t n, int64_t stride, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < n; ++i) out[r * stride + i] = exact_float(x[r * n + i]);
}

void widen_f8(const uint8_t* x, int64_t rows, int64_t n, int64_t stride, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < n; ++i) out[r * stride + i] = f8_float(x[r * n + i]);
}

void attend(FullQuery& query, const float* keys, const float* values, int64_t num_keys, int64_t dim, float scale) {
  float weights[64];
  float largest = -INFINITY;
  for (int64_t j = 0; j < num_keys; ++j) {
    V16 sum = all16(0);
    for (int64_t i = 0; i < dim; i += 16) sum = fma16(load16(query.q + i), load16(keys + j * dim + i), sum);
    weights[j] = scale * sum16(sum);
    largest = largest < weights[j] || weights[j] != weights[j] ? weights[j] : largest;
  }
  const bool first = query.sum == 0;
  const float max = first || query.max < largest || largest != largest ? largest : query.max;
  const float fade = first ? 0.0f : exp2_vector(query.max - max);
  float sum = query.sum * fade;
  for (int64_t j = 0; j < num_keys; ++j) sum += weights[j] = exp2_vector(weights[j] - max);
  for (int64_t i = 0; i < dim; i += 16) {
    V16 out = first ? all16(0) : mul16(load16(query.out + i), all16(fade));
    for (int64_t j = 0; j < num_keys; ++j) out = fma16(all16(weights[j]), load16(values + j * dim + i), out);
    store16(query.out + i, out);
  }
  query.max = max;
  query.sum = sum;
}

constexpr FullKernels kLoops = {.widen_bf16 = widen_bf16, .widen_f8 = widen_f8, .attend = attend};

}  // namespace
}  // namespace perigee::cpu

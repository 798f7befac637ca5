// The inner loops of elementwise.cc, compiled once for each vector width and chosen by Isa.
#pragma once

#include <cstdint>

namespace perigee::cpu {

struct ElementwiseKernels {
  // out[d] = bf16(x * rsqrt(mean(x^2) + eps) * weight)
  void (*rms_norm_f32)(const float* x, const float* weight, float eps, int64_t d, uint16_t* out);
  void (*rms_norm_bf16)(const uint16_t* x, const float* weight, float eps, int64_t d, uint16_t* out);
  void (*rms_norm_wide)(const float* x, const float* weight, float eps, int64_t d, float* out);  // not rounded
  void (*add)(float* x, const float* y, int64_t d);                                              // x += y
  void (*silu_mul)(const float* gate, const float* up, int64_t d, uint16_t* out);
  // Pairs (x[2i], x[2i + 1]) turn by the angle whose (cos, sin) is cos_sin[2i], cos_sin[2i + 1].
  void (*rotate_f32)(float* x, const float* cos_sin, int64_t num_pairs);
  void (*rotate_bf16)(uint16_t* x, const float* cos_sin, int64_t num_pairs);
  void (*rotate_halves)(float* x, const float* cos_sin, int64_t num_pairs);  // pairs (x[i], x[i + num_pairs])
  void (*narrow)(const float* x, int64_t d, uint16_t* out);                  // f32 -> bf16
  void (*widen)(const uint16_t* x, int64_t d, float* out);                   // bf16 -> f32
};

extern const ElementwiseKernels kElementwiseAvx2;
extern const ElementwiseKernels kElementwiseAvx512;

}  // namespace perigee::cpu

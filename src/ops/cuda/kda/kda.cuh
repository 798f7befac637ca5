// Parts that the kernels of kda.h share.
#pragma once

#include "ops/cuda/kda/kda.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

// Where one sequence's tokens of this step are.
struct KdaRun {
  int32_t first_row = 0, rows = 0;
  int32_t committed = 0, position = 0, length = 0;  // before the ring, before the new tokens, after them
  bool prefill = false;                             // the new tokens move the state
  int32_t first_checkpoint = 0, end_checkpoint = 0;

  // All at once, so that a block waits for memory once; of padding only rows and length mean something. From L2, as a
  // kernel beside another's carry reads it ahead of its wait.
  __device__ KdaRun(const DeviceSequences& s, int sequence) {
    const int32_t after = __ldcg(s.commit + sequence), end = __ldcg(s.first_row + sequence + 1);
    committed = __ldcg(s.committed + sequence);
    first_checkpoint = __ldcg(s.first_checkpoint + sequence);
    end_checkpoint = __ldcg(s.first_checkpoint + sequence + 1);
    first_row = __ldcg(s.first_row + sequence);
    length = __ldcg(s.lengths + sequence);
    rows = end - first_row;
    position = length - rows;
    prefill = after == length;
  }
};

struct KdaRange {
  int32_t begin = 0, end = 0;  // positions; none where begin >= end
};

__device__ inline int kda_num_chunks(const KdaRun& run) {
  return (run.length - 1) / kKdaChunk - run.position / kKdaChunk + 1;
}

// Tokens of a prefill's chunk `index`.
__device__ inline KdaRange kda_chunk(const KdaRun& run, int index) {
  const int chunk = run.position / kKdaChunk + index;
  return {max(run.position, chunk * kKdaChunk), min(run.length, (chunk + 1) * kKdaChunk)};
}

// a / b of numbers below 2^21, in few instructions.
__device__ inline int kda_quotient(int a, int b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(b)));
  return static_cast<int>((static_cast<float>(a) + 0.5f) * inverse);
}

// StateLayer::unit and the ring's first token of a unit; addresses below 2^31 bytes from page and slot.
__device__ inline float* kda_unit_of(const StateLayer& state, const int32_t* pages, int head) {
  const int unit = state.first_unit + head, page = kda_quotient(unit, state.units_per_page);
  return reinterpret_cast<float*>(state.base +
                                  static_cast<int64_t>(__ldcg(pages + page)) * static_cast<int>(state.page_bytes) +
                                  (unit - page * state.units_per_page) * static_cast<int>(state.unit_bytes));
}
__device__ inline float* kda_unit(const StateLayer& state, const DeviceSequences& s, int sequence, int head) {
  return kda_unit_of(state, s.state_pages + sequence * s.state_width, head);
}
__device__ inline float* kda_checkpoint_unit(const StateLayer& state, const DeviceSequences& s, int checkpoint,
                                             int head) {
  return kda_unit_of(state, s.checkpoint_pages + checkpoint * s.state_width, head);
}
__device__ inline uint8_t* kda_ring(const StateLayer& state, int slot, int head) {
  return state.ring + static_cast<int64_t>(slot) * static_cast<int>(state.ring_slot_bytes) +
         (state.first_unit + head) * state.ring_tokens * static_cast<int>(state.ring_token_bytes);
}

// A row of f32.
__device__ inline const float* kda_row(const Tensor& t, int row) {
  return static_cast<const float*>(t.data) + static_cast<int64_t>(row) * static_cast<int>(t.row_stride);
}

// Fast functions of normal numbers, relative errors of a few 2^-24.
__device__ inline float kda_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float kda_inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float kda_sigmoid(float x) {
  return kda_reciprocal(1.0f + exp2_fast(-1.4426950409f * x));
}

// g = -rate * softplus(x), softplus(x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) = 2 artanh(u / (2 + u)), whose
// argument is <= 1/3: relative error about 2e-7.
__device__ inline float kda_log_decay(float rate, float x) {
  const float u = exp2_fast(-1.4426950409f * fabsf(x)), s = u * kda_reciprocal(2.0f + u), s2 = s * s;
  float p = fmaf(1.0f / 13, s2, 1.0f / 11);
  p = fmaf(p, s2, 1.0f / 9);
  p = fmaf(p, s2, 1.0f / 7);
  p = fmaf(p, s2, 1.0f / 5);
  p = fmaf(p, s2, 1.0f / 3);
  p = fmaf(p, s2, 1.0f);
  return -rate * fmaf(s + s, p, fmaxf(x, 0.0f));
}

__device__ inline float warp_total(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// y = RMSNorm(o) * weight * sigmoid(z) of one head's row; the warp's lanes hold four channels each.
__device__ inline void kda_gated_norm(float4 o, float4 weight, float eps, float4 z, uint16_t* y) {
  const float squares = warp_total(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
  const float factor = kda_inverse_root(squares * (1.0f / kKdaDim) + eps);
  uint2 pairs;
  pairs.x = pack_pair(Bf16(), o.x * factor * weight.x * kda_sigmoid(z.x), o.y * factor * weight.y * kda_sigmoid(z.y));
  pairs.y = pack_pair(Bf16(), o.z * factor * weight.z * kda_sigmoid(z.z), o.w * factor * weight.w * kda_sigmoid(z.w));
  reinterpret_cast<uint2*>(y)[threadIdx.x % 32] = pairs;
}

}  // namespace perigee

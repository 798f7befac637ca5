// Parts that the kernels of kda.h share.
#pragma once

#include "ops/cuda/kda.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

// Where one sequence's tokens of this step are.
struct KdaRun {
  int32_t first_row = 0, rows = 0;
  int32_t committed = 0, position = 0, length = 0;  // before the ring, before the new tokens, after them
  bool prefill = false;                             // the new tokens move the state
  int32_t checkpoint = -1;

  __device__ KdaRun(const DeviceSequences& s, int sequence) {
    first_row = s.first_row[sequence];
    rows = s.first_row[sequence + 1] - first_row;
    length = s.lengths[sequence];
    if (length == 0) return;
    position = length - rows;
    committed = s.committed[sequence];
    prefill = s.commit[sequence] == length;
    checkpoint = s.checkpoint_position[sequence];
  }
};

struct KdaRange {
  int32_t begin = 0, end = 0;  // positions; none where begin >= end
};

// Tokens of a prefill's chunk `index`.
__device__ inline KdaRange kda_chunk(const KdaRun& run, int index) {
  const int first = run.position / kKdaChunk;
  const bool cuts = run.checkpoint > run.position && run.checkpoint < run.length && run.checkpoint % kKdaChunk != 0;
  const int cut = cuts ? run.checkpoint / kKdaChunk - first : INT32_MAX - 1;
  const int whole = first + (index > cut ? index - 1 : index);
  KdaRange range{max(run.position, whole * kKdaChunk), min(run.length, (whole + 1) * kKdaChunk)};
  if (index == cut) range.end = run.checkpoint;
  if (index == cut + 1) range.begin = run.checkpoint;
  return range;
}

__device__ inline float* kda_unit(const StateLayer& state, const DeviceSequences& s, int sequence, int head) {
  return reinterpret_cast<float*>(state.unit(s.state_pages + static_cast<int64_t>(sequence) * s.state_width, head));
}
__device__ inline float* kda_checkpoint_unit(const StateLayer& state, const DeviceSequences& s, int sequence,
                                             int head) {
  return reinterpret_cast<float*>(
      state.unit(s.checkpoint_pages + static_cast<int64_t>(sequence) * s.state_width, head));
}

__device__ inline float kda_sigmoid(float x) {
  return 1.0f / (1.0f + __expf(-x));
}

// e^g of the log decay g = -rate * softplus(x).
__device__ inline float kda_log_decay(float rate, float x) {
  return -rate * (x > 20 ? x : log1pf(expf(x)));
}

__device__ inline float warp_total(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// y = RMSNorm(o) * weight * sigmoid(z) of one head's row; the warp's lanes hold four channels each.
__device__ inline void kda_gated_norm(const KdaCall& call, float4 o, float4 z, uint16_t* y) {
  const int lane = threadIdx.x % 32;
  const float4 weight = reinterpret_cast<const float4*>(call.o_norm)[lane];
  const float squares = warp_total(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
  const float factor = 1.0f / sqrtf(squares * (1.0f / kKdaDim) + call.eps);
  uint2 pairs;
  pairs.x = pack_pair(Bf16(), o.x * factor * weight.x * kda_sigmoid(z.x), o.y * factor * weight.y * kda_sigmoid(z.y));
  pairs.y = pack_pair(Bf16(), o.z * factor * weight.z * kda_sigmoid(z.z), o.w * factor * weight.w * kda_sigmoid(z.w));
  reinterpret_cast<uint2*>(y)[lane] = pairs;
}

}  // namespace perigee

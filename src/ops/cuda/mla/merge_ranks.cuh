// The merge of what ranks found on their own keys, by eight columns of a row.
#pragma once

#include <cstdint>

#include "ops/cuda/mla/result_row.h"
#include "ops/cuda/mma.cuh"

namespace perigee {

// sum_r exp(lse_r) mean_r / sum_r exp(lse_r), in f32, in the order of add(). A rank that saw nothing (-inf) is left out
// by a select, whatever its mean holds; infinities and NaN show.
class RankMerge {
 public:
  // The largest of the ranks' log-sums.
  __device__ __forceinline__ explicit RankMerge(float most) : most_(most) {}

  // means: as in result_row.h.
  __device__ __forceinline__ void add(float lse, const uint32_t (&means)[4]) {
    const float weight = lse == -INFINITY ? 0 : expf(lse - most_);
    if (weight == 0) return;
    sum_ += weight;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&means[i]));
      total_[i].x += weight * pair.x, total_[i].y += weight * pair.y;
    }
  }
  // As bf16.
  __device__ __forceinline__ uint4 columns() const {
    const float factor = sum_ == 0 ? 0 : kMeanUnit / sum_;
    const auto pair = [&](int i) { return pack_pair(Bf16(), total_[i].x * factor, total_[i].y * factor); };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }

 private:
  float most_, sum_ = 0;
  float2 total_[4] = {};
};

}  // namespace perigee

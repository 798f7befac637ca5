// The merge of what ranks found on their own keys, by four columns of a row.
#pragma once

#include <cstdint>

#include "ops/cuda/mma.cuh"

namespace perigee {

// sum_r exp(lse_r) mean_r / sum_r exp(lse_r), in f32, in the order of add(). A rank that saw nothing (-inf) is left out
// by a select, whatever its mean holds; NaN shows.
class RankMerge {
 public:
  // The largest of the ranks' log-sums.
  __device__ __forceinline__ explicit RankMerge(float most) : most_(most) {}

  __device__ __forceinline__ void add(float lse, const float4& mean) {
    const float weight = lse == -INFINITY ? 0 : expf(lse - most_);
    if (weight == 0) return;
    sum_ += weight;
    total_.x += weight * mean.x, total_.y += weight * mean.y, total_.z += weight * mean.z, total_.w += weight * mean.w;
  }
  // As bf16.
  __device__ __forceinline__ uint2 columns() const {
    const float factor = sum_ == 0 ? 0 : 1 / sum_;
    return make_uint2(pack_pair(Bf16(), total_.x * factor, total_.y * factor),
                      pack_pair(Bf16(), total_.z * factor, total_.w * factor));
  }

 private:
  float most_, sum_ = 0;
  float4 total_ = {0, 0, 0, 0};
};

}  // namespace perigee

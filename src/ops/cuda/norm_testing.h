// Operands of a reduce point's kernels, for their tests.
#pragma once

#include "comm/cuda/peer_testing.h"

namespace perigee {

// Of one call: `y` is the rank's own, the rest is the same on all ranks. `out` is NaN.
struct NormOperands {
  NormOperands(PeerRank& rank, uint64_t call, int64_t rows, int64_t cols) {
    std::vector<float> mine(static_cast<size_t>(rows * cols)), all(mine.size()), weights(static_cast<size_t>(cols));
    for (size_t i = 0; i < mine.size(); ++i) {
      mine[i] = peer_value(call, rank.rank, static_cast<int64_t>(i));
      all[i] = peer_value(call, 63, static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = peer_value(call, 62, static_cast<int64_t>(i)) * 1e-3f;
    y = {.data = rank.upload(mine), .rows = rows, .cols = cols, .row_stride = cols};
    residual = {.data = rank.upload(all), .rows = rows, .cols = cols, .row_stride = cols};
    weight = rank.upload(weights);
    out = y;
    out.dtype = DType::kBF16;
    out.data = rank.upload(std::vector<uint16_t>(mine.size(), 0x7FC0));
  }
  Tensor y, residual, out;
  const float* weight = nullptr;
};

}  // namespace perigee

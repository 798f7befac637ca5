// Operands of a reduce point's kernels, for their tests.
#pragma once

#include "comm/cuda/peer_testing.h"
#include "comm/cuda/term.h"

namespace perigee {

// Of one call: `y` is the rank's own, the rest is the same on all ranks. `out` is NaN. Of every fifth call rank 1's y
// begins with two NaNs of ones, which are the bits of a word that has not come.
struct NormOperands {
  NormOperands(PeerRank& rank, uint64_t call, int64_t rows, int64_t cols) {
    std::vector<uint16_t> mine(static_cast<size_t>(rows * cols));
    std::vector<float> all(mine.size()), weights(static_cast<size_t>(cols));
    for (size_t i = 0; i < mine.size(); ++i) {
      mine[i] = to_term(peer_value(call, rank.rank, static_cast<int64_t>(i))).bits;
      all[i] = peer_value(call, 63, static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = peer_value(call, 62, static_cast<int64_t>(i)) * 1e-3f;
    if (call % 5 == 0 && rank.rank == 1) mine[0] = mine[1] = 0xFFFF;
    y = {.data = rank.upload(mine), .dtype = DType::kF16, .rows = rows, .cols = cols, .row_stride = cols};
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

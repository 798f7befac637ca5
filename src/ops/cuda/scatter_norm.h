// A layer's reduce point of many rows in one kernel: each rank adds up some of the rows (reduce-scatter), adds them to
// their residual, normalizes them, and writes the normed rows to all (all-gather, in bf16). The residual of a row then
// stands on the rank that owns it alone: no rank needs that of others' rows until gather_residual().
//
// What fits into boxes is pushed there, both times; ranks do not wait until all have come. Of more rows each rank pulls
// the terms of its own from where they lie.
#pragma once

#include <cuda_runtime.h>

#include "comm/cuda/peer_view.h"
#include "tensor/tensor.h"

namespace perigee {

// Which of n rows are a rank's own: rows [rank * each, (rank + 1) * each). The last n % ranks are every rank's.
struct RowShares {
  RowShares(int64_t rows, int32_t ranks) : each(rows / ranks), common(rows % ranks) {}
  int64_t each, common;
};

// Whether reduce points add to the rows of this residual so: where the sum would not take one shot. The same for every
// reduce point that adds to it.
bool scatter_norm_pays(const PeerView& view, const Tensor& residual);
// Whether these rows fit into boxes, on this GPU.
bool scatter_norm_pushes(const PeerView& view, const Tensor& residual);

// Of this rank's own rows and the common ones: residual += the sum of the ranks' y, in rank order. Of all rows: out =
// the residual's RMSNorm. All [n, H]; the residual f32, y terms (comm/cuda/term.h), out bf16. Every rank calls it with
// tensors of the same sizes, strides and alignment. Has the bits of PeerComm::add_up and rms_norm_rows. `form` and
// `most_blocks`: for tests and measurements.
enum class ScatterForm { kChosen, kPush, kPull };
constexpr int kScatterBlocks = 256;
cudaError_t scatter_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                              float eps, const Tensor& out, cudaStream_t stream,
                              ScatterForm form = ScatterForm::kChosen, int most_blocks = kScatterBlocks);

// On each GPU before the first call, as load_peer_kernels().
cudaError_t load_scatter_norm();

}  // namespace perigee

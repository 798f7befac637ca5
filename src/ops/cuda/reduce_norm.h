// A layer's reduce point in one kernel: the sum over ranks, the residual, the next RMSNorm.
#pragma once

#include <cuda_runtime.h>

#include "comm/cuda/peer_view.h"
#include "tensor/tensor.h"

namespace perigee {

// Whether there is such a kernel for these tensors, and it beats the sum and then the norm: up to 32 rows, as long as
// the sum takes one shot. In two shots it gains nothing (docs/results/cuda.md).
bool reduce_norm_pays(const PeerView& view, const Tensor& residual, const Tensor& y, const Tensor& out);

// Whether the current device has clusters of blocks, by which a row is spread over several multiprocessors.
bool has_clusters();

// residual += the sum of the ranks' y, in rank order; out = the residual's RMSNorm. All [n, H]; the residual f32, y
// terms (comm/cuda/term.h), out bf16. Every rank calls it with tensors of the same sizes and alignment. Has the bits of
// PeerComm::add_up and rms_norm_rows. Requires that it pays.
cudaError_t reduce_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                             float eps, const Tensor& out, cudaStream_t stream, bool clusters = has_clusters());

// On each GPU before the first call, as load_peer_kernels().
cudaError_t load_reduce_norm(bool clusters = has_clusters());

}  // namespace perigee

// A layer's reduce point in one kernel: the sum over ranks, the residual, the next RMSNorm.
#pragma once

#include <cuda_runtime.h>

#include "comm/cuda/peer_view.h"
#include "tensor/tensor.h"

namespace perigee {

// Whether rows can be kept in registers: as norm_row.cuh wants them, f32 in fours.
bool reduce_norm_fits(const Tensor& residual, const Tensor& y, const Tensor& out);
// Whether this beats the sum and then the norm, of rows that fit: as long as the sum takes one shot (H200).
bool reduce_norm_pays(const PeerView& view, const Tensor& y);

// residual += the sum of the ranks' y, in rank order; out = the residual's RMSNorm in bf16. y is overwritten. All f32
// [n, H] but out. Every rank calls it with tensors of the same sizes, strides and alignment. The bits of all_reduce and
// rms_norm_rows.
cudaError_t reduce_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                             float eps, const Tensor& out, cudaStream_t stream);

// On each GPU before the first call, as load_peer_kernels().
cudaError_t load_reduce_norm();

}  // namespace perigee

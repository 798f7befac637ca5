// The collectives as kernels: one launch each.
#pragma once

#include <cuda_runtime.h>

#include "comm/cuda/peer_view.h"
#include "tensor/tensor.h"

namespace perigee {

cudaError_t peer_all_reduce(const PeerView& view, const Tensor& x, cudaStream_t stream);
// to += the sum of the ranks' x, in rank order, in f32. x terms (term.h), `to` f32, of the same sizes.
cudaError_t peer_add_up(const PeerView& view, const Tensor& x, const Tensor& to, cudaStream_t stream);
cudaError_t peer_all_gather(const PeerView& view, const void* mine, size_t bytes, void* all, cudaStream_t stream);
cudaError_t peer_all_to_all(const PeerView& view, const Tensor& part, const int32_t* to, const Tensor& whole,
                            cudaStream_t stream);
cudaError_t peer_barrier(const PeerView& view, cudaStream_t stream);

// On each GPU before the first call: to load a kernel the driver may wait for others, which may wait for this one.
cudaError_t load_peer_kernels();

}  // namespace perigee

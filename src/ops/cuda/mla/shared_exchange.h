// The exchanges of attention over a cache that GPUs share, in a kernel each, where ranks reach each other's memory:
// what shared_latents.h and two collectives do otherwise.
//
// What fits is pushed into boxes of numbers, in which a NaN may become another one. More is pulled: once a rank has
// shown that its operand is complete, the others read their parts of it where it lies. Therefore `mine` and `results`
// must keep what they hold until the next call of the group has ended here. Each launch is one call of the group.
#pragma once

#include <cuda_runtime.h>

#include "comm/cuda/peer_view.h"
#include "tensor/tensor.h"

namespace perigee {

inline constexpr int64_t kShownBytes = 16 << 20;  // of `mine` or `results` in one exchange, at most

// Each rank's `mine` [n, w] -> all [n, ranks * w]; bf16.
cudaError_t exchange_queries(const PeerView& view, const Tensor& mine, const Tensor& all, cudaStream_t stream);

// Each rank's results [n * ranks * heads, result_columns(L)] of all heads (result_row.h) -> y [n * heads, L] bf16, this
// rank's heads over the keys of all ranks, merged as merge_results() does.
cudaError_t exchange_results(const PeerView& view, const Tensor& results, int heads, const Tensor& y,
                             cudaStream_t stream);

// On each GPU before the first call, as load_peer_kernels().
cudaError_t load_exchanges();

}  // namespace perigee

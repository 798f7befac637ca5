// What NcclRank's collectives do beside gathering.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tensor/tensor.h"

namespace perigee {

// *come_to = ++*counter, of a collective that begins.
cudaError_t count_call(uint64_t* counter, uint64_t* come_to, cudaStream_t stream);
// x = the sum of `gathered` [size][x.rows][x.cols] in rank order, in f32, rounded once.
cudaError_t sum_gathered(const void* gathered, int32_t size, const Tensor& x, cudaStream_t stream);
// to += the sum of `gathered` [size][to.rows][to.cols] in rank order: terms into f32.
cudaError_t add_gathered(const void* gathered, int32_t size, const Tensor& to, cudaStream_t stream);
// Of `gathered` [size][end - begin][cols], rows [begin, end) of a deal, those that `to` gives to this rank, into their
// places of `whole`. All f32.
struct DealtPart {
  int32_t rank, size;
  int64_t begin, end;
};
cudaError_t take_dealt(const void* gathered, const DealtPart& part, const int32_t* to, int64_t cols,
                       const Tensor& whole, cudaStream_t stream);

// On each GPU before the first call, as load_peer_kernels().
cudaError_t load_nccl_kernels();

}  // namespace perigee

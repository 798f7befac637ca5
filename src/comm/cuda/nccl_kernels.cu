#include <cuda_bf16.h>

#include <algorithm>

#include "comm/cuda/nccl_kernels.h"
#include "comm/cuda/peer_wire.cuh"
#include "comm/cuda/term.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;

__global__ void count_kernel(uint64_t* counter, uint64_t* come_to) {
  store_peer64(come_to, ++*counter);
}

__device__ float wide(float x) {
  return x;
}
__device__ float wide(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ float wide(Term x) {
  return from_term(x.bits);
}
__device__ void store(float* to, float x) {
  *to = x;
}
__device__ void store(__nv_bfloat16* to, float x) {
  *to = __float2bfloat16_rn(x);
}

// x = the sum, or with kAdds x += the sum, f32.
template <typename T, bool kAdds>
__global__ void sum_kernel(const T* gathered, int32_t size, Tensor x) {
  const int64_t count = x.rows * x.cols, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    float total = wide(gathered[i]);
    for (int32_t r = 1; r < size; ++r) total += wide(gathered[r * count + i]);
    if constexpr (kAdds)
      x.row<float>(i / x.cols)[i % x.cols] += total;
    else
      store(x.row<T>(i / x.cols) + i % x.cols, total);
  }
}

// A block has one row of the part.
__global__ void take_kernel(const float* gathered, DealtPart part, const int32_t* to, int64_t cols, Tensor whole) {
  __shared__ int before;
  const int64_t row = part.begin + blockIdx.x, rows = part.end - part.begin;
  if (to[row] != part.rank) return;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  int mine = 0;
  for (int64_t i = threadIdx.x; i < row; i += kThreads) mine += to[i] == part.rank;
  if (mine > 0) atomicAdd(&before, mine);
  __syncthreads();
  for (int32_t r = 0; r < part.size; ++r)
    for (int64_t c = threadIdx.x; c < cols; c += kThreads)
      whole.row<float>(before)[r * cols + c] = gathered[(r * rows + blockIdx.x) * cols + c];
}

unsigned sum_blocks(const Tensor& x) {
  return static_cast<unsigned>(std::min<int64_t>((x.rows * x.cols + kThreads - 1) / kThreads, 2048));
}

}  // namespace

cudaError_t count_call(uint64_t* counter, uint64_t* come_to, cudaStream_t stream) {
  count_kernel<<<1, 1, 0, stream>>>(counter, come_to);
  return cudaPeekAtLastError();
}

cudaError_t sum_gathered(const void* gathered, int32_t size, const Tensor& x, cudaStream_t stream) {
  if (x.dtype == DType::kF32)
    sum_kernel<float, false><<<sum_blocks(x), kThreads, 0, stream>>>(static_cast<const float*>(gathered), size, x);
  else
    sum_kernel<__nv_bfloat16, false>
        <<<sum_blocks(x), kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(gathered), size, x);
  return cudaPeekAtLastError();
}

cudaError_t add_gathered(const void* gathered, int32_t size, const Tensor& to, cudaStream_t stream) {
  sum_kernel<Term, true><<<sum_blocks(to), kThreads, 0, stream>>>(static_cast<const Term*>(gathered), size, to);
  return cudaPeekAtLastError();
}

cudaError_t take_dealt(const void* gathered, const DealtPart& part, const int32_t* to, int64_t cols,
                       const Tensor& whole, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(part.end - part.begin);
  take_kernel<<<rows, kThreads, 0, stream>>>(static_cast<const float*>(gathered), part, to, cols, whole);
  return cudaPeekAtLastError();
}

cudaError_t load_nccl_kernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(count_kernel), reinterpret_cast<const void*>(sum_kernel<float, false>),
        reinterpret_cast<const void*>(sum_kernel<__nv_bfloat16, false>),
        reinterpret_cast<const void*>(sum_kernel<Term, true>), reinterpret_cast<const void*>(take_kernel)}) {
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace perigee

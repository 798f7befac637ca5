#include <cuda_fp8.h>

#include "base/check.h"
#include "ops/cuda/full/full_attention.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 64;
constexpr int kFewRows = 256, kBlocksOfARow = 16;

__device__ void store_number(const FullLayer& cache, uint8_t* head, int64_t element, float x) {
  if (cache.dtype == DType::kBF16)
    reinterpret_cast<__nv_bfloat16*>(head)[element] = __float2bfloat16_rn(x);
  else
    head[element] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

struct WriteArgs {
  Tensor qkv, q;
  int heads, pairs;
  const float* inv_freq;
  float factor;
  const int32_t* positions;
  const int32_t* pages;  // of each row
  FullLayer cache;
};

// A token has one block, or several where there are few tokens.
__global__ __launch_bounds__(kThreads) void full_write_kernel(WriteArgs args) {
  __shared__ float cosine[kMaxPairs], sine[kMaxPairs];
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, position = args.positions[row], page = args.pages[row];
  const int pairs = args.pairs, dim = 2 * pairs;
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    sincosf(static_cast<float>(position) * args.inv_freq[p], &sine[p], &cosine[p]);
    cosine[p] *= args.factor;
    sine[p] *= args.factor;
  }
  __syncthreads();
  const float* in = args.qkv.row<const float>(row);
  const int kv_heads = static_cast<int>(args.cache.heads);
  const int first = blockIdx.y * kThreads + threadIdx.x, step = gridDim.y * kThreads;
  for (int i = first; i < (args.heads + kv_heads) * pairs; i += step) {
    const int head = i / pairs, p = i % pairs;
    const float a = in[head * dim + p], b = in[head * dim + pairs + p];
    const float x = a * cosine[p] - b * sine[p], y = a * sine[p] + b * cosine[p];
    if (head < args.heads) {
      auto* to = args.q.row<__nv_bfloat16>(row) + head * dim;
      to[p] = __float2bfloat16_rn(x);
      to[pairs + p] = __float2bfloat16_rn(y);
    } else if (page >= 0) {
      uint8_t* keys = args.cache.keys(page, head - args.heads);
      store_number(args.cache, keys, position % kRowsOfBlock * dim + p, x);
      store_number(args.cache, keys, position % kRowsOfBlock * dim + pairs + p, y);
    }
  }
  if (page < 0) return;
  const float* values = in + (args.heads + kv_heads) * dim;
  for (int i = first; i < kv_heads * dim; i += step)
    store_number(args.cache, args.cache.values(page, i / dim), position % kRowsOfBlock * dim + i % dim, values[i]);
}

// One block a token.
__global__ __launch_bounds__(kThreads) void full_store_kernel(Tensor k, Tensor v, const int32_t* positions,
                                                              const int32_t* pages, FullLayer cache) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, at = positions[row] % kRowsOfBlock * cache.dim, page = pages[row];
  if (page < 0) return;
  for (int64_t i = threadIdx.x; i < k.cols; i += kThreads) {
    const int64_t head = i / cache.dim, column = i % cache.dim;
    store_number(cache, cache.keys(page, head), at + column, k.row<const float>(row)[i]);
    store_number(cache, cache.values(page, head), at + column, v.row<const float>(row)[i]);
  }
}

LaunchShape one_each(int64_t rows, cudaStream_t stream) {
  return {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kThreads), .stream = stream};
}

}  // namespace

cudaError_t full_write_rows(const FullWriteCall& call, cudaStream_t stream) {
  if (call.qkv.rows == 0) return cudaSuccess;
  const auto pairs = static_cast<int>(call.rope.inv_freq.size());
  CHECK(call.rope.halves && pairs <= kMaxPairs && 2 * pairs == call.shape.dim, pairs, " pairs of ", call.shape.dim);
  const WriteArgs args{.qkv = call.qkv,
                       .q = call.q,
                       .heads = static_cast<int>(call.shape.heads),
                       .pairs = pairs,
                       .inv_freq = call.rope.inv_freq.data(),
                       .factor = call.rope.cos_sin_factor,
                       .positions = call.batch.positions.data(),
                       .pages = call.batch.device->row_page,
                       .cache = call.cache};
  LaunchShape shape = one_each(call.qkv.rows, stream);
  if (call.qkv.rows < kFewRows) shape.grid.y = kBlocksOfARow;
  return launch(full_write_kernel, shape, args);
}

cudaError_t full_store_rows(const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache,
                            cudaStream_t stream) {
  if (k.rows == 0) return cudaSuccess;
  return launch(full_store_kernel, one_each(k.rows, stream), k, v, batch.positions.data(), batch.device->row_page,
                cache);
}

}  // namespace perigee

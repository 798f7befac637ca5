#include "ops/cuda/elementwise.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = 256;

LaunchShape shape_of(int64_t blocks, cudaStream_t stream, int64_t blocks_y = 1) {
  return {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_y)),
          .block = dim3(kThreads),
          .stream = stream};
}

int64_t blocks_for(int64_t count) {
  return (count + kThreads - 1) / kThreads;
}

__global__ void embed_kernel(const __nv_bfloat16* table, int64_t padded, const int32_t* tokens, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t token = tokens[blockIdx.x];
  for (int64_t c = threadIdx.x; c < y.cols; c += blockDim.x)
    y.row<float>(blockIdx.x)[c] = token < 0 ? 0.0f : __bfloat162float(table[token * padded + c]);
}

__device__ float as_float(float x) {
  return x;
}
__device__ float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// The sum over the block, the same for every thread, added in a fixed order.
__device__ float block_sum(float x) {
  __shared__ float parts[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (const float part : parts) total += part;
  return total;
}

template <typename T>
__global__ void rms_norm_kernel(Tensor x, Tensor addend, const float* weight, float eps, Tensor y) {
  dependency_wait();
  dependency_trigger();
  T* in = x.row<T>(blockIdx.x);
  float squares = 0;
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x) {
    float v = as_float(in[c]);
    if constexpr (std::is_same_v<T, float>) {
      if (addend.data != nullptr) in[c] = v += addend.row<float>(blockIdx.x)[c];
    }
    squares += v * v;
  }
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(x.cols) + eps);
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x)
    y.row<__nv_bfloat16>(blockIdx.x)[c] = __float2bfloat16_rn(as_float(in[c]) * factor * weight[c]);
}

__global__ void add_kernel(Tensor residual, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c < y.cols) residual.row<float>(blockIdx.y)[c] += y.row<float>(blockIdx.y)[c];
}

__global__ void silu_mul_kernel(Tensor gate_up, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c >= y.cols) return;
  const float* in = gate_up.row<float>(blockIdx.y);
  const float gate = in[c];
  y.row<__nv_bfloat16>(blockIdx.y)[c] = __float2bfloat16_rn(gate / (1.0f + __expf(-gate)) * in[y.cols + c]);
}

template <typename T>
__global__ void rope_kernel(Tensor x, RopeCall call) {
  dependency_wait();
  dependency_trigger();
  const int64_t heads = x.cols / call.head_dim;
  const float position = static_cast<float>(call.positions[blockIdx.x]);
  for (int i = threadIdx.x; i < heads * call.pairs; i += blockDim.x) {
    const int p = i % call.pairs;
    float sine, cosine;
    sincosf(position * call.inv_freq[p], &sine, &cosine);
    cosine *= call.factor;
    sine *= call.factor;
    T* pair = x.row<T>(blockIdx.x) + i / call.pairs * call.head_dim + call.rope_begin + 2 * p;
    const float a = as_float(pair[0]), b = as_float(pair[1]);
    pair[0] = T(a * cosine - b * sine);
    pair[1] = T(a * sine + b * cosine);
  }
}

__global__ void write_latent_kernel(Tensor c, Tensor k_rope, const int32_t* positions, DeviceSequences sequences,
                                    LatentLayer cache) {
  dependency_wait();
  dependency_trigger();
  const int64_t position = positions[blockIdx.x], page = sequences.row_page[blockIdx.x];
  if (page < 0) return;
  auto* row = reinterpret_cast<__nv_bfloat16*>(cache.base + page * cache.page_bytes + position % 64 * cache.row_bytes);
  for (int64_t j = threadIdx.x; j < c.cols + k_rope.cols; j += blockDim.x)
    row[j] = j < c.cols ? c.row<__nv_bfloat16>(blockIdx.x)[j]
                        : __float2bfloat16_rn(k_rope.row<float>(blockIdx.x)[j - c.cols]);
}

__global__ void gather_kernel(Tensor x, const int32_t* rows, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const float* from = x.row<float>(rows[blockIdx.x]);
  for (int64_t c = threadIdx.x; c < y.cols; c += blockDim.x) y.row<float>(blockIdx.x)[c] = from[c];
}

__global__ void head_columns_kernel(const uint16_t* x, HeadColumns from, uint16_t* y, HeadColumns to, int count) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, head = blockIdx.y;
  for (int c = threadIdx.x; c < count; c += blockDim.x)
    y[row * to.stride + head * to.head + to.begin + c] = x[row * from.stride + head * from.head + from.begin + c];
}

}  // namespace

cudaError_t embed_rows(const CudaMatrix& table, const int32_t* tokens, const Tensor& y, cudaStream_t stream) {
  return launch(embed_kernel, shape_of(y.rows, stream), reinterpret_cast<const __nv_bfloat16*>(table.data.data()),
                table.padded_in, tokens, y);
}

cudaError_t rms_norm_rows(const Tensor& x, const Tensor* addend, const float* weight, float eps, const Tensor& y,
                          cudaStream_t stream) {
  const Tensor other = addend == nullptr ? Tensor() : *addend;
  const LaunchShape shape = shape_of(x.rows, stream);
  if (x.dtype == DType::kF32) return launch(rms_norm_kernel<float>, shape, x, other, weight, eps, y);
  return launch(rms_norm_kernel<__nv_bfloat16>, shape, x, other, weight, eps, y);
}

cudaError_t add_rows(const Tensor& residual, const Tensor& y, cudaStream_t stream) {
  return launch(add_kernel, shape_of(blocks_for(y.cols), stream, y.rows), residual, y);
}

cudaError_t silu_mul_rows(const Tensor& gate_up, const Tensor& y, cudaStream_t stream) {
  return launch(silu_mul_kernel, shape_of(blocks_for(y.cols), stream, y.rows), gate_up, y);
}

cudaError_t rope_rows(const Tensor& x, const RopeCall& call, cudaStream_t stream) {
  if (x.dtype == DType::kF32) return launch(rope_kernel<float>, shape_of(x.rows, stream), x, call);
  return launch(rope_kernel<__nv_bfloat16>, shape_of(x.rows, stream), x, call);
}

cudaError_t write_latent_rows(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache,
                              cudaStream_t stream) {
  return launch(write_latent_kernel, shape_of(c.rows, stream), c, k_rope, batch.positions.data(), *batch.device, cache);
}

cudaError_t gather_f32_rows(const Tensor& x, const int32_t* rows, const Tensor& y, cudaStream_t stream) {
  return launch(gather_kernel, shape_of(y.rows, stream), x, rows, y);
}

cudaError_t copy_head_columns(const uint16_t* x, HeadColumns from, uint16_t* y, HeadColumns to, dim3 rows_heads_count,
                              cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(rows_heads_count.x, rows_heads_count.y), .block = dim3(64), .stream = stream};
  return launch(head_columns_kernel, shape, x, from, y, to, static_cast<int>(rows_heads_count.z));
}

}  // namespace perigee

#include "base/check.h"
#include "comm/cuda/term.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/latent_rows.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/norm_row.cuh"

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

// Row i of `table` is token first + i.
__global__ void embed_kernel(const __nv_bfloat16* table, int64_t padded, int64_t first, int64_t rows,
                             const int32_t* tokens, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = tokens[blockIdx.x] - first;
  const bool here = row >= 0 && row < rows;
  for (int64_t c = threadIdx.x; c < y.cols; c += blockDim.x)
    y.row<float>(blockIdx.x)[c] = here ? __bfloat162float(table[row * padded + c]) : 0.0f;
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
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (const float part : parts) total += part;
  return total;
}

// The usual row; see norm_row.cuh.
template <int kSplit>
__global__ __launch_bounds__(kNormThreads / kSplit) void norm_kernel(Tensor x, Tensor addend, const float* weight,
                                                                     float eps, Tensor y) {
  NormRow<kSplit> row(weight, x.cols);
  dependency_wait();
  dependency_trigger();
  auto* in = reinterpret_cast<float4*>(x.row<float>(blockIdx.x));
  const auto* more = reinterpret_cast<const float4*>(addend.row<float>(blockIdx.x));
#pragma unroll
  for (int p = 0; p < row.kPieces; ++p) {
    if (!row.has(p)) continue;
    float4& v = row.v[p];
    v = in[row.column(p)];
    if (addend.data == nullptr) continue;
    const float4 b = more[row.column(p)];
    v = {v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w};
    in[row.column(p)] = v;
  }
  row.normalize(eps, y.row<uint16_t>(blockIdx.x));
}

// Any other.
__global__ void rms_norm_kernel(Tensor x, Tensor addend, const float* weight, float eps, Tensor y) {
  dependency_wait();
  dependency_trigger();
  auto* in = x.row<float>(blockIdx.x);
  float squares = 0;
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x) {
    float v = in[c];
    if (addend.data != nullptr) in[c] = v += addend.row<float>(blockIdx.x)[c];
    squares += v * v;
  }
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(x.cols) + eps);
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x)
    y.row<__nv_bfloat16>(blockIdx.x)[c] = __float2bfloat16_rn(in[c] * factor * weight[c]);
}

// Of hidden states for a draft model, which are kept in bf16, or whose norm is a residual stream, in f32.
template <typename In, typename Out>
__global__ void hidden_norm_kernel(Tensor x, const float* weight, float eps, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const In* in = x.row<const In>(blockIdx.x);
  float squares = 0;
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x) squares += as_float(in[c]) * as_float(in[c]);
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(x.cols) + eps);
  for (int64_t c = threadIdx.x; c < x.cols; c += blockDim.x)
    y.row<Out>(blockIdx.x)[c] = static_cast<Out>(as_float(in[c]) * factor * weight[c]);
}

__global__ void round_kernel(Tensor x, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c < y.cols) y.row<__nv_bfloat16>(blockIdx.y)[c] = __float2bfloat16_rn(x.row<float>(blockIdx.y)[c]);
}

// A thread has four columns.
__global__ void terms_kernel(Tensor x, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = 4 * (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  if (c >= y.cols) return;
  const float4 v = *reinterpret_cast<const float4*>(x.row<float>(blockIdx.y) + c);
  *reinterpret_cast<uint2*>(y.row<uint16_t>(blockIdx.y) + c) = {to_terms(v.x, v.y), to_terms(v.z, v.w)};
}

__global__ void add_kernel(Tensor residual, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c < y.cols) residual.row<float>(blockIdx.y)[c] += y.row<float>(blockIdx.y)[c];
}

// A thread has four columns.
__global__ void silu_mul_kernel(Tensor gate_up, bool interleaved, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = 4 * (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  if (c >= y.cols) return;
  const float* in = gate_up.row<float>(blockIdx.y) + (interleaved ? c / 8 * 16 + c % 8 : c);
  const float4 gate = *reinterpret_cast<const float4*>(in);
  const float4 up = *reinterpret_cast<const float4*>(in + (interleaved ? 8 : y.cols));
  *reinterpret_cast<uint2*>(y.row<uint16_t>(blockIdx.y) + c) = {
      pack_pair(Bf16(), silu_mul(gate.x, up.x), silu_mul(gate.y, up.y)),
      pack_pair(Bf16(), silu_mul(gate.z, up.z), silu_mul(gate.w, up.w))};
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
    T* head = x.row<T>(blockIdx.x) + i / call.pairs * call.head_dim + call.rope_begin;
    T& first = head[call.halves ? p : 2 * p];
    T& second = head[call.halves ? p + call.pairs : 2 * p + 1];
    const float a = as_float(first), b = as_float(second);
    first = T(a * cosine - b * sine);
    second = T(a * sine + b * cosine);
  }
}

// As RefOps stores them: a tile's largest magnitude becomes e4m3's largest.
__device__ void write_tiles(const __nv_bfloat16* c, int64_t latent, const float* k_rope, int64_t rope, uint8_t* row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int tile = warp; tile < latent / kLatentTile; tile += kThreads / 32) {
    float x[4];
    for (int i = 0; i < 4; ++i) x[i] = __bfloat162float(c[tile * kLatentTile + 4 * lane + i]);
    store_latent_tile(row, latent, tile, x);
  }
  auto* to = reinterpret_cast<__nv_bfloat16*>(LatentTiles(row, latent).k_rope);
  for (int64_t j = threadIdx.x; j < rope; j += kThreads) to[j] = __float2bfloat16_rn(k_rope[j]);
}

__global__ void write_latent_kernel(Tensor c, Tensor k_rope, const int32_t* positions, DeviceSequences sequences,
                                    LatentLayer cache) {
  dependency_wait();
  dependency_trigger();
  const int64_t position = positions[blockIdx.x], page = sequences.row_page[blockIdx.x];
  if (page < 0) return;
  uint8_t* row = cache.base + page * cache.page_bytes + position % 64 * cache.row_bytes;
  if (cache.format == LatentFormat::kF8Tiles)
    return write_tiles(c.row<__nv_bfloat16>(blockIdx.x), c.cols, k_rope.row<float>(blockIdx.x), k_rope.cols, row);
  for (int64_t j = threadIdx.x; j < c.cols + k_rope.cols; j += blockDim.x) {
    const float value =
        j < c.cols ? __bfloat162float(c.row<__nv_bfloat16>(blockIdx.x)[j]) : k_rope.row<float>(blockIdx.x)[j - c.cols];
    if (cache.format == LatentFormat::kBF16)
      reinterpret_cast<__nv_bfloat16*>(row)[j] = __float2bfloat16_rn(value);
    else
      row[j] = __nv_cvt_float_to_fp8(value / cache.scale, __NV_SATFINITE, __NV_E4M3);
  }
}

template <typename T>
__global__ void gather_kernel(Tensor x, const int32_t* rows, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const T* from = x.row<T>(rows[blockIdx.x]);
  for (int64_t c = threadIdx.x; c < y.cols; c += blockDim.x) y.row<T>(blockIdx.x)[c] = from[c];
}

__global__ void gather_latent_kernel(const int32_t* block_table, int64_t begin, LatentLayer cache, int64_t latent,
                                     Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t position = begin + blockIdx.x;
  const uint8_t* from = cache.base + block_table[position / 64] * cache.page_bytes + position % 64 * cache.row_bytes;
  auto* to = reinterpret_cast<uint32_t*>(y.row<uint16_t>(blockIdx.x));
  for (int c = threadIdx.x; c < y.cols / 2; c += blockDim.x) to[c] = latent_pair(cache, from, 2 * c, latent);
}

__global__ void store_kernel(FiveNumbers numbers, int32_t* to) {
  dependency_wait();
  dependency_trigger();
  if (threadIdx.x < 5) to[threadIdx.x] = numbers.values[threadIdx.x];
}

__global__ void head_columns_kernel(const uint16_t* x, HeadColumns from, uint16_t* y, HeadColumns to, int count) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, head = blockIdx.y;
  for (int c = threadIdx.x; c < count; c += blockDim.x)
    y[row * to.stride + head * to.head + to.begin + c] = x[row * from.stride + head * from.head + from.begin + c];
}

}  // namespace

cudaError_t embed_rows(const CudaMatrix& table, int64_t first, const int32_t* tokens, const Tensor& y,
                       cudaStream_t stream) {
  return launch(embed_kernel, shape_of(y.rows, stream), reinterpret_cast<const __nv_bfloat16*>(table.data.data()),
                table.padded_in, first, table.out, tokens, y);
}

cudaError_t rms_norm_rows(const Tensor& x, const Tensor* addend, const float* weight, float eps, const Tensor& y,
                          cudaStream_t stream) {
  if (addend == nullptr && (x.dtype == DType::kBF16 || y.dtype == DType::kF32)) {
    const bool rounded = x.dtype == DType::kBF16;
    const auto kernel = y.dtype == DType::kF32
                            ? (rounded ? hidden_norm_kernel<__nv_bfloat16, float> : hidden_norm_kernel<float, float>)
                            : hidden_norm_kernel<__nv_bfloat16, __nv_bfloat16>;
    return launch(kernel, shape_of(x.rows, stream), x, weight, eps, y);
  }
  CHECK(x.dtype == DType::kF32 && y.dtype == DType::kBF16, "a norm of ", dtype_name(x.dtype), " to ",
        dtype_name(y.dtype));
  const Tensor other = addend == nullptr ? Tensor() : *addend;
  LaunchShape shape = shape_of(x.rows, stream);
  if (in_fours(x) && other.row_stride % 4 == 0) {
    const bool many = x.rows >= kManyRows;
    shape.block = dim3(many ? kNormThreads / kNormSplit : kNormThreads);
    return launch(many ? norm_kernel<kNormSplit> : norm_kernel<1>, shape, x, other, weight, eps, y);
  }
  return launch(rms_norm_kernel, shape, x, other, weight, eps, y);
}

cudaError_t add_rows(const Tensor& residual, const Tensor& y, cudaStream_t stream) {
  return launch(add_kernel, shape_of(blocks_for(y.cols), stream, y.rows), residual, y);
}

cudaError_t round_rows(const Tensor& x, const Tensor& y, cudaStream_t stream) {
  CHECK(x.dtype == DType::kF32 && x.rows == y.rows && x.cols == y.cols);
  if (y.dtype == DType::kF16) {
    CHECK(y.cols % 4 == 0 && x.row_stride % 4 == 0 && y.row_stride % 4 == 0, "terms of ", y.cols, " columns");
    return launch(terms_kernel, shape_of(blocks_for(y.cols / 4), stream, y.rows), x, y);
  }
  CHECK(y.dtype == DType::kBF16, "rows as ", dtype_name(y.dtype));
  return launch(round_kernel, shape_of(blocks_for(y.cols), stream, y.rows), x, y);
}

cudaError_t silu_mul_rows(const Tensor& gate_up, bool interleaved, const Tensor& y, cudaStream_t stream) {
  CHECK(y.cols % 4 == 0 && gate_up.row_stride % 4 == 0 && y.row_stride % 4 == 0, "silu_mul of ", y.cols, " columns");
  return launch(silu_mul_kernel, shape_of(blocks_for(y.cols / 4), stream, y.rows), gate_up, interleaved, y);
}

cudaError_t rope_rows(const Tensor& x, const RopeCall& call, cudaStream_t stream) {
  if (x.dtype == DType::kF32) return launch(rope_kernel<float>, shape_of(x.rows, stream), x, call);
  return launch(rope_kernel<__nv_bfloat16>, shape_of(x.rows, stream), x, call);
}

cudaError_t write_latent_rows(const Tensor& c, const Tensor& k_rope, const Batch& batch, const LatentLayer& cache,
                              cudaStream_t stream) {
  return launch(write_latent_kernel, shape_of(c.rows, stream), c, k_rope, batch.positions.data(), *batch.device, cache);
}

cudaError_t gather_latent_rows(const int32_t* block_table, int64_t begin, const LatentLayer& cache, int64_t latent,
                               const Tensor& y, cudaStream_t stream) {
  return launch(gather_latent_kernel, shape_of(y.rows, stream), block_table, begin, cache, latent, y);
}

cudaError_t store_numbers(const FiveNumbers& numbers, int32_t* to, cudaStream_t stream) {
  return launch(store_kernel, {.grid = dim3(1), .block = dim3(32), .stream = stream}, numbers, to);
}

cudaError_t gather_tensor_rows(const Tensor& x, const int32_t* rows, const Tensor& y, cudaStream_t stream) {
  CHECK(x.dtype == y.dtype && (x.dtype == DType::kF32 || x.dtype == DType::kBF16), "rows of ", dtype_name(x.dtype));
  return launch(x.dtype == DType::kF32 ? gather_kernel<float> : gather_kernel<uint16_t>, shape_of(y.rows, stream), x,
                rows, y);
}

cudaError_t copy_head_columns(const uint16_t* x, HeadColumns from, uint16_t* y, HeadColumns to, dim3 rows_heads_count,
                              cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(rows_heads_count.x, rows_heads_count.y), .block = dim3(64), .stream = stream};
  return launch(head_columns_kernel, shape, x, from, y, to, static_cast<int>(rows_heads_count.z));
}

}  // namespace perigee

#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/gemm/gemm_store.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/gemm/tile_gemm.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kFeatures = 128;  // rows of W in a tile
constexpr int kDepth = 64;      // columns of a stage
constexpr int kStages = 3;
constexpr int kXBytes = kTileRows * kDepth * 2;

// Columns of a stage in bytes, of one row of W.
template <WeightFormat kFormat>
constexpr int kRowBytes = kFormat == WeightFormat::kBF16         ? 128
                          : kFormat == WeightFormat::kF8Block128 ? 64
                                                                 : 32;
template <WeightFormat kFormat>
constexpr int kStageBytes = kXBytes + kFeatures* kRowBytes<kFormat> +
                            (kFormat == WeightFormat::kInt4Group32 ? kFeatures * 4 : 0);

// Where 16 bytes `chunk` of a row lie in its tile: swizzled, so that eight rows of one column meet no bank twice.
template <int kBytes>
__device__ __forceinline__ int place(int row, int chunk) {
  if constexpr (kBytes == 128) return row * 128 + (chunk ^ (row & 7)) * 16;
  if constexpr (kBytes == 64) return row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
  return row * 32 + chunk * 16;
}

struct Matrix {
  const uint8_t* data;  // of this block's expert or head
  const uint8_t* scale;
  int64_t row_bytes, scale_row;
};

// Copies stage `step` (columns 64 * step ...) of x and W.
template <WeightFormat kFormat>
__device__ void load_stage(const GemmCall& c, const Matrix& w, const int* x_rows, uint32_t stage, int step) {
  constexpr int kBytes = kRowBytes<kFormat>, kChunks = kBytes / 16;
  for (int i = threadIdx.x; i < kTileRows * 8; i += kThreads) {
    const int row = i / 8, chunk = i % 8, column = step * kDepth + chunk * 8;
    const bool inside = x_rows[row] >= 0 && column < c.in;
    const uint16_t* from = inside ? c.x + x_rows[row] * c.x_stride + blockIdx.z * c.x_head + column : c.x;
    copy_async16(stage + place<128>(row, chunk), from, inside ? 16 : 0);
  }
  const int first = static_cast<int>(blockIdx.x) * kFeatures;
  for (int i = threadIdx.x; i < kFeatures * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int64_t index = min(first + row, c.out - 1);
    copy_async16(stage + kXBytes + place<kBytes>(row, chunk),
                 w.data + index * w.row_bytes + static_cast<int64_t>(step) * kBytes + chunk * 16);
  }
  if constexpr (kFormat == WeightFormat::kInt4Group32) {
    for (int row = threadIdx.x; row < kFeatures; row += kThreads) {
      const int64_t index = min(first + row, c.out - 1);
      copy_async4(stage + kXBytes + kFeatures * kBytes + row * 4, w.scale + index * w.scale_row + step * 4);
    }
  }
}

// The fragments of W for columns 16 * k ... of four groups of 8 rows from `row` on.
template <WeightFormat kFormat>
__device__ void weight_fragments(const uint8_t* stage, int row, int k, uint32_t (&b)[4][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint8_t* tile = stage + kXBytes;
  if constexpr (kFormat == WeightFormat::kBF16) {
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t r[4];
      const int at = place<128>(row + pair * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
      load_matrix_x4(r, shared_address(tile + at));
      b[2 * pair][0] = r[0], b[2 * pair][1] = r[1], b[2 * pair + 1][0] = r[2], b[2 * pair + 1][1] = r[3];
    }
  } else if constexpr (kFormat == WeightFormat::kInt4Group32) {
    for (int n = 0; n < 4; ++n) {
      const int at = row + n * 8 + g;
      const auto* words = reinterpret_cast<const uint32_t*>(tile + at * 32) + k % 2 * 4 + k / 2;
      const auto* scales = reinterpret_cast<const __nv_bfloat16*>(tile + kFeatures * 32 + at * 4);
      const __nv_bfloat162 scale = __bfloat162bfloat162(scales[k / 2]);
      b[n][0] = int4_pair(words[0], t, scale);
      b[n][1] = int4_pair(words[2], t, scale);
    }
  } else {
    for (int n = 0; n < 4; ++n) {
      const uint8_t* bytes = tile + place<64>(row + n * 8 + g, k) + 2 * t;
      b[n][0] = fp8_pair(*reinterpret_cast<const uint16_t*>(bytes), 0);
      b[n][1] = fp8_pair(*reinterpret_cast<const uint16_t*>(bytes + 8), 0);
    }
  }
}

using Sums = float[4][4][4];  // [16 tokens][8 rows of W][fragment]

template <WeightFormat kFormat>
__device__ void multiply_stage(const uint8_t* stage, int token, int row, Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t b[4][2];
    weight_fragments<kFormat>(stage, row, k, b);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t a[4];
      load_matrix_x4(a, shared_address(stage + place<128>(token + m * 16 + lane % 16, 2 * k + lane / 16)));
#pragma unroll
      for (int n = 0; n < 4; ++n) mma_16x8x16(Bf16(), sum[m][n], a, b[n][0], b[n][1]);
    }
  }
}

// Moves `part` into `sum`, times the FP8 scales of columns 128 * block ...
__device__ void add_scaled(const GemmCall& c, const Matrix& w, int row, int block, Sums& part, Sums& sum) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int index = min(static_cast<int>(blockIdx.x) * kFeatures + row + n * 8, c.out - 1) / 8;
    const float scale = reinterpret_cast<const float*>(w.scale + index * w.scale_row)[block];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[m][n][i] += part[m][n][i] * scale;
        part[m][n][i] = 0;
      }
  }
}

__device__ void store_tile(const GemmCall& c, const int* y_rows, int token, int row, const Sums& sum) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(blockIdx.x) * kFeatures + row;
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int y_row = y_rows[token + m * 16 + g + i / 2 * 8];
      if (y_row < 0) continue;
      const auto at = [&](int column) { return y_row * c.y_stride + blockIdx.z * c.y_head + column; };
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = first + n * 8 + 2 * t + i % 2;
        if (c.output != GemmOutput::kSiluMul) {
          if (column < c.out) store_one(c, at(column), sum[m][n][i]);
        } else if (n % 2 == 0 && column < c.out) {
          store_one(c, at((first + n * 8) / 2 + 2 * t + i % 2), silu_mul(sum[m][n][i], sum[m][n + 1][i]));
        }
      }
    }
}

// Two blocks of the formats that need one set of sums fit a multiprocessor of 80 and 90.
template <WeightFormat kFormat>
constexpr int kBlocks = kFormat == WeightFormat::kF8Block128 ? 1 : 2;

template <WeightFormat kFormat>
__global__ __launch_bounds__(kThreads, kBlocks<kFormat>) void tile_kernel(const GemmCall c, int64_t row_bytes,
                                                                          int64_t scale_row) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int x_rows[kTileRows], y_rows[kTileRows];
  dependency_wait();
  dependency_trigger();
  int64_t matrix = blockIdx.z;
  int begin = static_cast<int>(blockIdx.y) * kTileRows, count = min(kTileRows, c.rows - begin);
  if (c.items != nullptr) {
    if (static_cast<int>(blockIdx.y) >= *c.num_items) return;
    const MoeItem item = c.items[blockIdx.y];
    matrix = item.expert, begin = item.begin, count = item.count;
  }
  for (int i = threadIdx.x; i < kTileRows; i += kThreads) {
    const int row = i >= count ? -1 : c.items != nullptr ? c.pairs[begin + i] : begin + i;
    y_rows[i] = row;
    x_rows[i] = row < 0 ? -1 : row / c.x_divisor;
  }
  __syncthreads();
  const Matrix w{c.weight + matrix * c.weight_stride, static_cast<const uint8_t*>(c.scale) + matrix * c.scale_stride,
                 row_bytes, scale_row};
  constexpr int kStage = kStageBytes<kFormat>;
  const int steps = c.chunks * 2, warp = threadIdx.x / 32;
  const int token = warp / 4 * 64, row = warp % 4 * 32;
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) load_stage<kFormat>(c, w, x_rows, shared_address(shared) + s * kStage, s);
    copy_async_commit();
  }
  Sums sum = {};
  [[maybe_unused]] Sums part = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const int ahead = step + kStages - 1;
    if (ahead < steps) load_stage<kFormat>(c, w, x_rows, shared_address(shared) + ahead % kStages * kStage, ahead);
    copy_async_commit();
    const uint8_t* stage = shared + step % kStages * kStage;
    if constexpr (kFormat == WeightFormat::kF8Block128) {
      multiply_stage<kFormat>(stage, token, row, part);
      if (step % 2 == 1) add_scaled(c, w, row, step / 2, part, sum);
    } else {
      multiply_stage<kFormat>(stage, token, row, sum);
    }
  }
  store_tile(c, y_rows, token, row, sum);
}

template <WeightFormat kFormat>
cudaError_t launch_tile(const GemmCall& c, cudaStream_t stream) {
  constexpr size_t kShared = static_cast<size_t>(kStages) * kStageBytes<kFormat>;
  const cudaError_t allowed = allow_shared_once<tile_kernel<kFormat>>(kShared);
  if (allowed != cudaSuccess) return allowed;
  const int tiles = c.items != nullptr ? c.max_items : (c.rows + kTileRows - 1) / kTileRows;
  const dim3 grid(static_cast<unsigned>((c.out + kFeatures - 1) / kFeatures), static_cast<unsigned>(tiles),
                  static_cast<unsigned>(c.heads));
  const int64_t columns = static_cast<int64_t>(c.chunks) * 128;
  const int64_t scale_row = kFormat == WeightFormat::kF8Block128 ? columns / 128 * 4 : columns / 32 * 2;
  return launch(tile_kernel<kFormat>,
                {.grid = grid, .block = dim3(kThreads), .shared_bytes = kShared, .stream = stream}, c,
                columns / kDepth * kRowBytes<kFormat>, scale_row);
}

}  // namespace

cudaError_t tile_gemm(WeightFormat format, const GemmCall& call, cudaStream_t stream) {
  switch (format) {
    case WeightFormat::kInt4Group32: return launch_tile<WeightFormat::kInt4Group32>(call, stream);
    case WeightFormat::kF8Block128: return launch_tile<WeightFormat::kF8Block128>(call, stream);
    default: return launch_tile<WeightFormat::kBF16>(call, stream);
  }
}

}  // namespace perigee

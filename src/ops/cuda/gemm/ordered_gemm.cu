// Sums as skinny.cu makes them: chunks of 128 columns are divided among parts, every skinny_parts()-th to one; a chunk
// is a chain of eight products from 0 on, chunks add up in their part, parts in their order. A product's columns are
// those that a lane there loads at once. Here a warp runs through the parts one after another.
#include "ops/cuda/gemm/dequant.cuh"
#include "ops/cuda/gemm/gemm_store.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/gemm/ordered_gemm.h"

namespace perigee {
namespace {

constexpr int kThreads = 384;
constexpr int kFeatures = 128;  // rows of W in a tile
constexpr int kDepth = 64;      // columns of a stage: half a chunk
constexpr int kStages = 3;
constexpr int kXBytes = kOrderedRows * kDepth * 2;

template <bool kFp8>
constexpr int kStageBytes = kXBytes + kFeatures* kDepth*(kFp8 ? 1 : 2);

// Where 16 bytes `chunk` of a row of kBytes lie in its tile: two neighbouring rows' halves or wholes meet no bank
// twice.
template <int kBytes>
__device__ __forceinline__ int place(int row, int chunk) {
  return kBytes == 128 ? row * 128 + (chunk ^ (row & 1) << 2) * 16 : row * 64 + chunk * 16;
}

// The halves of chunks in the order in which they are summed.
struct Walk {
  int chunks, parts;
  int part = 0, chunk = 0, half = 0;

  __device__ bool done() const { return part == parts; }
  __device__ int column() const { return chunk * 128 + half * kDepth; }
  __device__ bool ends_part() const { return half == 1 && chunk + parts >= chunks; }
  __device__ void next() {
    half ^= 1;
    if (half == 1) return;
    chunk += parts;
    if (chunk >= chunks) chunk = ++part;
  }
};

struct Matrix {
  const uint8_t* data;  // of this block's expert or head
  const uint8_t* scale;
  int first;  // row of W of the tile
};

// Brings 64 columns of x and W at a time. A thread copies the same 16 bytes of the same rows each time.
template <bool kFp8>
struct Loader {
  static constexpr int kBytes = kDepth * (kFp8 ? 1 : 2), kChunks = kBytes / 16;  // of a row of W
  static constexpr int kXCopies = kOrderedRows * 8 / kThreads;
  static constexpr int kWCopies = (kFeatures * kChunks + kThreads - 1) / kThreads;
  static_assert(kThreads % 8 == 0 && kOrderedRows * 8 % kThreads == 0);
  const uint16_t* x[kXCopies];
  const uint8_t* w[kWCopies];
  int in;

  __device__ Loader(const GemmCall& c, const Matrix& matrix, const int* x_rows) : in(c.in) {
#pragma unroll
    for (int i = 0; i < kXCopies; ++i)
      x[i] = c.x + x_rows[threadIdx.x / 8 + i * (kThreads / 8)] * c.x_stride + blockIdx.z * c.x_head;
#pragma unroll
    for (int i = 0; i < kWCopies; ++i) {
      const int row = min(matrix.first + static_cast<int>(threadIdx.x + i * kThreads) / kChunks, c.out - 1);
      w[i] = matrix.data + static_cast<int64_t>(row) * c.chunks * 2 * kBytes + threadIdx.x % kChunks * 16;
    }
  }
  __device__ void load(uint32_t stage, int column) const {
    const int at = column + threadIdx.x % 8 * 8;
    const bool inside = at < in;  // zeros past the last column
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const int row = threadIdx.x / 8 + i * (kThreads / 8);
      copy_async16(stage + place<128>(row, threadIdx.x % 8), x[i] + (inside ? at : 0), inside ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kWCopies; ++i) {
      const int row = (threadIdx.x + i * kThreads) / kChunks;
      if (row < kFeatures)
        copy_async16(stage + kXBytes + place<kBytes>(row, threadIdx.x % kChunks), w[i] + column / kDepth * kBytes);
    }
  }
};

constexpr int kRowTiles = 2, kTokenTiles = 4;  // of a warp: 32 rows of W by 32 tokens
using Sums = float[kRowTiles][kTokenTiles][4];

// Left operands of two products, of columns j of 16 rows of W from `row` on.
template <bool kFp8>
__device__ __forceinline__ void left_operands(const uint8_t* tile, int row, int j, uint32_t (&low)[4],
                                              uint32_t (&high)[4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint4 pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = row + 8 * i + g;
    if constexpr (kFp8) {
      const uint2 words = *reinterpret_cast<const uint2*>(tile + place<64>(at, t) + j * 8);
      pairs[i] = {fp8_pair(words.x, 0), fp8_pair(words.x, 2), fp8_pair(words.y, 0), fp8_pair(words.y, 2)};
    } else {
      pairs[i] = *reinterpret_cast<const uint4*>(tile + place<128>(at, j * 4 + t));
    }
  }
  low[0] = pairs[0].x, low[1] = pairs[1].x, low[2] = pairs[0].y, low[3] = pairs[1].y;
  high[0] = pairs[0].z, high[1] = pairs[1].z, high[2] = pairs[0].w, high[3] = pairs[1].w;
}

// part += 64 columns of the warp's rows of W and tokens.
template <bool kFp8>
__device__ __forceinline__ void multiply_stage(const uint8_t* stage, int row, int token, Sums& part) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t low[kRowTiles][4], high[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) left_operands<kFp8>(stage + kXBytes, row + m * 16, j, low[m], high[m]);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int chunk = kFp8 ? t * 2 + j : j * 4 + t;
      const uint4 x = *reinterpret_cast<const uint4*>(stage + place<128>(token + n * 8 + g, chunk));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_16x8x16(Bf16(), part[m][n], low[m], x.x, x.y);
        mma_16x8x16(Bf16(), part[m][n], high[m], x.z, x.w);
      }
    }
  }
}

// Moves a chunk's sums into its part's.
template <bool kFp8>
__device__ void add_chunk(const GemmCall& c, const Matrix& w, int row, int chunk, Sums& chunk_sum, Sums& sum) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    float scale[2] = {1, 1};
    for (int i = 0; kFp8 && i < 2; ++i) {
      const int block = min(w.first + row + m * 16 + i * 8, c.out - 1) / 8;
      scale[i] = __ldg(reinterpret_cast<const float*>(w.scale) + static_cast<int64_t>(block) * c.chunks + chunk);
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[m][n][i] = fmaf(chunk_sum[m][n][i], scale[i / 2], sum[m][n][i]);
        chunk_sum[m][n][i] = 0;
      }
  }
}

__device__ void add_part(Sums& sum, Sums& total) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kTokenTiles * 4; ++i) {
    float& from = sum[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4];
    total[i / (kTokenTiles * 4)][i / 4 % kTokenTiles][i % 4] += from;
    from = 0;
  }
}

__device__ void store_tile(const GemmCall& c, const int* y_rows, int first_row, int token, const Sums& total) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int y_row = y_rows[token + n * 8 + 2 * t + i];
      if (y_row < 0) continue;
      const int64_t at = y_row * c.y_stride + blockIdx.z * c.y_head;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        store_two(c, at, first_row + m * 16, g, total[m][n][i], total[m][n][i + 2]);
      }
    }
}

template <bool kFp8>
__global__ __launch_bounds__(kThreads, 1) void ordered_kernel(const __grid_constant__ GemmCall c, int parts) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int x_rows[kOrderedRows], y_rows[kOrderedRows];
  dependency_wait();
  dependency_trigger();
  int64_t matrix = blockIdx.z;
  int begin = static_cast<int>(blockIdx.y) * kOrderedRows, count = min(kOrderedRows, c.rows - begin);
  if (c.items != nullptr) {
    if (static_cast<int>(blockIdx.y) >= *c.num_items) return;
    const MoeItem item = c.items[blockIdx.y];
    matrix = item.expert, begin = item.begin, count = item.count;
  }
  for (int i = threadIdx.x; i < kOrderedRows; i += kThreads) {
    // Of tokens that are not there nothing is stored: the last stands for them.
    const int index = begin + min(i, count - 1), row = c.items != nullptr ? c.pairs[index] : index;
    y_rows[i] = i < count ? row : -1;
    x_rows[i] = row / c.x_divisor;
  }
  __syncthreads();
  const Matrix w{c.weight + matrix * c.weight_stride, static_cast<const uint8_t*>(c.scale) + matrix * c.scale_stride,
                 static_cast<int>(blockIdx.x) * kFeatures};
  const int warp = threadIdx.x / 32, row = warp % 4 * 32, token = warp / 4 * 32;
  const Loader<kFp8> loader(c, w, x_rows);
  Walk ahead{c.chunks, parts};
  const auto load = [&](int stage) {
    if (!ahead.done()) {
      loader.load(shared_address(shared) + stage * kStageBytes<kFp8>, ahead.column());
      ahead.next();
    }
    copy_async_commit();
  };
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  Sums chunk_sum = {}, sum = {}, total = {};
  int stage = 0;
  for (Walk at{c.chunks, parts}; !at.done(); at.next()) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    load((stage + kStages - 1) % kStages);
    if (token < count) multiply_stage<kFp8>(shared + stage * kStageBytes<kFp8>, row, token, chunk_sum);
    if (at.half == 1) add_chunk<kFp8>(c, w, row, at.chunk, chunk_sum, sum);
    if (at.ends_part()) add_part(sum, total);
    stage = (stage + 1) % kStages;
  }
  store_tile(c, y_rows, w.first + row, token, total);
}

template <bool kFp8>
cudaError_t launch_ordered(const GemmCall& c, cudaStream_t stream) {
  constexpr size_t kShared = static_cast<size_t>(kStages) * kStageBytes<kFp8>;
  static_assert(kShared <= 98 * 1024);
  const cudaError_t allowed = allow_shared_once<ordered_kernel<kFp8>>(kShared);
  if (allowed != cudaSuccess) return allowed;
  const int tiles = c.items != nullptr ? c.max_items : (c.rows + kOrderedRows - 1) / kOrderedRows;
  const dim3 grid(static_cast<unsigned>((c.out + kFeatures - 1) / kFeatures), static_cast<unsigned>(tiles),
                  static_cast<unsigned>(c.heads));
  return launch(ordered_kernel<kFp8>,
                {.grid = grid, .block = dim3(kThreads), .shared_bytes = kShared, .stream = stream}, c, skinny_parts(c));
}

}  // namespace

cudaError_t ordered_gemm(WeightFormat format, const GemmCall& call, cudaStream_t stream) {
  if (!ordered_gemm_has(format)) return cudaErrorInvalidValue;
  return format == WeightFormat::kBF16 ? launch_ordered<false>(call, stream) : launch_ordered<true>(call, stream);
}

}  // namespace perigee

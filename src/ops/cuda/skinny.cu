#include "ops/cuda/dequant.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/skinny.h"

namespace perigee {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kAhead = 2;  // chunks of weights that a warp has under way

__device__ __forceinline__ uint4 load_weights(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// What a lane holds of 128 columns of rows g and g + 8 of its tile, and the column of x that goes with its 8 columns j.
// pair(row, j, i) is the bf16 pair i of 8 columns j.
template <WeightFormat>
struct Chunk;

template <>
struct Chunk<WeightFormat::kBF16> {
  uint4 w[2][4];
  __device__ void load(const uint8_t* const (&row)[2], const uint8_t* const (&)[2], int chunk, int t) {
    for (int r = 0; r < 2; ++r)
      for (int j = 0; j < 4; ++j) w[r][j] = load_weights(row[r] + chunk * 256 + j * 64 + t * 16);
  }
  __device__ static int column(int j, int t) { return j * 32 + t * 8; }
  __device__ uint32_t pair(int r, int j, int i) const {
    return i == 0 ? w[r][j].x : i == 1 ? w[r][j].y : i == 2 ? w[r][j].z : w[r][j].w;
  }
  __device__ float scale(int) const { return 1.0f; }
};

template <>
struct Chunk<WeightFormat::kInt4Group32> {
  uint4 w[2];
  __nv_bfloat162 s[2];
  __device__ void load(const uint8_t* const (&row)[2], const uint8_t* const (&scale)[2], int chunk, int t) {
    for (int r = 0; r < 2; ++r) {
      w[r] = load_weights(row[r] + chunk * 64 + t * 16);
      s[r] = __bfloat162bfloat162(reinterpret_cast<const __nv_bfloat16*>(scale[r])[chunk * 4 + t]);
    }
  }
  __device__ static int column(int j, int t) { return t * 32 + j * 8; }
  __device__ uint32_t pair(int r, int j, int i) const {
    return int4_pair(j == 0 ? w[r].x : j == 1 ? w[r].y : j == 2 ? w[r].z : w[r].w, i, s[r]);
  }
  __device__ float scale(int) const { return 1.0f; }
};

template <>
struct Chunk<WeightFormat::kF8Block128> {
  uint4 w[2][2];
  float s[2];
  __device__ void load(const uint8_t* const (&row)[2], const uint8_t* const (&scale)[2], int chunk, int t) {
    for (int r = 0; r < 2; ++r) {
      for (int j = 0; j < 2; ++j) w[r][j] = load_weights(row[r] + chunk * 128 + j * 64 + t * 16);
      s[r] = reinterpret_cast<const float*>(scale[r])[chunk];
    }
  }
  __device__ static int column(int j, int t) { return j / 2 * 64 + t * 16 + j % 2 * 8; }
  __device__ uint32_t pair(int r, int j, int i) const {
    const uint4& v = w[r][j / 2];
    const uint32_t word = j % 2 == 0 ? (i < 2 ? v.x : v.y) : (i < 2 ? v.z : v.w);
    return fp8_pair(word, i % 2 * 2);
  }
  __device__ float scale(int r) const { return s[r]; }
};

template <WeightFormat kFormat, int kTiles>
__device__ void multiply_chunk(const Chunk<kFormat>& a, const uint4 (&x)[kTiles][4], float (&sum)[kTiles][4]) {
  float part[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low[4] = {a.pair(0, j, 0), a.pair(1, j, 0), a.pair(0, j, 1), a.pair(1, j, 1)};
    const uint32_t high[4] = {a.pair(0, j, 2), a.pair(1, j, 2), a.pair(0, j, 3), a.pair(1, j, 3)};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_16x8x16(Bf16(), part[n], low, x[n][j].x, x[n][j].y);
      mma_16x8x16(Bf16(), part[n], high, x[n][j].z, x[n][j].w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += part[n][i] * a.scale(i / 2);
}

// What goes with a chunk of the weights: columns of this lane's tokens, zeros beyond the last.
template <WeightFormat kFormat, int kTiles>
__device__ void load_x(const uint16_t* const (&x)[kTiles], int chunk, int t, int in, uint4 (&b)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = chunk * 128 + Chunk<kFormat>::column(j, t);
      b[n][j] = x[n] != nullptr && column < in ? *reinterpret_cast<const uint4*>(x[n] + column) : uint4{0, 0, 0, 0};
    }
}

// The tokens of a block: rows of x and y.
struct Tokens {
  int expert = 0, begin = 0, count = 0;
  const int32_t* pairs = nullptr;
  int x_divisor = 1;
  __device__ int row(int m) const { return pairs == nullptr ? begin + m : pairs[begin + m]; }
};

__device__ Tokens find_tokens(const GemmCall& c, int item_rows) {
  Tokens tokens;
  const int item = static_cast<int>(blockIdx.y);
  if (c.items != nullptr) {
    if (item >= *c.num_items) return tokens;
    const MoeItem found = c.items[item];
    tokens = {.expert = found.expert, .begin = found.begin, .count = found.count, .pairs = c.pairs};
  } else if (c.expert_ids != nullptr) {
    tokens = {.expert = c.expert_ids[item], .begin = item, .count = 1};
  } else {
    tokens = {.begin = item * item_rows, .count = min(item_rows, c.rows - item * item_rows)};
  }
  tokens.x_divisor = c.x_divisor;
  return tokens;
}

// y's element of token m and row r of the block's `first` tile on.
__device__ void store(const GemmCall& c, int64_t y_row, int column, float value) {
  const int64_t at = y_row * c.y_stride + blockIdx.z * c.y_head + column;
  if (c.output == GemmOutput::kF32)
    static_cast<float*>(c.y)[at] = value;
  else
    static_cast<__nv_bfloat16*>(c.y)[at] = __float2bfloat16_rn(value);
}

// Adds the warps' parts in their order and stores. partial[warp][row of 16][token].
template <int kTiles>
__device__ void finish(const GemmCall& c, const Tokens& tokens, int warps_k, const float (*partial)[128 * kTiles]) {
  constexpr int kTokens = 8 * kTiles;
  const int tiles = kWarps / warps_k;
  const bool silu = c.output == GemmOutput::kSiluMul;
  const int tile_rows = silu ? 8 : 16;
  const auto sum = [&](int tile, int row, int m) {
    float total = 0;
    for (int w = 0; w < warps_k; ++w) total += partial[tile * warps_k + w][row * kTokens + m];
    return total;
  };
  for (int i = threadIdx.x; i < tiles * tile_rows * tokens.count; i += kThreads) {
    const int row = i % tile_rows, tile = i / tile_rows % tiles, m = i / (tile_rows * tiles);
    const int column = static_cast<int>(blockIdx.x * tiles + tile) * tile_rows + row;
    if (column >= (silu ? c.out / 2 : c.out)) continue;
    float value = sum(tile, row, m);
    if (silu) value = value / (1.0f + __expf(-value)) * sum(tile, row + 8, m);
    store(c, tokens.row(m), column, value);
  }
}

template <WeightFormat kFormat, int kTiles>
__global__ __launch_bounds__(kThreads, kTiles == 4 ? 1 : 2) void skinny_kernel(const GemmCall c, int64_t row_bytes,
                                                                               int64_t scale_row, int warps_k) {
  __shared__ float partial[kWarps][128 * kTiles];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp % warps_k;
  const int tile = static_cast<int>(blockIdx.x) * (kWarps / warps_k) + warp / warps_k;
  const bool grouped = c.items != nullptr || c.expert_ids != nullptr;
  if (grouped) dependency_wait();
  const Tokens tokens = find_tokens(c, 8 * kTiles);
  if (tokens.count == 0) {
    dependency_trigger();
    return;
  }
  const int64_t matrix = grouped ? tokens.expert : static_cast<int>(blockIdx.z);
  const uint8_t* row[2];
  const uint8_t* scale[2] = {};
  for (int r = 0; r < 2; ++r) {
    const int64_t index = min(tile * 16 + g + 8 * r, c.out - 1);
    row[r] = c.weight + matrix * c.weight_stride + index * row_bytes;
    const int64_t scale_index = kFormat == WeightFormat::kF8Block128 ? index / 8 : index;
    if (c.scale != nullptr)
      scale[r] = static_cast<const uint8_t*>(c.scale) + matrix * c.scale_stride + scale_index * scale_row;
  }
  // Two chunks under way while one is multiplied. Weights never change: no need to wait for other kernels.
  Chunk<kFormat> ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (part + i * warps_k < c.chunks) ahead[i].load(row, scale, part + i * warps_k, t);
  if (!grouped) dependency_wait();
  dependency_trigger();

  const uint16_t* x[kTiles];
  for (int n = 0; n < kTiles; ++n) {
    const int m = n * 8 + g;
    x[n] = m < tokens.count ? c.x + tokens.row(m) / tokens.x_divisor * c.x_stride + blockIdx.z * c.x_head : nullptr;
  }
  float sum[kTiles][4] = {};
  for (int first = part; first < c.chunks; first += kAhead * warps_k) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i * warps_k;
      if (chunk >= c.chunks) break;
      uint4 b[kTiles][4];
      load_x<kFormat, kTiles>(x, chunk, t, c.in, b);
      multiply_chunk<kFormat, kTiles>(ahead[i], b, sum);
      if (chunk + kAhead * warps_k < c.chunks) ahead[i].load(row, scale, chunk + kAhead * warps_k, t);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][(g + i / 2 * 8) * 8 * kTiles + n * 8 + 2 * t + i % 2] = sum[n][i];
  __syncthreads();
  finish<kTiles>(c, tokens, warps_k, partial);
}

template <WeightFormat kFormat, int kTiles>
cudaError_t launch_skinny(const GemmCall& c, cudaStream_t stream) {
  int warps_k = kWarps;
  while (warps_k > 1 && warps_k > c.chunks) warps_k /= 2;
  const bool grouped = c.items != nullptr || c.expert_ids != nullptr;
  const int tiles = (c.out + 15) / 16, tiles_block = kWarps / warps_k;
  const int item_rows = 8 * kTiles;
  const dim3 grid(static_cast<unsigned>((tiles + tiles_block - 1) / tiles_block),
                  static_cast<unsigned>(grouped ? c.max_items : (c.rows + item_rows - 1) / item_rows),
                  static_cast<unsigned>(c.heads));
  const int64_t columns = static_cast<int64_t>(c.chunks) * 128;
  const int64_t row_bytes = kFormat == WeightFormat::kBF16         ? columns * 2
                            : kFormat == WeightFormat::kF8Block128 ? columns
                                                                   : columns / 2;
  const int64_t scale_row = kFormat == WeightFormat::kF8Block128 ? columns / 128 * 4 : columns / 32 * 2;
  return launch(skinny_kernel<kFormat, kTiles>, {.grid = grid, .block = dim3(kThreads), .stream = stream}, c, row_bytes,
                scale_row, warps_k);
}

template <WeightFormat kFormat>
cudaError_t launch_tiles(const GemmCall& c, int item_rows, cudaStream_t stream) {
  if (item_rows <= 8) return launch_skinny<kFormat, 1>(c, stream);
  if (item_rows <= 16) return launch_skinny<kFormat, 2>(c, stream);
  return launch_skinny<kFormat, 4>(c, stream);
}

}  // namespace

cudaError_t skinny_gemm(WeightFormat format, const GemmCall& call, int item_rows, cudaStream_t stream) {
  switch (format) {
    case WeightFormat::kInt4Group32: return launch_tiles<WeightFormat::kInt4Group32>(call, item_rows, stream);
    case WeightFormat::kF8Block128: return launch_tiles<WeightFormat::kF8Block128>(call, item_rows, stream);
    default: return launch_tiles<WeightFormat::kBF16>(call, item_rows, stream);
  }
}

}  // namespace perigee

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/check.h"
#include "ops/cuda/full/full_attention.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kKeys = static_cast<int>(kRowsOfBlock);
constexpr int kMostParts = 64;
constexpr float kLog2E = 1.4426950408889634f;

struct Args {
  Tensor q, out;
  DeviceSequences sequences;
  FullLayer cache;
  int heads, group, first, parts;
  float scale;  // of scores, in powers of two
  float* partials;
};

// How a head's keys and values of kDim numbers lie in shared memory and in registers. A thread (g, t) of a warp, g =
// its number / 4 and t = its number % 4, reads whole chunks; which of a row's numbers stand for which place of a
// product is free, as long as both operands agree.
template <int kDim, bool kFp8>
struct Layout {
  using Element = std::conditional_t<kFp8, F16, Bf16>;
  static constexpr int kRowBytes = kFp8 ? kDim : 2 * kDim, kTileBytes = kKeys * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;  // of a row
  // Keys: a thread's run of numbers in a row, and how many such runs it has.
  static constexpr int kRun = kFp8 ? std::min(16, kDim / 4) : 8, kRuns = kDim / (4 * kRun);

  // Rows that meet the same banks have their chunks in another order.
  static __device__ int key_chunk(int row, int chunk) {
    if constexpr (kChunks >= 8) return chunk ^ ((kFp8 ? row * 4 : row) & 7);
    return chunk;
  }
  static __device__ int value_chunk(int row, int chunk) {
    if constexpr (kChunks >= 8) return chunk ^ (row & 7);
    if constexpr (kChunks >= 4) return chunk ^ (row / 2 & 3);
    return chunk;
  }
  // Of the 8 columns of product j, that of column c in the head.
  static __device__ int value_column(int j, int c) { return kFp8 ? c * (kDim / 8) + j : 8 * j + c; }
  // The first of the numbers that step s of the products with keys has from thread t: two, and the two after.
  static __device__ int key_column(int s, int t) {
    constexpr int kSteps = kRun / 4;  // of a run
    return s / kSteps * 4 * kRun + t * kRun + s % kSteps * 4;
  }
};

template <int kDim, bool kFp8, bool kFew>
class Attend {
 public:
  using L = Layout<kDim, kFp8>;
  static constexpr int kRows = kFew ? 16 : 16 * kWarps;  // queries of a block
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * 2 * L::kTileBytes;
  static_assert(!kFew || kWarps * 16 * (kDim + 2) * 4 <= kSharedBytes, "warps join their results where tiles lay");

  __device__ Attend(const Args& args, uint8_t* shared)
      : args_(args), shared_(shared), g_(threadIdx.x % 32 / 4), t_(threadIdx.x % 4), warp_(threadIdx.x / 32) {}

  __device__ void run() {
    const int s = args_.first + static_cast<int>(blockIdx.z);
    first_row_ = args_.sequences.first_row[s];
    const int count = args_.sequences.first_row[s + 1] - first_row_, length = args_.sequences.lengths[s];
    // The last tile first: it sees most.
    const int tile = static_cast<int>(gridDim.x) / args_.parts - 1 - static_cast<int>(blockIdx.x) / args_.parts;
    first_query_ = tile * kRows;
    num_queries_ = count * args_.group;
    part_ = static_cast<int>(blockIdx.x) % args_.parts;
    head_ = static_cast<int>(blockIdx.y);
    if (first_query_ >= num_queries_) return;
    position_ = length - count;
    table_ = args_.sequences.block_tables + static_cast<int64_t>(s) * args_.sequences.table_width;
    // What the last query of the block sees. Padding of a verify row may lie beyond the last block of the table.
    const int last = min(first_query_ + kRows, num_queries_) - 1;
    end_ = length == 0 ? 0 : min(position_ + last / args_.group + 1, args_.sequences.table_width * kKeys);
    const int last_of_warp = kFew ? last : min(first_query_ + 16 * warp_ + 15, last);
    const bool idle = !kFew && first_query_ + 16 * warp_ > last;
    end_of_warp_ = idle ? 0 : min(position_ + last_of_warp / args_.group + 1, end_);
    const int blocks = (end_ + kKeys - 1) / kKeys, each = (blocks + args_.parts - 1) / args_.parts;
    const int begin = part_ * each, end = min(begin + each, blocks);
    if (begin < end) {
      load_queries();
      attend_blocks(begin, end);
    }
    if constexpr (kFew) join_warps();
    finish();
  }

 private:
  __device__ int query_of(int half) const { return first_query_ + (kFew ? 0 : 16 * warp_) + g_ + 8 * half; }
  __device__ uint8_t* keys(int block) const { return shared_ + block % kStages * 2 * L::kTileBytes; }
  __device__ uint8_t* values(int block) const { return keys(block) + L::kTileBytes; }

  // Rows beyond the last token are zeros: what was there before may be NaN.
  __device__ void load(int block) {
    const int64_t page = table_[block];
    const int seen = end_ - block * kKeys;
    const uint8_t* from_keys = args_.cache.keys(page, head_);
    const uint8_t* from_values = args_.cache.values(page, head_);
    const uint32_t to_keys = shared_address(keys(block)), to_values = shared_address(values(block));
#pragma unroll
    for (int i = threadIdx.x; i < kKeys * L::kChunks; i += kThreads) {
      const int row = i / L::kChunks, chunk = i % L::kChunks, bytes = row < seen ? 16 : 0;
      copy_async16(to_keys + row * L::kRowBytes + 16 * L::key_chunk(row, chunk), from_keys + 16 * i, bytes);
      copy_async16(to_values + row * L::kRowBytes + 16 * L::value_chunk(row, chunk), from_values + 16 * i, bytes);
    }
  }

  __device__ void load_queries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(query_of(half), num_queries_ - 1);
      const uint16_t* q = args_.q.row<const uint16_t>(first_row_ + query / args_.group) +
                          (head_ * args_.group + query % args_.group) * kDim;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(q + L::key_column(step, t_));
        q_[step][half] = kFp8 ? bf16_pair_to_f16(pairs.x) : pairs.x;
        q_[step][2 + half] = kFp8 ? bf16_pair_to_f16(pairs.y) : pairs.y;
      }
    }
  }

  __device__ void attend_blocks(int begin, int end) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (begin + i < end) load(begin + i);
      copy_async_commit();
    }
    for (int block = begin; block < end; ++block) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      if (block + kStages - 1 < end) load(block + kStages - 1);
      copy_async_commit();
      if constexpr (kFew) {
        attend_keys(block, 16 * warp_);
      } else {
#pragma unroll 1
        for (int first = 0; first < kKeys; first += 16) attend_keys(block, first);
      }
    }
    copy_async_wait<0>();
    __syncthreads();
  }

  // 16 keys of a block, from `first` on.
  __device__ void attend_keys(int block, int first) {
    if (block * kKeys + first >= end_of_warp_) return;
    float scores[2][4] = {};
    multiply_keys(keys(block), first, scores);
    float largest[2] = {max_[0], max_[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = position_ + query_of(half) / args_.group + 1 - block * kKeys - first;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n][2 * half + i];
          score = 8 * n + 2 * t_ + i < seen ? score * args_.scale : -INFINITY;
          largest[half] = fmaxf(largest[half], score);
        }
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
    }
    uint32_t weights[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = largest[half] == -INFINITY ? 0 : largest[half];
      if (largest[half] > max_[half]) {
        const float factor = exp2_fast(max_[half] - shift);
        sum_[half] *= factor;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) acc_[j][2 * half] *= factor, acc_[j][2 * half + 1] *= factor;
        max_[half] = largest[half];
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float a = exp2_fast(scores[n][2 * half] - shift), b = exp2_fast(scores[n][2 * half + 1] - shift);
        sum_[half] += a + b;
        weights[2 * n + half] = pack_pair(typename L::Element(), a, b);
      }
    }
    multiply_values(values(block), first, weights);
  }

  __device__ void multiply_keys(const uint8_t* tile, int first, float (&scores)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = first + 8 * n + g_;
#pragma unroll
      for (int r = 0; r < L::kRuns; ++r) {
        constexpr int kRunBytes = L::kRun * (kFp8 ? 1 : 2);
        const int byte = (r * 4 + t_) * kRunBytes;
        const uint8_t* at = tile + row * L::kRowBytes + 16 * L::key_chunk(row, byte / 16) + byte % 16;
        uint32_t words[kRunBytes / 4];
        if constexpr (kRunBytes == 16)
          *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(at);
        else
          *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(at);
#pragma unroll
        for (int i = 0; i < L::kRun / 4; ++i) {
          uint32_t low = words[kFp8 ? i : 2 * i], high = words[kFp8 ? i : 2 * i + 1];
          if constexpr (kFp8) e4m3x4_to_f16(words[i], low, high);
          mma_16x8x16(typename L::Element(), scores[n], q_[r * (L::kRun / 4) + i], low, high);
        }
      }
    }
  }

  __device__ void multiply_values(const uint8_t* tile, int first, const uint32_t (&weights)[4]) {
    if constexpr (kFp8)
      multiply_e4m3(tile, first, weights);
    else
      multiply_bf16(tile, first, weights);
  }

  __device__ void multiply_bf16(const uint8_t* tile, int first, const uint32_t (&weights)[4]) {
    const int lane = threadIdx.x % 32, row = first + lane % 16;
#pragma unroll
    for (int j = 0; j < kDim / 8; j += 2) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, shared_address(tile + row * L::kRowBytes + 16 * L::value_chunk(row, j + lane / 16)));
      mma_16x8x16(Bf16(), acc_[j], weights, b[0], b[1]);
      mma_16x8x16(Bf16(), acc_[j + 1], weights, b[2], b[3]);
    }
  }

  // A thread reads kDim / 8 numbers of four keys and makes pairs of two keys.
  __device__ void multiply_e4m3(const uint8_t* tile, int first, const uint32_t (&weights)[4]) {
    constexpr int kBytes = kDim / 8;
    uint32_t words[4][kBytes / 4];  // of keys 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = first + 2 * t_ + k % 2 + k / 2 * 8, byte = g_ * kBytes;
      const uint8_t* at = tile + row * L::kRowBytes + 16 * L::value_chunk(row, byte / 16) + byte % 16;
      if constexpr (kBytes == 16)
        *reinterpret_cast<uint4*>(words[k]) = *reinterpret_cast<const uint4*>(at);
      else if constexpr (kBytes == 8)
        *reinterpret_cast<uint2*>(words[k]) = *reinterpret_cast<const uint2*>(at);
      else
        words[k][0] = *reinterpret_cast<const uint32_t*>(at);
    }
#pragma unroll
    for (int w = 0; w < kBytes / 4; ++w) {
      uint32_t low[4], high[4];  // of four columns, the first two keys' pairs and the last two's
      e4m3x4_to_f16(__byte_perm(words[0][w], words[1][w], 0x5140), low[0], low[1]);
      e4m3x4_to_f16(__byte_perm(words[0][w], words[1][w], 0x7362), low[2], low[3]);
      e4m3x4_to_f16(__byte_perm(words[2][w], words[3][w], 0x5140), high[0], high[1]);
      e4m3x4_to_f16(__byte_perm(words[2][w], words[3][w], 0x7362), high[2], high[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_16x8x16(F16(), acc_[4 * w + i], weights, low[i], high[i]);
    }
  }

  // The warps' results into the first one's registers, in their order.
  __device__ void join_warps() {
    sum_threads();
    auto* results = reinterpret_cast<float*>(shared_);  // [warp][row][kDim + 2]
    constexpr int kStride = kDim + 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = results + (16 * warp_ + g_ + 8 * half) * kStride;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) row[8 * j + 2 * t_ + i] = acc_[j][2 * half + i];
      if (t_ == 0) row[kDim] = max_[half], row[kDim + 1] = sum_[half];
    }
    __syncthreads();
    if (warp_ > 0) return;
    for (int other = 1; other < kWarps; ++other)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* row = results + (16 * other + g_ + 8 * half) * kStride;
        const float max = fmaxf(max_[half], row[kDim]), shift = max == -INFINITY ? 0 : max;
        const float mine = exp2_fast(max_[half] - shift), theirs = exp2_fast(row[kDim] - shift);
        max_[half] = max;
        sum_[half] = sum_[half] * mine + row[kDim + 1] * theirs;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = acc_[j][2 * half + i];
            x = x * mine + row[8 * j + 2 * t_ + i] * theirs;
          }
      }
  }

  __device__ void sum_threads() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 2);
    }
  }

  __device__ void finish() {
    if constexpr (kFew) {
      if (warp_ > 0) return;
    } else {
      sum_threads();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query_of(half);
      if (query >= num_queries_) continue;
      const int64_t row = first_row_ + query / args_.group, head = head_ * args_.group + query % args_.group;
      if (args_.parts > 1) {
        const int64_t own_row = row - args_.sequences.first_row[args_.first];
        float* to = args_.partials + ((own_row * args_.heads + head) * args_.parts + part_) * (kDim + 2);
        store_part(half, to);
        continue;
      }
      const float factor = sum_[half] > 0 ? 1 / sum_[half] : 0;
      auto* to = args_.out.row<__nv_bfloat16>(row) + head * kDim;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to[L::value_column(j, 2 * t_ + i)] = __float2bfloat16_rn(acc_[j][2 * half + i] * factor);
    }
  }

  __device__ void store_part(int half, float* to) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) to[L::value_column(j, 2 * t_ + i)] = acc_[j][2 * half + i];
    if (t_ == 0) to[kDim] = max_[half], to[kDim + 1] = sum_[half];
  }

  const Args& args_;
  uint8_t* const shared_;
  const int g_, t_, warp_;
  int first_row_ = 0, first_query_ = 0, num_queries_ = 0, part_ = 0, head_ = 0, position_ = 0;
  int end_ = 0, end_of_warp_ = 0;  // of the tokens that they see
  const int32_t* table_ = nullptr;
  uint32_t q_[kDim / 16][4] = {};
  float acc_[kDim / 8][4] = {}, max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

template <int kDim, bool kFp8, bool kFew>
__global__ __launch_bounds__(kThreads) void full_attend_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) uint8_t shared[];
  dependency_wait();
  dependency_trigger();
  Attend<kDim, kFp8, kFew>(args, shared).run();
}

// A block joins the parts of a row's head; a thread has a column.
__global__ void full_join_kernel(const float* partials, int parts, int dim, int heads, Tensor out) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, head = blockIdx.y;
  const float* from = partials + (row * heads + head) * parts * (dim + 2);
  float max = -INFINITY, sum = 0, x = 0;
  for (int part = 0; part < parts; ++part) max = fmaxf(max, from[part * (dim + 2) + dim]);
  for (int part = 0; part < parts && max > -INFINITY; ++part) {
    const float* one = from + part * (dim + 2);
    const float factor = exp2_fast(one[dim] - max);
    sum += one[dim + 1] * factor;
    x += one[threadIdx.x] * factor;
  }
  out.row<__nv_bfloat16>(row)[head * dim + threadIdx.x] = __float2bfloat16_rn(sum > 0 ? x / sum : 0);
}

using Kernel = void (*)(Args);
struct Choice {
  Kernel kernel;
  int shared_bytes;
};

template <int kDim, bool kFp8>
Choice choose(bool few) {
  if (few) return {full_attend_kernel<kDim, kFp8, true>, Attend<kDim, kFp8, true>::kSharedBytes};
  return {full_attend_kernel<kDim, kFp8, false>, Attend<kDim, kFp8, false>::kSharedBytes};
}

Choice choose(int64_t dim, bool fp8, bool few) {
  switch (dim) {
    case 32: return fp8 ? choose<32, true>(few) : choose<32, false>(few);
    case 64: return fp8 ? choose<64, true>(few) : choose<64, false>(few);
    case 128: return fp8 ? choose<128, true>(few) : choose<128, false>(few);
  }
  CHECK(false, "heads of ", dim);
}

}  // namespace

cudaError_t full_attend_rows(const FullAttendCall& call, cudaStream_t stream) {
  constexpr int kFewQueries = 32;  // of a sequence and head: two tiles
  if (call.rows == 0) return cudaSuccess;
  const FullShape& s = call.shape;
  const auto group = static_cast<int>(s.heads / s.kv_heads);
  const int queries = call.max_tokens * group;
  const bool few = queries <= kFewQueries && !call.fixed;
  const int rows = few ? 16 : 64, tiles = (queries + rows - 1) / rows;
  const Choice choice = choose(s.dim, call.cache.dtype == DType::kF8E4M3, few);
  // As many parts as fill the device three times over.
  const int64_t whole = int64_t{tiles} * s.kv_heads * call.count;
  const int64_t wanted = call.fixed ? 1 : 3 * int64_t{device_limits().multiprocessors} / whole;
  const auto parts = static_cast<int>(std::max<int64_t>(
      1, std::min<int64_t>({wanted, kMostParts, call.sequences.table_width, kFullPartials / (call.rows * s.heads)})));
  const Args args{.q = call.q,
                  .out = call.out,
                  .sequences = call.sequences,
                  .cache = call.cache,
                  .heads = static_cast<int>(s.heads),
                  .group = group,
                  .first = call.first,
                  .parts = parts,
                  .scale = s.softmax_scale * kLog2E,
                  .partials = call.partials};
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(tiles * parts), static_cast<unsigned>(s.kv_heads),
                                       static_cast<unsigned>(call.count)),
                          .block = dim3(kThreads),
                          .shared_bytes = static_cast<size_t>(choice.shared_bytes),
                          .stream = stream};
  if (const cudaError_t error = launch(choice.kernel, shape, args); error != cudaSuccess || parts == 1) return error;
  const LaunchShape joined{.grid = dim3(static_cast<unsigned>(call.rows), static_cast<unsigned>(s.heads)),
                           .block = dim3(static_cast<unsigned>(s.dim)),
                           .stream = stream};
  return launch(full_join_kernel, joined, static_cast<const float*>(call.partials), parts, static_cast<int>(s.dim),
                static_cast<int>(s.heads), call.out.row_range(call.first_row, call.rows));
}

cudaError_t full_load_kernels() {
  for (const int64_t dim : {32, 64, 128})
    for (const bool fp8 : {false, true})
      for (const bool few : {false, true}) {
        const Choice choice = choose(dim, fp8, few);
        if (const cudaError_t error = allow_shared(choice.kernel, static_cast<size_t>(choice.shared_bytes));
            error != cudaSuccess)
          return error;
      }
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(full_join_kernel));
}

}  // namespace perigee

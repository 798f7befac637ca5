// Flash attention (Dao 2023) on mma.sync: a block owns query rows of one head, a warp 16 of them, and walks over key
// tiles that arrive by cp.async in two buffers; scores and weights stay in registers.
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_prefill.cuh"

namespace perigee {
namespace {

constexpr int kRope = kPrefillRope;

// Heads of 192 / 128: queries stay in registers, 64 keys a tile. 256 / 256: there is no room for them beside the
// output, so they lie in shared memory, and a block is half as tall.
template <int kNope, int kValue, int kWarpCount, int kTileKeys, bool kHoldQueries>
struct Shape {
  static constexpr int kKey = kNope + kRope, kThreads = 32 * kWarpCount;
  static constexpr int kNopeColumns = kNope, kValueColumns = kValue;
  static constexpr int kKeys = kTileKeys, kRows = 16 * kWarpCount;
  static constexpr int kSteps = kKey / 16;
  static constexpr bool kHold = kHoldQueries;
  static constexpr int kKeyBytes = kKeys * kKey * 2, kValueBytes = kKeys * kValue * 2;
  static constexpr int kQueryBytes = kHold ? 0 : kRows * kKey * 2;
  static constexpr int kSharedBytes = kQueryBytes + 2 * (kKeyBytes + kValueBytes);
  static_assert(kSharedBytes <= 99 * 1024);
};
using Heads192 = Shape<128, 128, 8, 64, true>;
using Heads256 = Shape<192, 256, 4, 32, false>;

// Chunk of 16 bytes in rows of `chunks`: rotated by the row, so that eight rows' same chunks are in eight banks.
template <int kChunks>
__device__ __forceinline__ int place(int row, int chunk) {
  static_assert(kChunks % 8 == 0);
  return (row * kChunks + (chunk ^ (row & 7))) * 16;
}

// 16-byte chunks of `rows` rows into shared memory; rows from `valid` on are filled with zeros.
template <int kChunks, int kRows, int kThreads>
__device__ void copy_rows(uint32_t to, int chunk_offset, int chunks, const uint8_t* from, int64_t stride, int valid) {
  for (int i = threadIdx.x; i < kRows * chunks; i += kThreads) {
    const int row = i / chunks, chunk = i % chunks;
    const bool there = row < valid;
    copy_async16(to + place<kChunks>(row, chunk_offset + chunk), there ? from + row * stride + chunk * 16 : from,
                 there ? 16 : 0);
  }
}

template <typename S>
__device__ void copy_tile(const MlaPrefillArgs& a, const Place& at, int key, uint32_t keys, uint32_t values) {
  const int valid = at.keys - key, width = (S::kNopeColumns + S::kValueColumns) * 2;
  const int64_t stride = static_cast<int64_t>(a.heads) * width, row = at.first_key + key;
  const uint8_t* up = static_cast<const uint8_t*>(a.up) + row * stride + at.head * width;
  const uint8_t* rope = static_cast<const uint8_t*>(a.k_rope) + row * a.k_rope_stride * 2;
  constexpr int kKeyChunks = S::kKey / 8, kNopeChunks = S::kNopeColumns / 8;
  copy_rows<kKeyChunks, S::kKeys, S::kThreads>(keys, 0, kNopeChunks, up, stride, valid);
  copy_rows<kKeyChunks, S::kKeys, S::kThreads>(keys, kNopeChunks, kRope / 8, rope, a.k_rope_stride * 2, valid);
  copy_rows<S::kValueColumns / 8, S::kKeys, S::kThreads>(values, 0, S::kValueColumns / 8, up + S::kNopeColumns * 2,
                                                         stride, valid);
  copy_async_commit();
}

template <typename S>
struct Rows {
  uint32_t q[S::kHold ? S::kSteps : 1][4];
  float out[S::kValueColumns / 8][4];
  float largest[2], sum[2];
  int last[2];  // the last key a row sees
};

template <typename S>
__device__ void load_queries(const MlaPrefillArgs& a, const Place& at, Rows<S>& rows, uint32_t shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stride = static_cast<int64_t>(a.heads) * S::kKey;
  const auto* q = static_cast<const uint16_t*>(a.q) + (at.first_query + at.row_begin) * stride + at.head * S::kKey;
  if constexpr (!S::kHold) {
    copy_rows<S::kKey / 8, S::kRows, S::kThreads>(shared, 0, S::kKey / 8, reinterpret_cast<const uint8_t*>(q),
                                                  stride * 2, at.queries - at.row_begin);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp * 16 + lane / 4 + 8 * i;
      const uint16_t* from = q + row * stride + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const bool there = at.row_begin + row < at.queries;
        rows.q[step][i] = there ? *reinterpret_cast<const uint32_t*>(from + step * 16) : 0;
        rows.q[step][i + 2] = there ? *reinterpret_cast<const uint32_t*>(from + step * 16 + 8) : 0;
      }
    }
  }
}

template <typename S>
__device__ void multiply_keys(const Rows<S>& rows, uint32_t queries, uint32_t keys, float (&s)[S::kKeys / 8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < S::kKeys / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t a[4];
    if constexpr (S::kHold) {
      for (int i = 0; i < 4; ++i) a[i] = rows.q[step][i];
    } else {
      load_matrix_x4(a, queries + place<S::kKey / 8>(warp * 16 + lane % 16, step * 2 + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < S::kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4(b, keys + place<S::kKey / 8>(n * 16 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
      mma_16x8x16(Bf16(), s[2 * n], a, b[0], b[1]);
      mma_16x8x16(Bf16(), s[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Scores to weights, in place, and the running softmax of this lane's two rows.
template <typename S>
__device__ void update_rows(Rows<S>& rows, float (&s)[S::kKeys / 8][4], float scale, int key, bool masked) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = rows.largest[i];
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[n][2 * i + k];
        x = masked && key + 8 * n + 2 * t + k > rows.last[i] ? -INFINITY : x * scale;
        largest = fmaxf(largest, x);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float rescale = exp2_fast(rows.largest[i] - base);
    rows.largest[i] = largest;
    rows.sum[i] *= rescale;
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[n][2 * i + k];
        x = exp2_fast(x - base);
        rows.sum[i] += x;
      }
    }
#pragma unroll
    for (int n = 0; n < S::kValueColumns / 8; ++n) rows.out[n][2 * i] *= rescale, rows.out[n][2 * i + 1] *= rescale;
  }
}

template <typename S>
__device__ void multiply_values(Rows<S>& rows, const float (&s)[S::kKeys / 8][4], uint32_t values) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < S::kKeys / 16; ++step) {
    // An accumulator's layout is that of an A fragment of half the width.
    const uint32_t a[4] = {pack_pair(Bf16(), s[2 * step][0], s[2 * step][1]),
                           pack_pair(Bf16(), s[2 * step][2], s[2 * step][3]),
                           pack_pair(Bf16(), s[2 * step + 1][0], s[2 * step + 1][1]),
                           pack_pair(Bf16(), s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
    for (int n = 0; n < S::kValueColumns / 16; ++n) {
      uint32_t b[4];
      load_matrix_x4_transposed(b, values + place<S::kValueColumns / 8>(step * 16 + lane % 16, n * 2 + lane / 16));
      mma_16x8x16(Bf16(), rows.out[2 * n], a, b[0], b[1]);
      mma_16x8x16(Bf16(), rows.out[2 * n + 1], a, b[2], b[3]);
    }
  }
}

template <typename S>
__device__ void store_row(const MlaPrefillArgs& a, const Place& at, const Rows<S>& rows, int i) {
  const int lane = threadIdx.x % 32, row = at.row_begin + threadIdx.x / 32 * 16 + lane / 4 + 8 * i;
  const Joined joined = join_earlier(a, at, row, rows.largest[i], rows.sum[i]);
  if (row >= at.queries) return;
#pragma unroll
  for (int n = 0; n < S::kValueColumns / 8; ++n) {
    store_pair(a, joined, n * 8 + lane % 4 * 2, make_float2(rows.out[n][2 * i], rows.out[n][2 * i + 1]));
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads) mla_prefill_kernel(const __grid_constant__ MlaPrefillArgs a) {
  extern __shared__ __align__(128) uint8_t bytes[];
  dependency_wait();
  dependency_trigger();
  const Place at = find_place(a, S::kRows);
  if (at.row_begin >= at.queries) return;
  const uint32_t shared = shared_address(bytes), tiles = shared + S::kQueryBytes;
  const int end = min(at.keys, min(at.row_begin + S::kRows, at.queries) + at.offset);  // the last row's last key + 1
  Rows<S> rows;
  load_queries<S>(a, at, rows, shared);
  for (int n = 0; n < S::kValueColumns / 8; ++n) rows.out[n][0] = rows.out[n][1] = rows.out[n][2] = rows.out[n][3] = 0;
  for (int i = 0; i < 2; ++i) {
    rows.largest[i] = -INFINITY, rows.sum[i] = 0;
    const int row = at.row_begin + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
    rows.last[i] = min(at.keys - 1, row + at.offset);
  }
  const int all_see = min(at.keys - 1, at.row_begin + at.offset);  // keys up to this one need no mask
  if (end > 0) copy_tile<S>(a, at, 0, tiles, tiles + S::kKeyBytes);
  uint32_t buffer = 0;
  for (int key = 0; key < end; key += S::kKeys) {
    copy_async_wait<0>();
    __syncthreads();
    const uint32_t keys = tiles + buffer * (S::kKeyBytes + S::kValueBytes);
    buffer ^= 1;
    const uint32_t next = tiles + buffer * (S::kKeyBytes + S::kValueBytes);
    if (key + S::kKeys < end) copy_tile<S>(a, at, key + S::kKeys, next, next + S::kKeyBytes);
    float s[S::kKeys / 8][4];
    multiply_keys<S>(rows, shared, keys, s);
    update_rows<S>(rows, s, a.softmax_scale * kLog2e, key, key + S::kKeys - 1 > all_see);
    multiply_values<S>(rows, s, keys + S::kKeyBytes);
  }
  store_row<S>(a, at, rows, 0);
  store_row<S>(a, at, rows, 1);
}

template <typename S>
cudaError_t launch_one(const MlaPrefillArgs& args, cudaStream_t stream) {
  const dim3 grid(args.heads, (args.max_query + S::kRows - 1) / S::kRows, args.sequences);
  return launch(mla_prefill_kernel<S>, {grid, dim3(S::kThreads), S::kSharedBytes, stream}, args);
}

}  // namespace

cudaError_t mla_prefill_prepare() {
  for (const cudaError_t error :
       {allow_shared(mla_prefill_kernel<Heads192>, Heads192::kSharedBytes),
        allow_shared(mla_prefill_kernel<Heads256>, Heads256::kSharedBytes), mla_prefill_wgmma_prepare()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t mla_prefill(PrefillKernel kernel, const MlaPrefillArgs& args, cudaStream_t stream) {
  if (args.sequences == 0 || args.max_query == 0) return cudaSuccess;
  if (args.join && (!args.out_f32 || !args.lse)) return cudaErrorInvalidValue;
  switch (kernel) {
    case PrefillKernel::kMma192: return launch_one<Heads192>(args, stream);
    case PrefillKernel::kMma256: return launch_one<Heads256>(args, stream);
    case PrefillKernel::kWgmma192:
    case PrefillKernel::kWgmma256: return mla_prefill_wgmma_launch(args, stream);
    case PrefillKernel::kNone: break;
  }
  return cudaErrorNotSupported;
}

}  // namespace perigee

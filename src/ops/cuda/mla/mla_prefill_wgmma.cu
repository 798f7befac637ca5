// Flash attention (Dao 2023; Shah et al. 2024) on Hopper for heads of 192 / 128 and 256 / 256: two warpgroups of 64
// query rows each, a third that brings tiles of 128 or 64 keys by tensor map into two buffers. Scores stay in registers
// and are, as weights, the left operand of the second product; while one warpgroup is at its softmax the other's
// products run. The base of a row's weights moves only when a score exceeds it by more than kHeadroom, so outputs are
// seldom rescaled.
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_prefill.cuh"
#include "ops/cuda/mla/mla_wgmma.cuh"
#include "ops/cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to an empty kernel
#endif

namespace perigee {
namespace {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kRows = 128;   // of a block
constexpr int kQueryColumnBytes = 64 * 128;
constexpr float kHeadroom = 8;  // weights are at most 2^8

template <int kNopeIn, int kValueIn, int kKeysIn>
struct Shape {
  static constexpr int kNope = kNopeIn, kValue = kValueIn, kKey = kNope + kPrefillRope;
  static constexpr int kKeys = kKeysIn;  // of a tile
  static constexpr int kKeyColumns = kKey / 64, kValueColumns = kValue / 64;
  static constexpr int kColumnBytes = kKeys * 128;
  static constexpr int kTileBytes = (kKeyColumns + kValueColumns) * kColumnBytes;

  using Scores = float[kKeys / 2];
  struct Rows {
    float out[kValue / 2];
    float base[2], sum[2];
    int last[2];  // the last key a row sees
  };
  struct Shared {
    alignas(1024) uint8_t queries[2][kKeyColumns * kQueryColumnBytes];
    uint8_t tiles[2][kTileBytes];  // keys, then values
    uint64_t full[2], empty[2];
  };
};

using Heads192 = Shape<128, 128, 128>;
using Heads256 = Shape<192, 256, 64>;

// Which of the two tiles is next, and the parity of its barrier.
struct RingCursor {
  int stage = 0, parity = 0;
  __device__ void next() {
    stage ^= 1;
    parity ^= stage ^ 1;
  }
};

// Chunk of 16 bytes `chunk` of row `row` in a column.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// The warpgroup's 64 query rows; rows past the last are 0.
template <typename S>
__device__ void load_queries(const MlaPrefillArgs& a, const Place& at, int first_row, uint8_t* queries) {
  constexpr int kChunks = S::kKey / 8;
  const uint4* q = static_cast<const uint4*>(a.q);
#pragma unroll 4
  for (int i = threadIdx.x % kGroup; i < 64 * kChunks; i += kGroup) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int64_t from = (static_cast<int64_t>(at.first_query + first_row + row) * a.heads + at.head) * kChunks + chunk;
    *reinterpret_cast<uint4*>(queries + chunk / 8 * kQueryColumnBytes + place(row, chunk % 8)) =
        first_row + row < at.queries ? q[from] : make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  named_barrier(1 + threadIdx.x / kGroup, kGroup);
}

// Scores to weights, in place, and the running softmax of this thread's two rows.
template <typename S>
__device__ void update_rows(typename S::Rows& rows, typename S::Scores& s, float scale, int key, bool masked) {
  const int t = threadIdx.x % 4;
  float shrink[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int visible = rows.last[i] - key - 2 * t;  // column offsets up to this one are seen
    float largest = -INFINITY;
    if (masked) {
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; ++j) {
        if (8 * j > visible) s[4 * j + 2 * i] = -INFINITY;
        if (8 * j + 1 > visible) s[4 * j + 2 * i + 1] = -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < S::kKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale;
    const float base = largest > rows.base[i] + kHeadroom ? largest : rows.base[i];
    const float seen_base = base == -INFINITY ? 0.0f : base;
    shrink[i] = exp2_fast(base == rows.base[i] ? 0.0f : rows.base[i] - base);
    rows.base[i] = base;
    float sum = rows.sum[i] * shrink[i];
#pragma unroll
    for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[4 * j + 2 * i + k];
        x = exp2_fast(fmaf(x, scale, -seen_base));
        sum += x;
      }
    }
    rows.sum[i] = sum;
  }
  if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int j = 0; j < S::kValue / 8; ++j) {
    rows.out[4 * j] *= shrink[0], rows.out[4 * j + 1] *= shrink[0];
    rows.out[4 * j + 2] *= shrink[1], rows.out[4 * j + 3] *= shrink[1];
  }
}

template <typename S>
__device__ void multiply_keys(uint32_t queries, uint32_t keys, typename S::Scores& s) {
  const uint64_t a = matrix_k_major(queries), b = matrix_k_major(keys);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::kKey / 16; ++step) {
    const uint64_t a_step = matrix_behind(a, step / 4 * kQueryColumnBytes + step % 4 * 32);
    const uint64_t b_step = matrix_behind(b, step / 4 * S::kColumnBytes + step % 4 * 32);
    if constexpr (S::kKeys == 128) {
      wgmma_n128_k_major(s, a_step, b_step, step > 0);
    } else {
      wgmma_n64(Bf16(), s, a_step, b_step, step > 0);
    }
  }
  wgmma_commit();
  wgmma_wait();
  wgmma_settle(s);
}

template <typename S>
__device__ void multiply_values(typename S::Rows& rows, const typename S::Scores& s, uint32_t values) {
  uint32_t weights[S::kKeys / 16][4];
#pragma unroll
  for (int step = 0; step < S::kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[step][i] = pack_pair(Bf16(), s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
  const uint64_t b = matrix_n_major(values, S::kColumnBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::kKeys / 16; ++step) {
    const uint64_t b_step = matrix_behind(b, step * 16 * 128);
    if constexpr (S::kValue == 128) {
      wgmma_n128_registers(rows.out, weights[step], b_step);
    } else {
      wgmma_n256(Bf16(), rows.out, weights[step], b_step);
    }
  }
  wgmma_commit();
  wgmma_wait();
  wgmma_settle(rows.out);
}

// The tile's values from row `valid` on may be anything: 0, so that weight 0 times it is 0. Both warpgroups write the
// same zeros; each waits for its own.
template <typename S>
__device__ void clear_values(uint8_t* values, int valid) {
  for (int i = threadIdx.x % kGroup; i < (S::kKeys - valid) * (S::kValue / 8); i += kGroup) {
    const int chunk = i % (S::kValue / 8), row = valid + i / (S::kValue / 8);
    *reinterpret_cast<uint4*>(values + chunk / 8 * S::kColumnBytes + place(row, chunk % 8)) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  named_barrier(1 + threadIdx.x / kGroup, kGroup);
}

template <typename S>
__device__ void attend(const MlaPrefillArgs& a, const Place& at, typename S::Shared& shared, int end) {
  const int group = threadIdx.x / kGroup, first_row = at.row_begin + 64 * group, lane = threadIdx.x % 32;
  const int own_row = first_row + threadIdx.x % kGroup / 32 * 16 + lane / 4;
  load_queries<S>(a, at, first_row, shared.queries[group]);
  typename S::Rows rows = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.base[i] = -INFINITY;
    rows.last[i] = min(at.keys - 1, own_row + 8 * i + at.offset);
  }
  const int all_see = min(at.keys - 1, first_row + at.offset);
  RingCursor cursor;
  for (int key = 0; key < end; key += S::kKeys) {
    uint8_t* tile = shared.tiles[cursor.stage];
    typename S::Scores s;
    barrier_wait(&shared.full[cursor.stage], cursor.parity);
    multiply_keys<S>(shared_address(shared.queries[group]), shared_address(tile), s);
    update_rows<S>(rows, s, a.softmax_scale * kLog2e, key, key + S::kKeys - 1 > all_see);
    uint8_t* values = tile + S::kKeyColumns * S::kColumnBytes;
    if (at.keys - key < S::kKeys) clear_values<S>(values, at.keys - key);
    multiply_values<S>(rows, s, shared_address(values));
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[cursor.stage]);
    cursor.next();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Joined joined = join_earlier(a, at, own_row + 8 * i, rows.base[i], rows.sum[i]);
    if (own_row + 8 * i >= at.queries) continue;
#pragma unroll
    for (int j = 0; j < S::kValue / 8; ++j) {
      store_pair(a, joined, 8 * j + lane % 4 * 2, make_float2(rows.out[4 * j + 2 * i], rows.out[4 * j + 2 * i + 1]));
    }
  }
}

struct Maps {
  CUtensorMap up, rope;
};

// One thread.
template <typename S>
__device__ void bring(const Maps& maps, const Place& at, typename S::Shared& shared, int end) {
  RingCursor cursor;
  for (int key = 0; key < end; key += S::kKeys) {
    uint64_t* full = &shared.full[cursor.stage];
    barrier_wait(&shared.empty[cursor.stage], cursor.parity ^ 1);
    barrier_expect(full, S::kTileBytes);
    const int row = at.first_key + key, head = at.head * (S::kNope + S::kValue);
    uint32_t to = shared_address(shared.tiles[cursor.stage]);
    for (int column = 0; column < S::kKeyColumns + S::kValueColumns; ++column, to += S::kColumnBytes) {
      if (column == S::kKeyColumns - 1) {
        bulk_copy_box(to, &maps.rope, 0, row, full);
      } else {
        bulk_copy_box(to, &maps.up, head + (column < S::kKeyColumns ? column : column - 1) * 64, row, full);
      }
    }
    cursor.next();
  }
}

template <typename S>
__global__ void __launch_bounds__(3 * kGroup, 1)
    mla_prefill_wgmma_kernel(const __grid_constant__ MlaPrefillArgs a, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], 2 * kGroup / 32);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_wait();
  dependency_trigger();
  const Place at = find_place(a, kRows);
  if (at.row_begin >= at.queries) return;
  const int end = min(at.keys, min(at.row_begin + kRows, at.queries) + at.offset);  // the last row's last key + 1
  if (threadIdx.x < 2 * kGroup) {
    registers_grow<240>();
    attend<S>(a, at, shared, end);
  } else {
    registers_shrink<24>();
    if (threadIdx.x == 2 * kGroup) bring<S>(maps, at, shared, end);
  }
#endif
}

// Boxes of 64 columns by a tile's keys of a [rows][columns] bf16 matrix.
cudaError_t make_map(const void* data, int64_t columns, int64_t rows, int64_t row_bytes, int keys, CUtensorMap* map) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  const cudaError_t error = find_tensor_map_encoder(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(keys)}, steps[2] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename S>
cudaError_t launch_one(const MlaPrefillArgs& args, cudaStream_t stream) {
  static_assert(sizeof(typename S::Shared) <= 227 * 1024);
  Maps maps;
  const int64_t columns = static_cast<int64_t>(args.heads) * (S::kNope + S::kValue);
  cudaError_t error = make_map(args.up, columns, args.keys, columns * 2, S::kKeys, &maps.up);
  if (error != cudaSuccess) return error;
  error = make_map(args.k_rope, kPrefillRope, args.keys, args.k_rope_stride * 2, S::kKeys, &maps.rope);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.heads, (args.max_query + kRows - 1) / kRows, args.sequences);
  return launch(mla_prefill_wgmma_kernel<S>, {grid, dim3(3 * kGroup), sizeof(typename S::Shared), stream}, args, maps);
}

}  // namespace

cudaError_t mla_prefill_wgmma_prepare() {
  const cudaError_t error = allow_shared(mla_prefill_wgmma_kernel<Heads192>, sizeof(Heads192::Shared));
  return error == cudaSuccess ? allow_shared(mla_prefill_wgmma_kernel<Heads256>, sizeof(Heads256::Shared)) : error;
}

cudaError_t mla_prefill_wgmma_launch(const MlaPrefillArgs& args, cudaStream_t stream) {
  return args.value == Heads256::kValue ? launch_one<Heads256>(args, stream) : launch_one<Heads192>(args, stream);
}

}  // namespace perigee

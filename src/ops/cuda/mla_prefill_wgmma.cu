// Flash attention (Dao 2023; Shah et al. 2024) on Hopper for heads of 192 / 128: two warpgroups of 64 query rows each,
// a third that brings tiles of 128 keys by tensor map into two buffers. Scores stay in registers and are, as weights,
// the left operand of the second product; while one warpgroup is at its softmax the other's products run.
#include <cudaTypedefs.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla_prefill.cuh"
#include "ops/cuda/wgmma.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to an empty kernel
#endif

namespace perigee {
namespace {

constexpr int kNope = 128, kValue = 128, kKey = kNope + kPrefillRope;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kRows = 128;   // of a block
constexpr int kKeys = 128;   // of a tile
constexpr int kKeyColumns = kKey / 64, kValueColumns = kValue / 64;
constexpr int kQueryColumnBytes = 64 * 128, kColumnBytes = kKeys * 128;
constexpr int kTileBytes = (kKeyColumns + kValueColumns) * kColumnBytes;

struct Shared {
  alignas(1024) uint8_t queries[2][kKeyColumns * kQueryColumnBytes];
  uint8_t tiles[2][kTileBytes];  // keys, then values
  uint64_t full[2], empty[2];
};

// Which of the two tiles is next, and the parity of its barrier.
struct Turn {
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

// The warpgroup's 64 query rows; rows behind the last are 0.
__device__ void load_queries(const MlaPrefillArgs& a, const Place& at, int first_row, uint8_t* queries) {
  constexpr int kChunks = kKey / 8;
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

struct Rows {
  float out[64];
  float largest[2], sum[2];
  int last[2];  // the last key a row sees
};

// Scores to weights, in place, and the running softmax of this thread's two rows.
__device__ void update_rows(Rows& rows, float (&s)[64], float scale, int key, bool masked) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int visible = masked ? rows.last[i] - key - 2 * t : kKeys;  // column offsets up to this one are seen
    float largest = -INFINITY;
    if (masked) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& x = s[4 * j + 2 * i + k];
          if (8 * j + k > visible) x = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    largest = fmaxf(largest * scale, rows.largest[i]);
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float rescale = exp2_fast(rows.largest[i] - base);
    rows.largest[i] = largest;
    float sum = rows.sum[i] * rescale;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[4 * j + 2 * i + k];
        x = exp2_fast(fmaf(x, scale, -base));
        sum += x;
      }
      rows.out[4 * j + 2 * i] *= rescale, rows.out[4 * j + 2 * i + 1] *= rescale;
    }
    rows.sum[i] = sum;
  }
}

__device__ void multiply_keys(uint32_t queries, uint32_t keys, float (&s)[64]) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKey / 16; ++step) {
    const uint64_t a = matrix_k_major(queries + step / 4 * kQueryColumnBytes + step % 4 * 32);
    wgmma_n128_k_major(s, a, matrix_k_major(keys + step / 4 * kColumnBytes + step % 4 * 32), step > 0);
  }
  wgmma_commit();
  wgmma_wait();
}

__device__ void multiply_values(Rows& rows, const float (&s)[64], uint32_t values) {
  uint32_t weights[kKeys / 16][4];
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[step][i] = pack_pair(Bf16(), s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    wgmma_n128_registers(rows.out, weights[step], matrix_n_major(values + step * 16 * 128, kColumnBytes));
  }
  wgmma_commit();
  wgmma_wait();
}

// The tile's values from row `valid` on may be anything: 0, so that weight 0 times it is 0. Both warpgroups write the
// same zeros; each waits for its own.
__device__ void clear_values(uint8_t* values, int valid) {
  for (int i = threadIdx.x % kGroup; i < (kKeys - valid) * (kValue / 8); i += kGroup) {
    const int chunk = i % (kValue / 8), row = valid + i / (kValue / 8);
    *reinterpret_cast<uint4*>(values + chunk / 8 * kColumnBytes + place(row, chunk % 8)) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  named_barrier(1 + threadIdx.x / kGroup, kGroup);
}

__device__ void attend(const MlaPrefillArgs& a, const Place& at, Shared& shared, int end) {
  const int group = threadIdx.x / kGroup, first_row = at.row_begin + 64 * group, lane = threadIdx.x % 32;
  const int own_row = first_row + threadIdx.x % kGroup / 32 * 16 + lane / 4;
  load_queries(a, at, first_row, shared.queries[group]);
  Rows rows = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.largest[i] = -INFINITY;
    rows.last[i] = min(at.keys - 1, own_row + 8 * i + at.offset);
  }
  const int all_see = min(at.keys - 1, first_row + at.offset);
  Turn turn;
  for (int key = 0; key < end; key += kKeys) {
    uint8_t* tile = shared.tiles[turn.stage];
    float s[64];
    barrier_wait(&shared.full[turn.stage], turn.parity);
    multiply_keys(shared_address(shared.queries[group]), shared_address(tile), s);
    update_rows(rows, s, a.softmax_scale * kLog2e, key, key + kKeys - 1 > all_see);
    if (at.keys - key < kKeys) clear_values(tile + kKeyColumns * kColumnBytes, at.keys - key);
    multiply_values(rows, s, shared_address(tile) + kKeyColumns * kColumnBytes);
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[turn.stage]);
    turn.next();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Joined joined = join_earlier(a, at, own_row + 8 * i, rows.largest[i], rows.sum[i]);
    if (own_row + 8 * i >= at.queries) continue;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      store_pair(a, joined, 8 * j + lane % 4 * 2, make_float2(rows.out[4 * j + 2 * i], rows.out[4 * j + 2 * i + 1]));
    }
  }
}

struct Maps {
  CUtensorMap up, rope;
};

// One thread.
__device__ void bring(const Maps& maps, const Place& at, Shared& shared, int end) {
  Turn turn;
  for (int key = 0; key < end; key += kKeys) {
    uint64_t* full = &shared.full[turn.stage];
    barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
    barrier_expect(full, kTileBytes);
    const uint32_t to = shared_address(shared.tiles[turn.stage]);
    const int row = at.first_key + key, head = at.head * (kNope + kValue);
    bulk_copy_box(to, &maps.up, head, row, full);
    bulk_copy_box(to + kColumnBytes, &maps.up, head + 64, row, full);
    bulk_copy_box(to + 2 * kColumnBytes, &maps.rope, 0, row, full);
    bulk_copy_box(to + 3 * kColumnBytes, &maps.up, head + kNope, row, full);
    bulk_copy_box(to + 4 * kColumnBytes, &maps.up, head + kNope + 64, row, full);
    turn.next();
  }
}

__global__ void __launch_bounds__(3 * kGroup, 1)
    mla_prefill_wgmma_kernel(const __grid_constant__ MlaPrefillArgs a, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
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
    attend(a, at, shared, end);
  } else {
    registers_shrink<24>();
    if (threadIdx.x == 2 * kGroup) bring(maps, at, shared, end);
  }
#endif
}

// Boxes of 64 columns by a tile's keys of a [rows][columns] bf16 matrix.
cudaError_t make_map(const void* data, int64_t columns, int64_t rows, int64_t row_bytes, CUtensorMap* map) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {64, kKeys}, steps[2] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t mla_prefill_wgmma_prepare() {
  static_assert(sizeof(Shared) <= 227 * 1024);
  return allow_shared(mla_prefill_wgmma_kernel, sizeof(Shared));
}

cudaError_t mla_prefill_wgmma_launch(const MlaPrefillArgs& args, cudaStream_t stream) {
  Maps maps;
  const int64_t columns = static_cast<int64_t>(args.heads) * (kNope + kValue);
  cudaError_t error = make_map(args.up, columns, args.keys, columns * 2, &maps.up);
  if (error != cudaSuccess) return error;
  error = make_map(args.k_rope, kPrefillRope, args.keys, args.k_rope_stride * 2, &maps.rope);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.heads, (args.max_query + kRows - 1) / kRows, args.sequences);
  return launch(mla_prefill_wgmma_kernel, {grid, dim3(3 * kGroup), sizeof(Shared), stream}, args, maps);
}

}  // namespace perigee

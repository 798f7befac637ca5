// MLA decode on Hopper: 64 query rows a block, warpgroup products straight from shared memory, keys brought by the bulk
// copy engine.
//
// Three warpgroups. "Scores" multiplies the queries with a tile of 64 keys, keeps the running softmax (Milakov,
// Gimelshein 2018), writes the weights to shared memory and accumulates columns 0 ... 127 of the output; "values"
// accumulates the other 384 from the same tile and weights; the third brings tiles in. So the values of tile t are
// summed while the scores of tile t + 1 are made, and keys are fetched from memory once.
//
// bf16: by tensor map, in the swizzle that the products read. fp8: the third warpgroup loads e4m3 into registers and
// writes f16, exactly, while the tile before is computed on; queries and weights are rounded to f16, outputs scaled.
#include <cudaTypedefs.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/wgmma.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to empty kernels
#endif

namespace perigee {
namespace {

constexpr int kRows = 64;
constexpr int kTokens = 64;
constexpr int kGroup = 128;                  // threads of a warpgroup
constexpr int kColumnBytes = kTokens * 128;  // 64 tokens or rows x 64 elements
constexpr int kColumns = kMlaWidth / 64;     // nine of them make a tile or the queries
constexpr int kTileBytes = kColumns * kColumnBytes;
constexpr int kValueColumns = 128;  // of the output, in one product
constexpr float kLog2e = 1.4426950408889634f;

enum NamedBarrier { kConsumers = 1 };

struct Shared {
  alignas(1024) uint8_t queries[kTileBytes];
  uint8_t tiles[2][kTileBytes];
  uint8_t weights[kColumnBytes];
  float rescale[kRows];
  float scale[kRows];
  uint64_t full[2], empty[2];  // tiles
  uint64_t weights_full, weights_empty;
};

template <bool kFp8>
using ElementOf = std::conditional_t<kFp8, F16, Bf16>;

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

__device__ __forceinline__ void arrive_by_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The item's query rows into shared memory; rows behind the last are 0.
template <bool kFp8>
__device__ void load_queries(const MlaAttendParams& params, const MlaItem& item, uint8_t* queries) {
  const int rows = item.num_tokens * params.heads - item.row_begin;
  const int64_t first = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin;
  const uint4* from = static_cast<const uint4*>(params.args.q) + first * (kMlaWidth / 8);
#pragma unroll 9
  for (int i = threadIdx.x; i < kRows * kMlaWidth / 8; i += 2 * kGroup) {
    const int row = i / (kMlaWidth / 8), chunk = i % (kMlaWidth / 8);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < rows) x = from[i];
    if constexpr (kFp8) {
      x = make_uint4(bf16_pair_to_f16(x.x), bf16_pair_to_f16(x.y), bf16_pair_to_f16(x.z), bf16_pair_to_f16(x.w));
    }
    *reinterpret_cast<uint4*>(queries + chunk / 8 * kColumnBytes + place(row, chunk % 8)) = x;
  }
  fence_async_proxy();
  named_barrier(kConsumers, 2 * kGroup);
}

// This thread's two rows of the running softmax; four neighbouring lanes share them.
struct RowPair {
  float largest[2];  // of the scaled scores, times log2(e)
  float sum[2];      // of this lane's weights
  int position[2];   // the last position a row sees; -1: no such row
};

__device__ RowPair first_state(const MlaAttendParams& params, const MlaItem& item) {
  RowPair state;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = item.row_begin + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i, token = row / params.heads;
    state.largest[i] = -INFINITY;
    state.sum[i] = 0;
    state.position[i] = token < item.num_tokens ? item.length - item.num_tokens + token : -1;
  }
  return state;
}

// Scores to weights, in place; the factors by which older sums shrink to `rescale`.
__device__ void update_rows(float (&s)[32], RowPair& state, float scale, int tile_position, float (&rescale)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int visible = state.position[i] - tile_position - 2 * t;  // column offsets up to this one are seen
    float largest = state.largest[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[4 * j + 2 * i + k];
        x = 8 * j + k <= visible ? x * scale : -INFINITY;
        largest = fmaxf(largest, x);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest;
    rescale[i] = exp2_fast(state.largest[i] - base);
    state.largest[i] = largest;
    float sum = state.sum[i] * rescale[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = s[4 * j + 2 * i + k];
        x = exp2_fast(x - base);
        sum += x;
      }
    }
    state.sum[i] = sum;
  }
}

template <typename Element>
__device__ void store_weights(Shared& shared, const float (&s)[32], const float (&rescale)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<uint32_t*>(shared.weights + place(row, j) + 4 * t) =
          pack_pair(Element(), s[4 * j + 2 * i], s[4 * j + 2 * i + 1]);
    }
    if (t == 0) shared.rescale[row] = rescale[i];
  }
}

// The tile's tokens from `valid` on may hold anything: 0, so that weight 0 times it is 0.
__device__ void clear_tokens(uint8_t* tile, int valid) {
  for (int i = threadIdx.x; i < (kTokens - valid) * (kMlaLatent / 8); i += kGroup) {
    const int chunk = i % (kMlaLatent / 8), row = valid + i / (kMlaLatent / 8);
    *reinterpret_cast<uint4*>(tile + chunk / 8 * kColumnBytes + place(row, chunk % 8)) = make_uint4(0, 0, 0, 0);
  }
}

template <int kParts>
using Output = float[kParts][64];

// out = out * rescale + weights * tile, columns first_column ... of the tile, 128 a part.
template <typename Element, int kParts>
__device__ void multiply_values(const Shared& shared, uint32_t tile, int first_column, Output<kParts>& out) {
  const int row = threadIdx.x % kGroup / 32 * 16 + threadIdx.x % 32 / 4;
  const float top = shared.rescale[row], bottom = shared.rescale[row + 8];
  if (__any_sync(~0u, top != 1.0f || bottom != 1.0f)) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        out[part][4 * j] *= top, out[part][4 * j + 1] *= top;
        out[part][4 * j + 2] *= bottom, out[part][4 * j + 3] *= bottom;
      }
    }
  }
  const uint32_t weights = shared_address(shared.weights), values = tile + first_column / 64 * kColumnBytes;
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      const uint32_t from = values + part * (kValueColumns / 64) * kColumnBytes + step * 16 * 128;
      wgmma_n128(Element(), out[part], matrix_k_major(weights + step * 32), matrix_n_major(from, kColumnBytes), true);
    }
  }
  wgmma_commit();
  wgmma_wait();
}

template <typename Element>
__device__ void multiply_keys(const Shared& shared, uint32_t tile, float (&s)[32]) {
  const uint32_t queries = shared_address(shared.queries);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kMlaWidth / 16; ++step) {
    const uint32_t at = step / 4 * kColumnBytes + step % 4 * 32;
    wgmma_n64(Element(), s, matrix_k_major(queries + at), matrix_k_major(tile + at), step > 0);
  }
  wgmma_commit();
  wgmma_wait();
}

// Row sums to shared.scale (what the output is multiplied by), log-sum-exp to memory.
__device__ void finish_rows(const MlaAttendParams& params, const MlaItem& item, Shared& shared, const RowPair& state,
                            float value_scale) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 != 0) continue;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
    shared.scale[row] = sum > 0 ? value_scale / sum : 0.0f;
    const float lse = sum > 0 ? state.largest[i] / kLog2e + __logf(sum) : -INFINITY;
    if (item.partial >= 0) {
      params.plan.partial_lse[static_cast<int64_t>(item.partial) * kRows + row] = lse;
    } else if (params.args.lse && state.position[i] >= 0) {
      params.args.lse[static_cast<int64_t>(item.first_token) * params.heads + item.row_begin + row] = lse;
    }
  }
}

template <int kParts>
__device__ void store_output(const MlaAttendParams& params, const MlaItem& item, const Shared& shared, int first_column,
                             const Output<kParts>& out) {
  const int lane = threadIdx.x % 32, rows = item.num_tokens * params.heads - item.row_begin;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = threadIdx.x % kGroup / 32 * 16 + lane / 4 + 8 * i;
    if (row >= rows) continue;
    const float scale = shared.scale[row];
    const int64_t partial_row = static_cast<int64_t>(item.partial) * kRows + row;
    const int64_t direct_row = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin + row;
    float* partial = params.plan.partial_out + partial_row * kMlaLatent + first_column + lane % 4 * 2;
    __nv_bfloat16* direct =
        static_cast<__nv_bfloat16*>(params.args.out) + direct_row * kMlaLatent + first_column + lane % 4 * 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = part * kValueColumns + 8 * j;
        const float2 x = make_float2(out[part][4 * j + 2 * i] * scale, out[part][4 * j + 2 * i + 1] * scale);
        if (item.partial >= 0) {
          *reinterpret_cast<float2*>(partial + column) = x;
        } else {
          *reinterpret_cast<uint32_t*>(direct + column) = pack_pair(Bf16(), x.x, x.y);
        }
      }
    }
  }
}

template <bool kFp8>
__device__ void run_scores(const MlaAttendParams& params, Shared& shared, int2 items) {
  using Element = ElementOf<kFp8>;
  const float scale = params.args.softmax_scale * kLog2e * (kFp8 ? params.args.kv_scale : 1.0f);
  Turn turn;
  int weights_parity = 0;
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem item = params.plan.items[i];
    load_queries<kFp8>(params, item, shared.queries);
    RowPair state = first_state(params, item);
    Output<1> out = {};
    for (int block = item.block_begin; block < item.block_end; ++block) {
      const int position = block_position(params.batch, item.sequence, block);
      uint8_t* tile = shared.tiles[turn.stage];
      float s[32], rescale[2];
      barrier_wait(&shared.full[turn.stage], turn.parity);
      multiply_keys<Element>(shared, shared_address(tile), s);
      update_rows(s, state, scale, position, rescale);
      barrier_wait(&shared.weights_empty, weights_parity ^ 1);
      store_weights<Element>(shared, s, rescale);
      if (item.length - position < kTokens) clear_tokens(tile, max(0, item.length - position));
      fence_async_proxy();
      barrier_arrive(&shared.weights_full);
      barrier_wait(&shared.weights_full, weights_parity);
      multiply_values<Element, 1>(shared, shared_address(tile), 0, out);
      arrive_by_warp(&shared.empty[turn.stage]);
      weights_parity ^= 1;
      turn.next();
    }
    finish_rows(params, item, shared, state, kFp8 ? params.args.kv_scale : 1.0f);
    named_barrier(kConsumers, 2 * kGroup);
    store_output<1>(params, item, shared, 0, out);
  }
}

template <bool kFp8>
__device__ void run_values(const MlaAttendParams& params, Shared& shared, int2 items) {
  Turn turn;
  int weights_parity = 0;
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem item = params.plan.items[i];
    load_queries<kFp8>(params, item, shared.queries);
    Output<3> out = {};
    for (int block = item.block_begin; block < item.block_end; ++block) {
      barrier_wait(&shared.full[turn.stage], turn.parity);
      barrier_wait(&shared.weights_full, weights_parity);
      multiply_values<ElementOf<kFp8>, 3>(shared, shared_address(shared.tiles[turn.stage]), kValueColumns, out);
      arrive_by_warp(&shared.weights_empty);
      arrive_by_warp(&shared.empty[turn.stage]);
      weights_parity ^= 1;
      turn.next();
    }
    named_barrier(kConsumers, 2 * kGroup);
    store_output<3>(params, item, shared, kValueColumns, out);
  }
}

// One thread: the tiles of all items through the tensor map.
__device__ void bring_bf16(const MlaAttendParams& params, const CUtensorMap& map, Shared& shared, int2 items) {
  Turn turn;
  bool waited = false;
  for (TileStream<kTokens> tile(params, items); !tile.done(); tile.next()) {
    if (!waited && !tile.settled()) dependency_wait(), waited = true;
    barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
    barrier_expect(&shared.full[turn.stage], kTileBytes);
    const uint32_t to = shared_address(shared.tiles[turn.stage]);
    for (int column = 0; column < kColumns; ++column) {
      bulk_copy_box(to + column * kColumnBytes, &map, column * 64, 0, tile.page, &shared.full[turn.stage]);
    }
    turn.next();
  }
}

// A warpgroup: e4m3 rows of 576 bytes through registers into f16 columns. Eight lanes take two rows by four chunks of a
// column, so that no two of them write to one bank.
__device__ void bring_fp8(const MlaAttendParams& params, Shared& shared, int2 items) {
  const int thread = threadIdx.x % kGroup, first_row = thread / 8 * 2 + thread / 4 % 2, chunk = thread % 4;
  Turn turn;
  bool waited = false;
  for (TileStream<kTokens> tile(params, items); !tile.done(); tile.next()) {
    if (!waited && !tile.settled()) dependency_wait(), waited = true;
    const uint8_t* from = static_cast<const uint8_t*>(params.args.kv) + tile.page * params.args.page_bytes +
                          first_row * kMlaWidth + chunk * 16;
    uint4 raw[2 * kColumns];
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      raw[i] = __ldg(reinterpret_cast<const uint4*>(from + i % 2 * (kTokens / 2) * kMlaWidth + i / 2 * 64));
    }
    barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
    uint8_t* to = shared.tiles[turn.stage];
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int row = first_row + i % 2 * (kTokens / 2);
      uint4 low, high;
      e4m3x4_to_f16(raw[i].x, low.x, low.y);
      e4m3x4_to_f16(raw[i].y, low.z, low.w);
      e4m3x4_to_f16(raw[i].z, high.x, high.y);
      e4m3x4_to_f16(raw[i].w, high.z, high.w);
      *reinterpret_cast<uint4*>(to + i / 2 * kColumnBytes + place(row, 2 * chunk)) = low;
      *reinterpret_cast<uint4*>(to + i / 2 * kColumnBytes + place(row, 2 * chunk + 1)) = high;
    }
    fence_async_proxy();
    barrier_arrive(&shared.full[turn.stage]);
    turn.next();
  }
}

template <bool kFp8>
__device__ void init_barriers(Shared& shared) {
  for (int i = 0; i < 2; ++i) {
    barrier_init(&shared.full[i], kFp8 ? kGroup : 1);
    barrier_init(&shared.empty[i], 2 * kGroup / 32);
  }
  barrier_init(&shared.weights_full, kGroup);
  barrier_init(&shared.weights_empty, kGroup / 32);
  barrier_init_fence();
}

template <bool kFp8>
__global__ void __launch_bounds__(3 * kGroup, 1)
    mla_wgmma_kernel(const __grid_constant__ MlaAttendParams params, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers<kFp8>(shared);
  __syncthreads();
  const int2 items = params.plan.slot_items[blockIdx.x];
  const int group = threadIdx.x / kGroup;
  if (group == 0) {
    registers_grow<168>();
    dependency_wait();
    dependency_trigger();
    run_scores<kFp8>(params, shared, items);
  } else if (group == 1) {
    registers_grow<240>();
    dependency_wait();
    run_values<kFp8>(params, shared, items);
  } else {
    registers_shrink<96>();
    if constexpr (kFp8) {
      bring_fp8(params, shared, items);
    } else {
      if (threadIdx.x == 2 * kGroup) bring_bf16(params, map, shared, items);
    }
  }
#endif
}

// Keys as [page][row][column]; the number of pages is not known here, and only bounds-checks would need it.
cudaError_t make_map(const MlaDecodeArgs& args, CUtensorMap* map) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }
  const cuuint64_t sizes[3] = {kMlaWidth, kMlaBlock, 1u << 26};
  const cuuint64_t strides[2] = {kMlaWidth * 2, static_cast<cuuint64_t>(args.page_bytes)};
  const cuuint32_t box[3] = {64, kTokens, 1}, steps[3] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(args.kv), sizes, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t mla_wgmma_prepare() {
  static_assert(sizeof(Shared) <= 227 * 1024);
  const cudaError_t error = allow_shared(mla_wgmma_kernel<false>, sizeof(Shared));
  return error == cudaSuccess ? allow_shared(mla_wgmma_kernel<true>, sizeof(Shared)) : error;
}

cudaError_t mla_wgmma_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream) {
  CUtensorMap map{};
  const LaunchShape shape{dim3(config.slots), dim3(3 * kGroup), sizeof(Shared), stream};
  if (config.fp8) return launch(mla_wgmma_kernel<true>, shape, params, map);
  const cudaError_t error = make_map(params.args, &map);
  return error == cudaSuccess ? launch(mla_wgmma_kernel<false>, shape, params, map) : error;
}

}  // namespace perigee

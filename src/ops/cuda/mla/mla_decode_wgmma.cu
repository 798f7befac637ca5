// MLA decode on Hopper: 64 query rows a block, warpgroup products straight from shared memory.
//
// Three warpgroups. The first two own a half of the output each, 256 columns, and, in turn, the tiles of 64 keys: tile
// t is owned by warpgroup t % 2. The owner multiplies queries and keys, makes weights of the scores, adds weights *
// values to its half from registers, and leaves the weights in shared memory for the other, which adds them to its
// half. Keys are fetched from memory once. A tile's buffer is given back in two parts, each as soon as its last reader
// is done.
//
// Both warpgroups are at the tiles of a pair, 2 k and 2 k + 1, at the same time. The first one's softmax runs beside
// the second one's product with keys; the second adds the first one's tile beside its own softmax and then its own,
// while the first adds its own and then the second one's. So no product with keys waits for values of the pair before,
// and the keys of tile 2 k + 2 have the values of tile 2 k + 1 to come in.
//
// Weights are 2^(score - base). The base of a row (Milakov, Gimelshein 2018, where it is the running maximum) is passed
// from tile to tile and moves only when a score exceeds it by more than 8, so outputs are seldom rescaled.
//
// One thread of the third warpgroup brings tiles (mla_wgmma_tiles.cuh), or all of it widens them from 656-byte records
// (mla_records.cuh). An fp8 cache has a kernel of its own (mla_decode_wgmma_fp8.cu).
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_records.cuh"
#include "ops/cuda/mla/mla_wgmma.cuh"
#include "ops/cuda/mla/mla_wgmma_tiles.cuh"
#include "ops/cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to empty kernels
#endif

namespace perigee {
namespace {

using namespace mla_wgmma;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kHeadroom = 8;  // weights are at most 2^8

enum NamedBarrier { kConsumers = 1, kOneConsumer = 2 };  // kOneConsumer, + 1: of one warpgroup

// The first of this thread's two rows of an accumulator; the other is eight below.
__device__ __forceinline__ int first_row() {
  return threadIdx.x % kGroup / 32 * 16 + threadIdx.x % 32 / 4;
}

// The item's query rows into shared memory; rows past the last are 0.
__device__ void load_queries(const MlaAttendParams& params, const MlaItem& item, uint8_t* queries) {
  const int rows = item.num_tokens * params.heads - item.row_begin;
  const int64_t first = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin;
  const uint4* from = static_cast<const uint4*>(params.args.q) + first * (kMlaWidth / 8);
#pragma unroll 9
  for (int n = 0; n < kRows * kMlaWidth / 8 / (2 * kGroup); ++n) {
    const int i = threadIdx.x + n * 2 * kGroup, row = i / (kMlaWidth / 8), chunk = i % (kMlaWidth / 8);
    uint8_t* to = queries + chunk / 8 * kColumnBytes + place(row, chunk % 8);
    copy_async16(shared_address(to), row < rows ? from + i : from, row < rows ? 16 : 0);
  }
  copy_async_commit();
  copy_async_wait<0>();
  fence_async_proxy();
  named_barrier(kConsumers, 2 * kGroup);
}

// This thread's two rows of the running softmax; four neighbouring lanes share them.
struct RowPair {
  float base[2];  // in units of scaled scores times log2(e); -inf before the first key
  float sum[2];   // of this lane's weights
  int last[2];    // the last position a row sees; -1: no such row
};

__device__ RowPair first_state(const MlaAttendParams& params, const MlaItem& item) {
  RowPair state;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = (item.row_begin + first_row() + 8 * i) / params.heads;
    state.base[i] = -INFINITY;
    state.sum[i] = 0;
    state.last[i] = token < item.num_tokens ? item.length - item.num_tokens + token : -1;
  }
  return state;
}

using Output = float[128];

// Moves the base of what was summed so far. No products may be under way: they would allow no branch around it.
__device__ __forceinline__ void move_base(RowPair& state, const float (&base)[2], Output& out) {
  float shrink[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    shrink[i] = exp2_fast(state.base[i] == base[i] ? 0.0f : state.base[i] - base[i]);
    state.base[i] = base[i];
    state.sum[i] *= shrink[i];
  }
  if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    out[4 * j] *= shrink[0], out[4 * j + 1] *= shrink[0];
    out[4 * j + 2] *= shrink[1], out[4 * j + 3] *= shrink[1];
  }
}

// Hides the scores of keys that a row does not see; the tile begins at `position`.
__device__ __forceinline__ void mask(float (&s)[32], const RowPair& state, int position) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int visible = state.last[i] - position - 2 * (threadIdx.x % 4);  // column offsets up to this one are seen
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (8 * j > visible) s[4 * j + 2 * i] = -INFINITY;
      if (8 * j + 1 > visible) s[4 * j + 2 * i + 1] = -INFINITY;
    }
  }
}

// The largest score of each row.
__device__ __forceinline__ void find_largest(const float (&s)[32], float (&largest)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest[i] = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest[i] = fmaxf(largest[i], fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
    largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
  }
}

// The base for a tile with these largest scores.
__device__ __forceinline__ void choose_base(const float (&largest)[2], const RowPair& state, float scale,
                                            float (&base)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = largest[i] * scale;
    base[i] = x > state.base[i] + kHeadroom ? x : state.base[i];
  }
}

// Weights of the scores, as pairs in the layout of A fragments; their sum over this lane's columns.
__device__ __forceinline__ void make_weights(const float (&s)[32], const float (&base)[2], float scale,
                                             uint32_t (&weights)[4][4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float minus = base[i] == -INFINITY ? 0.0f : -base[i];  // nothing seen: all scores are -inf
    sum[i] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = exp2_fast(fmaf(s[4 * j + 2 * i], scale, minus));
      const float y = exp2_fast(fmaf(s[4 * j + 2 * i + 1], scale, minus));
      sum[i] += x + y;
      weights[j / 2][j % 2 * 2 + i] = pack_pair(Bf16(), x, y);
    }
  }
}

__device__ __forceinline__ void store_weights(Shared& shared, const uint32_t (&weights)[4][4], const float (&base)[2]) {
  const int row = threadIdx.x % kGroup / 32 * 16 + threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    store_matrix_x4(shared_address(shared.weights + place(row, 2 * step + chunk)), weights[step]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x % 4 == 0) shared.base[first_row() + 8 * i] = base[i];
  }
}

// The compiler does not make them later than here.
__device__ __forceinline__ void keep(uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
}

// The tile's tokens from `valid` on may hold anything: 0, so that weight 0 times it is 0. By one warpgroup.
__device__ void clear_tokens(uint8_t* tile, int valid, int half) {
  for (int i = threadIdx.x % kGroup; i < (kTokens - valid) * (kMlaLatent / 8); i += kGroup) {
    const int chunk = i % (kMlaLatent / 8), row = valid + i / (kMlaLatent / 8);
    *reinterpret_cast<uint4*>(tile + chunk / 8 * kColumnBytes + place(row, chunk % 8)) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  named_barrier(kOneConsumer + half, kGroup);
}

// Queues the products of kCount columns of queries and keys.
template <int kCount>
__device__ __forceinline__ void multiply_columns(uint64_t queries, uint64_t keys, bool add, float (&s)[32]) {
#pragma unroll
  for (int step = 0; step < 4 * kCount; ++step) {
    const uint32_t at = step / 4 * kColumnBytes + step % 4 * 32;
    wgmma_n64(Bf16(), s, matrix_behind(queries, at), matrix_behind(keys, at), add || step > 0);
  }
}

// A consumer warpgroup, at its place in the tiles of the block. `half` is of the output, and the buffer of its own
// tiles.
template <int kHalf>
struct Consumer {
  int own_parity = 0;  // of the barriers of its own tiles
  int other_parity = 0;
};

// The columns of a tile that are summed to a half.
template <int kHalf>
__device__ __forceinline__ uint64_t values_of(const uint8_t* tile) {
  return matrix_n_major(shared_address(tile) + kHalf * kHalfColumns * kColumnBytes, kColumnBytes);
}

// Queues queries * keys of the next own tile.
template <int kHalf>
__device__ __forceinline__ void multiply_keys(Shared& shared, const Consumer<kHalf>& me, float (&s)[32]) {
  const uint64_t queries = matrix_k_major(shared_address(shared.queries));
  const uint64_t keys = matrix_k_major(shared_address(shared.tiles[kHalf]));
  constexpr uint32_t kMine = kHalf * kHalfColumns * kColumnBytes, kTheirs = (1 - kHalf) * kHalfColumns * kColumnBytes;
  constexpr uint32_t kRope = kRopeColumn * kColumnBytes;
  barrier_wait(&shared.full[kHalf][kOwn], me.own_parity);
  wgmma_fence();
  multiply_columns<kHalfColumns>(matrix_behind(queries, kMine), matrix_behind(keys, kMine), false, s);
  multiply_columns<1>(matrix_behind(queries, kRope), matrix_behind(keys, kRope), true, s);
  barrier_wait(&shared.full[kHalf][kOther], me.own_parity);
  multiply_columns<kHalfColumns>(matrix_behind(queries, kTheirs), matrix_behind(keys, kTheirs), true, s);
  wgmma_commit();
}

// Queues weights * values of the other's next tile; kFirst: `out` is still 0.
template <bool kFirst, int kHalf>
__device__ __forceinline__ void multiply_other(Shared& shared, const Consumer<kHalf>& me, RowPair& state, Output& out) {
  barrier_wait(&shared.weights_full[1 - kHalf], me.other_parity);
  const float base[2] = {shared.base[first_row()], shared.base[first_row() + 8]};
  if constexpr (kFirst) {
    state.base[0] = base[0], state.base[1] = base[1];
  } else {
    move_base(state, base, out);
  }
  barrier_wait(&shared.full[1 - kHalf][kOther], me.other_parity);
  const uint64_t weights = matrix_k_major(shared_address(shared.weights));
  const uint64_t values = values_of<kHalf>(shared.tiles[1 - kHalf]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTokens / 16; ++step) {
    wgmma_n256(Bf16(), out, matrix_behind(weights, step * 32), matrix_behind(values, step * 16 * 128));
  }
  wgmma_commit();
}

template <int kHalf>
__device__ __forceinline__ void release_other(Shared& shared, Consumer<kHalf>& me) {
  arrive_by_warp(&shared.empty[1 - kHalf][kOther]);
  me.other_parity ^= 1;
}

// Own weights * values.
template <int kHalf>
__device__ __forceinline__ void multiply_own(Shared& shared, Consumer<kHalf>& me, const uint32_t (&weights)[4][4],
                                             Output& out) {
  const uint64_t values = values_of<kHalf>(shared.tiles[kHalf]);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTokens / 16; ++step) {
    wgmma_n256(Bf16(), out, weights[step], matrix_behind(values, step * 16 * 128));
  }
  wgmma_commit();
  wgmma_wait();
  wgmma_settle(out);
  arrive_by_warp(&shared.empty[kHalf][kOwn]);
  me.own_parity ^= 1;
}

// The other's next tile, alone.
template <int kHalf>
__device__ __forceinline__ void add_other(Shared& shared, Consumer<kHalf>& me, RowPair& state, Output& out) {
  multiply_other<false>(shared, me, state, out);
  wgmma_wait();
  wgmma_settle(out);
  release_other(shared, me);
}

// What is done with the other's tile in front of an own tile: nothing, as it was added before or is none; queued ahead
// of the own weights; the same, and `out` is still 0.
enum class Front { kNone, kQueued, kFirst };

// One own tile and, beside its weights, the other's tile in front of it.
template <Front kFront, int kHalf>
__device__ __forceinline__ void run_tile(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                         Consumer<kHalf>& me, int block, RowPair& state, Output& out) {
  constexpr bool kHasOther = kFront != Front::kNone;
  const float scale = params.args.softmax_scale * kLog2e;
  const int position = block_position(params.batch, item.sequence, block);
  float s[32], largest[2], base[2], sum[2];
  uint32_t weights[4][4];
  multiply_keys(shared, me, s);
  wgmma_wait();
  wgmma_settle(s);
  if (position + kTokens > item.length - item.num_tokens) mask(s, state, position);
  find_largest(s, largest);
  if constexpr (kHasOther) multiply_other<kFront == Front::kFirst>(shared, me, state, out);
  choose_base(largest, state, scale, base);
  make_weights(s, base, scale, weights, sum);
  if (item.length - position < kTokens) clear_tokens(shared.tiles[kHalf], max(0, item.length - position), kHalf);
  if constexpr (kHasOther) {
    keep(weights);  // the products under way are waited for after the weights
    wgmma_wait();
    wgmma_settle(out);
    release_other(shared, me);
  }
  store_weights(shared, weights, base);
  fence_async_proxy();
  arrive_by_warp(&shared.weights_full[kHalf]);
  move_base(state, base, out);
  state.sum[0] += sum[0], state.sum[1] += sum[1];
  multiply_own(shared, me, weights, out);
}

// What makes each row's output sixteenths of means; the log-sum-exp to memory. Both warpgroups are past their last
// product.
__device__ void finish_rows(const MlaAttendParams& params, const MlaItem& item, Shared& shared, int half,
                            const RowPair& state, float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0) shared.sums[half][first_row() + 8 * i] = sum;
  }
  named_barrier(kConsumers, 2 * kGroup);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row() + 8 * i;
    const float sum = shared.sums[0][row] + shared.sums[1][row];
    scale[i] = sum > 0 ? 1 / kMeanUnit / sum : 0.0f;
    if (half != 0 || threadIdx.x % 4 != 0) continue;
    const float lse = sum == 0 ? -INFINITY : state.base[i] / kLog2e + __logf(sum);
    store_lse(params, item, kRows, row, state.last[i] >= 0, lse);
  }
}

// A half of the item's rows to memory. A warp lays its own out where the queries lay, as f16, and stores them line by
// line from there, which takes less code than stores from registers: a block runs this once or twice, so code is what
// it costs. Rows are 16 bytes further apart than they are long: neighbouring ones meet different banks.
__device__ __forceinline__ void store_output(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                             int half, const float (&scale)[2], const Output& out) {
  constexpr int kPitch = 2 * kMlaLatent + 16;
  static_assert(kRows * kPitch <= sizeof(shared.queries));
  const MlaItemOutput to(params, item, kRows);
  const int lane = threadIdx.x % 32, first = threadIdx.x % kGroup / 32 * 16, column = half * kHalfColumns * 64;
  uint8_t* rows = shared.queries + first * kPitch + column * 2;
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = out + 4 * (j + i / 2) + i % 2 * 2;
      pairs[i] = pack_means<true>(x[0] * scale[i % 2], x[1] * scale[i % 2]);
    }
    store_matrix_x4(shared_address(rows + lane % 16 * kPitch + (j + lane / 16) * 16), pairs);
  }
  __syncwarp();
  const int count = min(16, item.num_tokens * params.heads - item.row_begin - first);
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    uint4 x = *reinterpret_cast<const uint4*>(rows + i * kPitch + lane * 16);
    if (!to.is_f16) x = make_uint4(mean_to_bf16(x.x), mean_to_bf16(x.y), mean_to_bf16(x.z), mean_to_bf16(x.w));
    *reinterpret_cast<uint4*>(to.row(first + i) + column + lane * 8) = x;
  }
}

// A consumer warpgroup's whole work.
template <int kHalf>
__device__ __forceinline__ void consume(const MlaAttendParams& params, Shared& shared, int2 items) {
  Consumer<kHalf> me;
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem item = params.plan.items[i];
    load_queries(params, item, shared.queries);
    RowPair state = first_state(params, item);
    Output out = {};
    const int count = item.block_end - item.block_begin;
    if (kHalf < count) {
      constexpr Front kFront = kHalf == 0 ? Front::kNone : Front::kFirst;
      run_tile<kFront>(params, item, shared, me, item_block(item, kHalf), state, out);
    }
    for (int tile = kHalf + 2; tile < count; tile += 2) {
      if constexpr (kHalf == 0) add_other(shared, me, state, out);
      run_tile<kHalf == 0 ? Front::kNone : Front::kQueued>(params, item, shared, me, item_block(item, tile), state,
                                                           out);
    }
    if ((count - 1) % 2 != kHalf) add_other(shared, me, state, out);  // the last tile is the other's
    float scale[2];
    finish_rows(params, item, shared, kHalf, state, scale);
    store_output(params, item, shared, kHalf, scale, out);
    if (i + 1 < items.y) named_barrier(kConsumers, 2 * kGroup);  // before the next queries take the rows' place
  }
}

// `fillers` arrive at each part of a tile that has come.
__device__ void init_barriers(Shared& shared, int fillers) {
  for (int i = 0; i < 2; ++i) {
    for (int part = 0; part < kParts; ++part) {
      barrier_init(&shared.full[i][part], fillers);
      barrier_init(&shared.empty[i][part], kGroup / 32);
    }
    barrier_init(&shared.weights_full[i], kGroup / 32);
  }
  barrier_init_fence();
}

template <bool kRecords>
__global__ void __launch_bounds__(3 * kGroup, 1)
    mla_wgmma_kernel(const __grid_constant__ MlaAttendParams params, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared, kRecords ? kGroup / 32 : 1);
  __syncthreads();
  dependency_wait();
  dependency_trigger();
  const int2 items = params.plan.slot_items[blockIdx.x];
  const int group = threadIdx.x / kGroup;
  constexpr int kMany = kRecords ? 208 : 232, kFew = 504 - 2 * kMany;  // registers of a thread
  if (group == 0) {
    registers_grow<kMany>();
    consume<0>(params, shared, items);
  } else if (group == 1) {
    registers_grow<kMany>();
    consume<1>(params, shared, items);
  } else {
    registers_shrink<kFew>();
    if constexpr (kRecords) {
      widen_tiles(params, shared, items);
    } else {
      if (threadIdx.x == 2 * kGroup) bring_tiles(params, map, shared, items);
    }
  }
#endif
}

// Keys as [page][row][column]; the number of pages is not known here, and only bounds-checks would need it. Reads are
// not promoted to 256 bytes of L2, which was slower: a row of a box has 128, and a key's 1,152 are no multiple of 256.
cudaError_t make_map(const MlaDecodeArgs& args, CUtensorMap* map) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  const cudaError_t error = find_tensor_map_encoder(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[3] = {kMlaWidth, kMlaBlock, 1u << 26};
  const cuuint64_t strides[2] = {kMlaWidth * 2, static_cast<cuuint64_t>(args.page_bytes)};
  const cuuint32_t box[3] = {64, kTokens, 1}, steps[3] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(args.kv), sizes, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t mla_wgmma_prepare() {
  static_assert(sizeof(Shared) <= 227 * 1024);
  for (const cudaError_t error :
       {allow_shared(mla_wgmma_kernel<false>, sizeof(Shared)), allow_shared(mla_wgmma_kernel<true>, sizeof(Shared))})
    if (error != cudaSuccess) return error;
  return cudaSuccess;
}

cudaError_t mla_wgmma_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream) {
  CUtensorMap map{};
  const LaunchShape shape{dim3(config.slots), dim3(3 * kGroup), sizeof(Shared), stream};
  if (config.format == LatentFormat::kF8Tiles) return launch(mla_wgmma_kernel<true>, shape, params, map);
  const cudaError_t error = make_map(params.args, &map);
  if (error != cudaSuccess) return error;
  return launch(mla_wgmma_kernel<false>, shape, params, map);
}

}  // namespace perigee

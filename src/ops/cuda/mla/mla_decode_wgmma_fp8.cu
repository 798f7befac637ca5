// MLA decode on Hopper over an fp8 cache: 64 query rows a block, keys and values converted on their way into the
// product.
//
// A tile of 64 keys stays e4m3 in shared memory, as the bulk copy brought it, and is widened in registers
// (mla_wgmma_fp8.cuh). Shared memory, which binds this kernel, is read for half of the time that the products take.
//
// Three warpgroups. The first two own a half of the output each, 256 columns, and, in turn, the tiles of keys: the
// owner of a tile makes its scores and, of these, its weights, which it leaves in shared memory; then both add weights
// * values to their halves. So one warpgroup's softmax runs beside the other's products, and beside own ones: half of
// those of the tile in front are queued before it (add_pair). Both run the same instructions. Of the third warpgroup
// two warps sum the weights and one thread brings tiles.
//
// Weights are 2^(score - base). The base of a row is passed from tile to tile and moves only when a score exceeds it by
// more than 8 (as in mla_decode_wgmma.cu). Query rows lie along the registers here, keys across the warps; so what a
// tile usually asks of other threads is one vote, whether any base must move.
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_page_map.h"
#include "ops/cuda/mla/mla_wgmma_fp8.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to empty kernels
#endif

namespace perigee {
namespace {

using mla_wgmma::arrive_by_warp;
using namespace mla_wgmma_fp8;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kHeadroom = 8;    // weights are at most 2^8
constexpr float kUnseen = 1e30f;  // minus the base of a row that has seen no key: any score exceeds it

enum NamedBarrier { kConsumers = 1, kScales = 2, kOneConsumer = 3 };  // kOneConsumer, + 1: of one warpgroup

// A consumer warpgroup, and its place in the tiles of the block.
struct Consumer {
  int half;             // of the output; its tiles are those of this parity in their item
  Ring next;            // the tile whose values it adds next
  uint32_t parity = 0;  // bit w: of the weights of the next tile of warpgroup w

  __device__ __forceinline__ int weights_parity(int owner) const { return parity >> owner & 1; }
};

// Two chunks of 16 bytes of bf16, columns 16 c .. 16 c + 15 of a row, as f16 in the order of widen_keys.
__device__ __forceinline__ void store_query(uint8_t* column, int row, int c, const uint4& x, const uint4& y) {
  *reinterpret_cast<uint4*>(column + place(row, 2 * c)) =
      make_uint4(bf16_pair_to_f16(x.x), bf16_pair_to_f16(x.z), bf16_pair_to_f16(y.x), bf16_pair_to_f16(y.z));
  *reinterpret_cast<uint4*>(column + place(row, 2 * c + 1)) =
      make_uint4(bf16_pair_to_f16(x.y), bf16_pair_to_f16(x.w), bf16_pair_to_f16(y.y), bf16_pair_to_f16(y.w));
}

// The item's query rows into shared memory, rows past the last as 0; what is known of rows before the first tile.
__device__ void load_queries(const MlaAttendParams& params, const MlaItem& item, Shared& shared) {
  const int rows = item.num_tokens * params.heads - item.row_begin;
  const int64_t first = static_cast<int64_t>(item.first_token) * params.heads + item.row_begin;
  if (threadIdx.x < kRows) {
    const int token = (item.row_begin + static_cast<int>(threadIdx.x)) / params.heads;
    shared.minus_base[threadIdx.x] = kUnseen;
    shared.last[threadIdx.x] = token < item.num_tokens ? item.length - item.num_tokens + token : -1;
  }
  const int row = threadIdx.x / 4, c = threadIdx.x % 4;
  const uint4* from = static_cast<const uint4*>(params.args.q) + (first + row) * (kMlaWidth / 8) + 2 * c;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 x = row < rows ? from[8 * n] : zero, y = row < rows ? from[8 * n + 1] : zero;
    store_query(shared.queries + n * kColumnBytes, row, c, x, y);
  }
  fence_async_proxy();
  named_barrier(kConsumers, 2 * kGroup);
}

// Hides the scores of keys that a row does not see; the tile begins at `position`.
__device__ __forceinline__ void mask(const Shared& shared, int position, float (&s)[32]) {
  const int key = position + warp() * 16 + lane() / 4;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int last = shared.last[thread_row(i)];
    float* of_row = s + i / 2 * 4 + i % 2;
    if (key > last) of_row[0] = -INFINITY;
    if (key + 8 > last) of_row[2] = -INFINITY;
  }
}

// This thread's rows of an array.
__device__ __forceinline__ void read_rows(const float* from, float (&to)[kThreadRows]) {
#pragma unroll
  for (int i = 0; i < kThreadRows; i += 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from + thread_row(0) + row_step(i));
    to[i] = pair.x, to[i + 1] = pair.y;
  }
}

// The same pair each time it is wanted: the compiler would keep it in registers, which there are not.
__device__ __forceinline__ float2 read_pair(const float* from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared_address(from)));
  return x;
}

// The larger of this thread's two scores of its i-th row.
__device__ __forceinline__ float largest_of(const float (&s)[32], int i) {
  return fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
}

// Moves the bases that the tile's largest scores exceed; by one warpgroup.
__device__ __forceinline__ void move_bases(Shared& shared, int half, const float (&s)[32], float scale) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    float x = largest_of(s, i);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    if (lane() < 4) shared.by_warp(half, warp())[thread_row(i)] = x;
  }
  named_barrier(kOneConsumer + half, kGroup);
  const int row = threadIdx.x % kGroup;
  if (row < kRows) {
    const float* of_row = shared.by_warp(half, 0) + row;
    const float x = fmaxf(fmaxf(of_row[0], of_row[kRows]), fmaxf(of_row[2 * kRows], of_row[3 * kRows]));
    const float minus = shared.minus_base[row];
    const float moved = fmaf(x, scale, minus) > kHeadroom ? -x * scale : minus;
    shared.shrink[half][row] = exp2_fast(moved - minus);
    shared.minus_base[row] = moved;
  }
  named_barrier(kOneConsumer + half, kGroup);
}

// Makes shared.minus_base that of this tile's weights. True if any moved; then shared.shrink is of this tile.
__device__ __forceinline__ bool settle_bases(Shared& shared, int half, float (&s)[32], float scale) {
  float most[4];  // over the bases; four, as one chain of comparisons would take as long as the products beside it
#pragma unroll
  for (int i = 0; i < kThreadRows; i += 2) {
    const float2 minus = read_pair(shared.minus_base + thread_row(0) + row_step(i));
    const float x = fmaf(largest_of(s, i), scale, minus.x), y = fmaf(largest_of(s, i + 1), scale, minus.y);
    most[i % 4] = i < 4 ? x : fmaxf(most[i % 4], x);
    most[i % 4 + 1] = i < 4 ? y : fmaxf(most[i % 4 + 1], y);
  }
  const bool exceeds = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) > kHeadroom;
  const bool moved = named_barrier_any(kOneConsumer + half, kGroup, exceeds);
  if (moved) {
    wgmma_settle(s);  // the largest are computed again rather than kept
    move_bases(shared, half, s, scale);
  }
  return moved;
}

// Weights of the scores into shared memory.
__device__ __forceinline__ void store_weights(Shared& shared, int half, const float (&s)[32], float scale) {
  const int row = lane() / 16 * 8 + lane() % 8, chunk = 2 * warp() + lane() / 8 % 2;
  const uint32_t to = shared_address(shared.weights[half] + place(row, chunk));
  const float* minus = shared.minus_base + thread_row(0);
  float2 ahead[2] = {read_pair(minus), read_pair(minus + 8)};
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float2 of_pair[2] = {ahead[0], ahead[1]};
    if (j + 2 < 8) ahead[0] = read_pair(minus + (j + 2) * 8), ahead[1] = read_pair(minus + (j + 3) * 8);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = exp2_fast(fmaf(s[4 * j + 2 * i], scale, of_pair[i / 2].x));
      const float y = exp2_fast(fmaf(s[4 * j + 2 * i + 1], scale, of_pair[i / 2].y));
      pairs[i] = pack_pair(F16(), x, y);
    }
    store_matrix_x4_transposed(to + j * 8 * 128, pairs);
  }
}

// The tile's tokens from `valid` on may hold anything: 0, so that weight 0 times it is 0. By one warpgroup.
__device__ void clear_tokens(uint8_t* tile, int valid) {
  for (int i = threadIdx.x % kGroup; i < (kTokens - valid) * (kMlaLatent / 16); i += kGroup) {
    const int strip = i % (kMlaLatent / 64), chunk = i / (kMlaLatent / 64);
    *reinterpret_cast<uint4*>(tile + strip * kStripBytes + valid * 64 + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void shrink_output(const float* by, Output& out) {
  float shrink[kThreadRows];
  read_rows(by, shrink);
#pragma unroll
  for (int j = 0; j < kHalfStrips * 32; ++j) out[j / 32][j % 32] *= shrink[j % 32 / 4 * 2 + j % 2];
}

__device__ __forceinline__ uint64_t weights_of(const Shared& shared, int owner) {
  return matrix_k_major(shared_address(shared.weights[owner]));
}

// Queues the scores of the tile at `ring`, once it has come.
__device__ __forceinline__ void begin_scores(Shared& shared, const Ring& ring, float (&s)[32]) {
  barrier_wait(&shared.full[ring.stage()], ring.parity());
  multiply_keys(shared, ring, s);
}

// Weights of an own tile from its scores; true if a base moved. Bases are of the tile in front.
__device__ __forceinline__ bool weigh(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                      const Consumer& me, const Ring& ring, int position, float (&s)[32]) {
  const int half = me.half;
  const float scale = params.args.softmax_scale * kLog2e * params.args.kv_scale;
  arrive_by_warp(&shared.rope_empty[ring.rope_stage()]);
  barrier_wait(&shared.weights_empty[half], me.weights_parity(half) ^ 1);
  if (position + kTokens > item.length - item.num_tokens) mask(shared, position, s);
  const bool moved = settle_bases(shared, half, s, scale);
  if (threadIdx.x % kGroup == 0) shared.moved[half] = moved;
  store_weights(shared, half, s, scale);
  if (item.length - position < kTokens) clear_tokens(shared.latents[ring.stage()], max(0, item.length - position));
  return moved;
}

// Weights and cleared tokens are there for everybody.
__device__ __forceinline__ void tell_weights(Shared& shared, int half) {
  fence_async_proxy();
  arrive_by_warp(&shared.weights_full[half]);
}

// Waits for the weights of the next tile, which is `owner`'s, and loads its first values.
__device__ __forceinline__ void begin_values(Shared& shared, const Consumer& me, int owner, Values& values) {
  barrier_wait(&shared.weights_full[owner], me.weights_parity(owner));
  values.begin(shared, me.half, me.next);
}

__device__ __forceinline__ void leave_tile(Shared& shared, Consumer& me, int owner) {
  arrive_by_warp(&shared.empty[me.next.stage()]);
  if (owner != me.half) arrive_by_warp(&shared.weights_empty[owner]);
  me.parity ^= 1 << owner;
  ++me.next.number;
}

// Adds a tile of which strip 0 is widened and strip 1 loaded.
__device__ __forceinline__ void add_strips(Values& values, uint64_t weights, Output& out) {
  static_assert(kHalfStrips == 4);
  values.multiply(0, weights, out);
  values.widen(1);
  values.load(2);
  values.multiply(1, weights, out);
  values.load(3);
  values.wait<1>(0);
  values.widen(2);
  values.multiply(2, weights, out);
  values.wait<1>(1);
  values.widen(3);
  values.multiply(3, weights, out);
  settle_output(out);
}

// Weighs the item's first tile, an own one.
__device__ __forceinline__ void weigh_first(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                            const Consumer& me) {
  float s[32];
  begin_scores(shared, me.next, s);
  wgmma_wait_for<0>();
  wgmma_settle(s);
  weigh(params, item, shared, me, me.next, block_position(params.batch, item.sequence, item_block(item, 0)), s);
  tell_weights(shared, me.half);
}

// Adds the next tile, which is `owner`'s, with nothing beside it.
__device__ __forceinline__ void add_tile(Shared& shared, Consumer& me, int owner, Output& out) {
  Values values;
  begin_values(shared, me, owner, values);
  values.widen(0);
  if (shared.moved[owner]) shrink_output(shared.shrink[owner], out);
  add_strips(values, weights_of(shared, owner), out);
  leave_tile(shared, me, owner);
}

// Adds the other's next tile and the own one after it, the i-th of the item, which it weighs. Half of the other's
// products run beside these weights, half while they become visible.
__device__ __forceinline__ void add_pair(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                         Consumer& me, int i, Output& out) {
  const int half = me.half, other = half ^ 1;
  const int position = block_position(params.batch, item.sequence, item_block(item, i));
  const Ring ring{me.next.number + 1};
  float s[32];
  Values values;
  begin_scores(shared, ring, s);
  begin_values(shared, me, other, values);
  values.widen(0);
  wgmma_wait_for<0>();
  wgmma_settle(s);
  if (shared.moved[other]) shrink_output(shared.shrink[other], out);
  values.multiply(0, weights_of(shared, other), out);
  values.widen(1);
  values.multiply(1, weights_of(shared, other), out);
  const bool moved = weigh(params, item, shared, me, ring, position, s);
  values.load(2), values.load(3);
  values.wait<0>(0), values.wait<0>(1);
  values.widen(2);
  values.multiply(2, weights_of(shared, other), out);
  values.widen(3);
  values.multiply(3, weights_of(shared, other), out);
  tell_weights(shared, half);

  Consumer own = me;
  own.parity ^= 1 << other, ++own.next.number;
  begin_values(shared, own, half, values);
  values.wait<1>(0);
  values.widen(0);
  values.wait<0>(1);
  settle_output(out);
  leave_tile(shared, me, other);
  if (moved) shrink_output(shared.shrink[half], out);
  add_strips(values, weights_of(shared, half), out);
  leave_tile(shared, me, half);
}

// The sum of a row's weights of one tile, as they are multiplied.
__device__ __forceinline__ float sum_weights(const uint8_t* weights, int row) {
  float sum = 0;
#pragma unroll 2
  for (int chunk = 0; chunk < kTokens / 8; ++chunk) {
    const uint4 x = *reinterpret_cast<const uint4*>(weights + place(row, chunk));
    for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
      const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      sum += y.x + y.y;
    }
  }
  return sum;
}

// What a row's output is multiplied by, into shared memory; its log-sum-exp to memory.
__device__ __forceinline__ void finish_row(const MlaAttendParams& params, const MlaItem& item, Shared& shared, int row,
                                           float sum) {
  shared.scale[row] = sum > 0 ? params.args.kv_scale / kMeanUnit / sum : 0.0f;
  const float lse = sum == 0 ? -INFINITY : -shared.minus_base[row] / kLog2e + __logf(sum);
  store_lse(params, item, kRows, row, shared.last[row] >= 0, lse);
}

// One thread a row: sums the weights of all items.
__device__ void sum_rows(const MlaAttendParams& params, Shared& shared, int row, int2 items) {
  uint32_t parity = 0;  // bit w: of the weights of the next tile of warpgroup w
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem& item = params.plan.items[i];
    const int count = item.block_end - item.block_begin;
    float sum = 0;
    for (int tile = 0; tile < count; ++tile) {
      const int owner = tile % 2;
      barrier_wait(&shared.weights_full[owner], parity >> owner & 1);
      if (shared.moved[owner]) sum *= shared.shrink[owner][row];
      sum += sum_weights(shared.weights[owner], row);
      arrive_by_warp(&shared.weights_empty[owner]);
      parity ^= 1 << owner;
    }
    finish_row(params, item, shared, row, sum);
    named_barrier(kScales, 2 * kGroup + kRows);
  }
}

// Scaled; `rows` are left from this thread's first on.
template <bool kF16>
__device__ __forceinline__ void store_output(const MlaItemOutput& to, int rows, int half,
                                             const float (&scale)[kThreadRows], const Output& out) {
  const int stride = kF16 ? to.stride : kMlaLatent;
  uint16_t* at = to.at + thread_row(0) * stride + half * (kMlaLatent / 2) + warp() * 16 + lane() / 4 * 2;
  asm volatile("" : "+l"(at));  // else the compiler keeps an offset of each row in a register all the time
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int element = i / 2 * 4 + i % 2;
    if (row_step(i) >= rows) continue;
#pragma unroll
    for (int strip = 0; strip < kHalfStrips; ++strip) {
      *reinterpret_cast<uint32_t*>(at + row_step(i) * stride + strip * 64) =
          pack_means<kF16>(out[strip][element] * scale[i], out[strip][element + 2] * scale[i]);
    }
  }
}

// The item's output, or partial output, to memory.
__device__ __forceinline__ void store_item(const MlaAttendParams& params, const MlaItem& item, const Shared& shared,
                                           int half, const Output& out) {
  const int rows = item.num_tokens * params.heads - item.row_begin - thread_row(0);
  float scale[kThreadRows];
  read_rows(shared.scale, scale);
  const MlaItemOutput to(params, item, kRows);
  if (to.is_f16) {
    store_output<true>(to, rows, half, scale, out);
  } else {
    store_output<false>(to, rows, half, scale, out);
  }
}

// A consumer warpgroup's whole work.
__device__ __forceinline__ void consume(const MlaAttendParams& params, Shared& shared, int half, int2 items) {
  Consumer me{half};
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem item = params.plan.items[i];
    load_queries(params, item, shared);
    Output out = {};
    const int count = item.block_end - item.block_begin;
    int tile = half;
    if (tile == 0) {
      weigh_first(params, item, shared, me);
      add_tile(shared, me, half, out);
      tile = 2;
    }
#pragma unroll 1
    for (; tile < count; tile += 2) add_pair(params, item, shared, me, tile, out);
    if (tile == count) add_tile(shared, me, half ^ 1, out);
    named_barrier(kScales, 2 * kGroup + kRows);
    store_item(params, params.plan.items[i], shared, half, out);  // read again: registers are few
  }
}

// Tensor maps of the parts of a tile.
struct Maps {
  CUtensorMap latents, rope;
};

// One thread: the tiles of all items through the tensor maps.
__device__ void bring_tiles(const MlaAttendParams& params, const Maps& maps, Shared& shared, int2 items) {
  Ring ring;
  for (TileStream<kTokens> tile(params, items); !tile.done(); tile.next(), ++ring.number) {
    uint64_t* full = &shared.full[ring.stage()];
    barrier_wait(&shared.empty[ring.stage()], ring.parity() ^ 1);
    barrier_expect(full, kLatentBytes + kStripBytes);
    const uint32_t latents = shared_address(shared.latents[ring.stage()]);
    const uint32_t rope = shared_address(shared.rope[ring.rope_stage()]);
    bulk_copy_box(latents, &maps.latents, make_int4(0, 0, 0, tile.page), full);
    barrier_wait(&shared.rope_empty[ring.rope_stage()], ring.rope_parity() ^ 1);
    bulk_copy_box(rope, &maps.rope, make_int4(0, 0, kMlaLatent / 64, tile.page), full);
  }
}

__device__ void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages; ++i) {
    barrier_init(&shared.full[i], 1);
    barrier_init(&shared.empty[i], 2 * kGroup / 32);
  }
  for (int i = 0; i < kRopeStages; ++i) barrier_init(&shared.rope_empty[i], kGroup / 32);
  for (int i = 0; i < 2; ++i) {
    barrier_init(&shared.weights_full[i], kGroup / 32);
    barrier_init(&shared.weights_empty[i], (kGroup + kRows) / 32);
  }
  barrier_init_fence();
}

__global__ void __launch_bounds__(3 * kGroup, 1)
    mla_wgmma_fp8_kernel(const __grid_constant__ MlaAttendParams params, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  dependency_wait();
  dependency_trigger();
  const int2 items = params.plan.slot_items[blockIdx.x];
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);  // the compiler sees that it is the same for a warp
  if (group < 2) {
    registers_grow<232>();
    consume(params, shared, group, items);
  } else {
    registers_shrink<40>();
    const int row = threadIdx.x - 2 * kGroup;
    if (row < kRows) {
      sum_rows(params, shared, row, items);
    } else if (row == kRows) {
      bring_tiles(params, maps, shared, items);
    }
  }
#endif
}

}  // namespace

cudaError_t mla_wgmma_fp8_prepare() {
  static_assert(sizeof(Shared) <= 227 * 1024);
  return allow_shared(mla_wgmma_fp8_kernel, sizeof(Shared));
}

cudaError_t mla_wgmma_fp8_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream) {
  Maps maps{};
  cudaError_t error = make_page_map(params.args, kTokens, kMlaLatent / 64, &maps.latents);
  if (error == cudaSuccess) error = make_page_map(params.args, kTokens, 1, &maps.rope);
  if (error != cudaSuccess) return error;
  return launch(mla_wgmma_fp8_kernel, {dim3(config.slots), dim3(3 * kGroup), sizeof(Shared), stream}, params, maps);
}

}  // namespace perigee

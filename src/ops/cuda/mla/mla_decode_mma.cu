// MLA decode, portable path: mma.sync m16n8k16, under 99 KiB of shared memory. Keys come by bulk copies from 90 on,
// else by cp.async, and lie alike.
//
// A block of eight warps walks over its key tiles (32 or 64 tokens, two buffers: one computed on, one under way).
// Scores: warp (k group, token half) multiplies its 144 columns of the query, kept in registers, with its half of the
// tile's tokens; the four partial scores of an element are added in shared memory by the warp that owns its row, which
// also keeps the row's running maximum and sum (Milakov, Gimelshein 2018). Values: warp w owns columns 64 w ... of the
// output and reads the same tile a second time, transposed by ldmatrix, so keys are fetched from memory once.
//
// fp8 keys stay e4m3 in shared memory and become f16 in registers, exactly; then the product runs in f16, to which the
// queries and probabilities are rounded too. Inside each group of 16 the columns of a key are taken in the order in
// which the bytes fall into registers; a sum does not mind, and the query is loaded in the same order.
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_page_map.h"
#include "ops/cuda/mla/mla_plan.cuh"
#include "ops/cuda/mla/mla_tiles.cuh"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = 8;
constexpr int kGroups = 4;                         // of key columns, in the scores
constexpr int kSteps = kMlaWidth / 16 / kGroups;   // products of 16 columns in a group
constexpr int kWarpColumns = kMlaLatent / kWarps;  // of the output
constexpr float kLog2e = 1.4426950408889634f;

constexpr int kMostHalves = 5;

template <bool kFp8, int kRowTiles>
struct Shape {
  using Element = std::conditional_t<kFp8, F16, Bf16>;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kTokens = kFp8 && kRowTiles == 1 ? 64 : 32;
  static constexpr int kTokenTiles = kTokens / 16;  // products of 8 tokens in a half
  static constexpr int kHalf = kTokens / 2;
  static constexpr int kStripRow = kFp8 ? 64 : 128;
  static constexpr int kStripBytes = kHalf * kStripRow;           // 64 columns of half a tile
  static constexpr int kRowStride = kMlaStrips * kStripRow + 16;  // bf16
  static constexpr int kHalfBytes = kFp8 ? kMlaStrips * kStripBytes : kHalf * kRowStride;
  static constexpr int kStripChunks = kStripRow / 16;
  static constexpr int kStepChunks = kStripChunks / 4;  // columns of one product
  static constexpr int kScoreStride = kTokens + 8;      // so that a warp's rows fall into different banks
  static constexpr int kRowLanes = 32 * kWarps / kRows;
  static constexpr int kLaneTokens = kTokens / kRowLanes;
  static_assert(kLaneTokens == 2 || kLaneTokens == 4);

  struct Shared {
    alignas(16) float scores[kGroups][kRows][kScoreStride];
    uint16_t weights[kRows][kScoreStride];
    float rescale[kRows];
    float scale[kRows];
    uint64_t full[kMostHalves];
    alignas(1024) uint8_t keys[];  // the ring
  };

  // Where chunk `chunk` of a token in a strip lies; eight tokens' same chunks are in eight banks. fp8 as boxes of a
  // tensor map lie, swizzled; bf16 by rows, a chunk apart.
  static __device__ __forceinline__ int place(int token, int strip, int chunk) {
    if constexpr (kFp8) return strip * kStripBytes + token * kStripRow + ((chunk ^ (token / 2 % 4)) << 4);
    return token * kRowStride + strip * kStripRow + chunk * 16;
  }
  // `chunks` further in the strip: an even number, with fp8 any of a token's first.
  static __device__ __forceinline__ uint32_t advance(uint32_t place, int chunks) {
    return kFp8 ? place ^ (chunks * 16) : place + chunks * 16;
  }
};

// The strip of a product's columns and its place there: a group has two strips and a quarter of the last.
__device__ __forceinline__ int2 columns_of(int group, int step) {
  return step < 8 ? make_int2(2 * group + step / 4, step % 4) : make_int2(kMlaStrips - 1, group);
}

// The next stage of the ring, and the parity of its barrier.
struct RingCursor {
  int stage = 0, parity = 0;
  __device__ void next(int halves) {
    if (++stage == halves) stage = 0, parity ^= 1;
  }
};

// Fills the ring: from 90 on by copies that complete on the half's barrier, fp8 as one box of the tensor map, bf16 by
// rows, each warp some of them (a box takes 3 % longer where keys come slowly, copies of short rows 12 %); before by
// cp.async. What lies past a sequence's last token may hold anything; cp.async brings zeros instead.
template <typename S>
struct Filler {
  const MlaAttendParams& params;
  const CUtensorMap& map;
  typename S::Shared& shared;
  TileStream<S::kHalf> from;
  int halves;
  RingCursor cursor;

  __device__ void bring() {
    const int valid = min(S::kHalf, from.length - from.position), row = from.position % kMlaBlock;
    const uint32_t to = shared_address(shared.keys) + cursor.stage * S::kHalfBytes;
    [[maybe_unused]] constexpr int kRowBytes = kMlaStrips * S::kStripRow;
    [[maybe_unused]] const uint8_t* source = static_cast<const uint8_t*>(params.args.kv) +
                                             from.page * params.args.page_bytes + static_cast<int64_t>(row) * kRowBytes;
#if __CUDA_ARCH__ >= 900
    uint64_t* const full = &shared.full[cursor.stage];
    if constexpr (std::is_same_v<typename S::Element, F16>) {
      if (threadIdx.x == 0) {
        barrier_expect(full, valid > 0 ? S::kHalfBytes : 0);
        if (valid > 0) bulk_copy_box(to, &map, make_int4(0, row, 0, from.page), full);
      }
    } else {
      if (threadIdx.x == 0) barrier_expect(full, max(0, valid) * kRowBytes);
      const int token = threadIdx.x / 32 * (S::kHalf / kWarps) + threadIdx.x % 32;
      if (threadIdx.x % 32 < S::kHalf / kWarps && token < valid)
        bulk_copy(to + token * S::kRowStride, source + token * kRowBytes, kRowBytes, full);
    }
#else
    constexpr int kRowChunks = kMlaStrips * S::kStripChunks;
    for (int i = threadIdx.x; i < S::kHalf * kRowChunks; i += kThreads) {
      const int token = i / kRowChunks, chunk = i % kRowChunks;
      copy_async16(to + S::place(token, chunk / S::kStripChunks, chunk % S::kStripChunks), source + i * 16,
                   token < valid ? 16 : 0);
    }
    copy_async_commit();
#endif
    from.next();
    cursor.next(halves);
  }

  // Waits for the half at `use`.
  __device__ void wait(const RingCursor& use) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(&shared.full[use.stage], use.parity);
#else
    copy_async_wait<0>();
#endif
  }
};

// The latents of a half's tokens from `valid` on as 0, so that weight 0 times them is 0.
template <typename S>
__device__ void clear_tokens(uint8_t* half, int valid) {
#if __CUDA_ARCH__ >= 900
  constexpr int kChunks = kMlaLatent / 64 * S::kStripChunks;
  for (int i = threadIdx.x; i < (S::kHalf - valid) * kChunks; i += kThreads) {
    const int token = valid + i / kChunks, chunk = i % kChunks;
    const int at = S::place(token, chunk / S::kStripChunks, chunk % S::kStripChunks);
    *reinterpret_cast<uint4*>(half + at) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();  // a later copy may overwrite them
#endif
}

// This warp's 144 columns of the tile's query rows, as A fragments.
template <bool kFp8, int kRowTiles>
__device__ void load_queries(const MlaAttendParams& params, const MlaItem& item, uint32_t (&q)[kRowTiles][kSteps][4]) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 64, t = lane % 4;
  const int rows = item.num_tokens * params.heads;
  const int64_t first = static_cast<int64_t>(item.first_token) * params.heads;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = item.row_begin + i * 8 + lane / 4;
    const uint16_t* all = static_cast<const uint16_t*>(params.args.q) + (first + row) * kMlaWidth;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int2 columns = columns_of(group, step);
      const uint16_t* from = all + columns.x * 64 + columns.y * 16;
      uint2 pairs = make_uint2(0, 0);
      if (row < rows) {
        if constexpr (kFp8) {
          pairs = *reinterpret_cast<const uint2*>(from + 4 * t);
        } else {
          pairs.x = *reinterpret_cast<const uint32_t*>(from + 2 * t);
          pairs.y = *reinterpret_cast<const uint32_t*>(from + 8 + 2 * t);
        }
      }
      q[i / 2][step][i % 2] = kFp8 ? bf16_pair_to_f16(pairs.x) : pairs.x;
      q[i / 2][step][i % 2 + 2] = kFp8 ? bf16_pair_to_f16(pairs.y) : pairs.y;
    }
  }
}

// Partial scores of all rows against the half tile `keys`, over this warp's columns, into shared.scores.
template <bool kFp8, int kRowTiles>
__device__ void multiply_keys(typename Shape<kFp8, kRowTiles>::Shared& shared, uint32_t keys,
                              const uint32_t (&q)[kRowTiles][kSteps][4]) {
  using S = Shape<kFp8, kRowTiles>;
  using Element = typename S::Element;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 64, first_token = threadIdx.x / 32 % 2 * S::kHalf;
  float score[kRowTiles][S::kTokenTiles][4] = {};
  const int token = kFp8 ? lane % S::kHalf : lane % 8 + lane / 16 * 8, chunk = kFp8 ? 0 : lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int2 columns = columns_of(group, step);
    const uint32_t from = S::advance(keys + S::place(token, columns.x, chunk), columns.y * S::kStepChunks);
    uint32_t b[S::kTokenTiles][2];
    if constexpr (!kFp8) {
      uint32_t r[4];
      load_matrix_x4(r, from);
      b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
    } else if constexpr (S::kTokenTiles == 4) {
      uint32_t r[4];
      load_matrix_x4(r, from);
#pragma unroll
      for (int n = 0; n < 4; ++n) e4m3x4_to_f16(r[n], b[n][0], b[n][1]);
    } else {
      uint32_t r[2];
      load_matrix_x2(r, from);
#pragma unroll
      for (int n = 0; n < 2; ++n) e4m3x4_to_f16(r[n], b[n][0], b[n][1]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::kTokenTiles; ++n) mma_16x8x16(Element(), score[m][n], q[m][step], b[n][0], b[n][1]);
    }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < S::kTokenTiles; ++n) {
      const int row = m * 16 + lane / 4, token = first_token + n * 8 + lane % 4 * 2;
      const float(&c)[4] = score[m][n];
      *reinterpret_cast<float2*>(&shared.scores[group][row][token]) = make_float2(c[0], c[1]);
      *reinterpret_cast<float2*>(&shared.scores[group][row + 8][token]) = make_float2(c[2], c[3]);
    }
  }
}

// The running softmax of one query row; kRowLanes neighbouring lanes share a row.
struct RowState {
  float largest;  // of the scaled scores, times log2(e)
  float sum;      // of this lane's weights
  int position;   // the last position this row sees; -1: no such row
};

template <bool kFp8, int kRowTiles>
__device__ void update_row(typename Shape<kFp8, kRowTiles>::Shared& shared, RowState& state, float scale,
                           int tile_position) {
  using S = Shape<kFp8, kRowTiles>;
  const int row = threadIdx.x / S::kRowLanes, first = threadIdx.x % S::kRowLanes * S::kLaneTokens;
  float x[S::kLaneTokens] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const float* part = &shared.scores[group][row][first];
    if constexpr (S::kLaneTokens == 4) {
      const float4 four = *reinterpret_cast<const float4*>(part);
      x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(part);
      x[0] += two.x, x[1] += two.y;
    }
  }
  float largest = state.largest;
#pragma unroll
  for (int j = 0; j < S::kLaneTokens; ++j) {
    x[j] = tile_position + first + j <= state.position ? x[j] * scale : -INFINITY;
    largest = fmaxf(largest, x[j]);
  }
#pragma unroll
  for (int step = S::kRowLanes / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const float base = largest == -INFINITY ? 0.0f : largest;  // nothing seen so far: all weights are 0
  const float rescale = exp2_fast(state.largest - base);
  state.largest = largest;
  state.sum *= rescale;
#pragma unroll
  for (int j = 0; j < S::kLaneTokens; j += 2) {
    const float first_weight = exp2_fast(x[j] - base), second_weight = exp2_fast(x[j + 1] - base);
    state.sum += first_weight + second_weight;
    *reinterpret_cast<uint32_t*>(&shared.weights[row][first + j]) =
        pack_pair(typename S::Element(), first_weight, second_weight);
  }
  if (threadIdx.x % S::kRowLanes == 0) shared.rescale[row] = rescale;
}

// For a warp without query rows, once an item: weights 0 that stay.
template <bool kFp8, int kRowTiles>
__device__ void clear_row(typename Shape<kFp8, kRowTiles>::Shared& shared) {
  using S = Shape<kFp8, kRowTiles>;
  const int row = threadIdx.x / S::kRowLanes, first = threadIdx.x % S::kRowLanes * S::kLaneTokens;
#pragma unroll
  for (int j = 0; j < S::kLaneTokens; j += 2) *reinterpret_cast<uint32_t*>(&shared.weights[row][first + j]) = 0;
  if (threadIdx.x % S::kRowLanes == 0) shared.rescale[row] = 1.0f;
}

template <int kRowTiles>
using Output = float[kRowTiles][kWarpColumns / 8][4];

template <int kRowTiles>
__device__ void rescale_output(const float* rescale, Output<kRowTiles>& out) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const float top = rescale[m * 16 + lane / 4], bottom = rescale[m * 16 + 8 + lane / 4];
    if (!__any_sync(~0u, top != 1.0f || bottom != 1.0f)) continue;
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) {
      out[m][n][0] *= top, out[m][n][1] *= top;
      out[m][n][2] *= bottom, out[m][n][3] *= bottom;
    }
  }
}

// out += weights * the tile's first 512 columns, this warp's 64 of them. fp8: product n holds the even columns of
// 16-byte chunk n / 2 (n even) or its odd ones.
template <bool kFp8, int kRowTiles>
__device__ void multiply_values(typename Shape<kFp8, kRowTiles>::Shared& shared, const uint32_t (&halves)[2],
                                Output<kRowTiles>& out) {
  using S = Shape<kFp8, kRowTiles>;
  using Element = typename S::Element;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  rescale_output<kRowTiles>(shared.rescale, out);
  const uint32_t place = S::place(lane % 16, warp, lane / 16);  // a warp's columns are a strip
  const uint32_t weights = shared_address(&shared.weights[lane % 8 + lane / 8 % 2 * 8][lane / 16 * 8]);
#pragma unroll
  for (int step = 0; step < S::kTokens / 16; ++step) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_matrix_x4(a[m], weights + (m * 16 * S::kScoreStride + step * 16) * 2);
    static_assert(kFp8 || S::kHalf == 16);
    const uint32_t keys = halves[step * 16 / S::kHalf] + step * 16 % S::kHalf * S::kStripRow + place;
#pragma unroll
    for (int pair = 0; pair < S::kStripChunks / 2; ++pair) {
      uint32_t r[4];
      load_matrix_x4_transposed(r, S::advance(keys, pair * 2));
      if constexpr (kFp8) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          uint32_t low[2], high[2];  // of the even and the odd columns; bytes 0, 2 are one column, 1, 3 the next
          e4m3x4_to_f16(__byte_perm(r[2 * c], 0, 0x3120), low[0], low[1]);
          e4m3x4_to_f16(__byte_perm(r[2 * c + 1], 0, 0x3120), high[0], high[1]);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd)
              mma_16x8x16(Element(), out[m][pair * 4 + c * 2 + odd], a[m], low[odd], high[odd]);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_16x8x16(Element(), out[m][pair * 2], a[m], r[0], r[1]);
          mma_16x8x16(Element(), out[m][pair * 2 + 1], a[m], r[2], r[3]);
        }
      }
    }
  }
}

// Row sums to shared.scale (what the output is multiplied by), log-sum-exp to memory.
template <bool kFp8, int kRowTiles>
__device__ void finish_rows(const MlaAttendParams& params, const MlaItem& item,
                            typename Shape<kFp8, kRowTiles>::Shared& shared, const RowState& state) {
  using S = Shape<kFp8, kRowTiles>;
  float sum = state.sum;
#pragma unroll
  for (int step = S::kRowLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % S::kRowLanes != 0) return;
  const int row = threadIdx.x / S::kRowLanes;
  shared.scale[row] = sum > 0 ? (kFp8 ? params.args.kv_scale : 1.0f) / kMeanUnit / sum : 0.0f;
  const float lse = sum == 0 ? -INFINITY : state.largest / kLog2e + __logf(sum);
  store_lse(params, item, S::kRows, row, state.position >= 0, lse);
}

template <bool kFp8, bool kF16, int kRowTiles>
__device__ __forceinline__ void store_output(const MlaItemOutput& to, int rows, const float* scale,
                                             const Output<kRowTiles>& out) {
  const int stride = kF16 ? to.stride : kMlaLatent;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = i * 8 + lane / 4, c = i % 2 * 2;
    if (row >= rows) continue;
    const float factor = scale[row];
    uint16_t* at = to.at + row * stride + warp * kWarpColumns + (kFp8 ? 4 * t : 2 * t);
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; n += 2) {
      const float(&x)[4] = out[i / 2][n], (&y)[4] = out[i / 2][n + 1];
      if constexpr (kFp8) {  // products n, n + 1 hold columns 4t, 4t + 2 and 4t + 1, 4t + 3 of their chunk
        *reinterpret_cast<uint2*>(at + n * 8) = make_uint2(pack_means<kF16>(x[c] * factor, y[c] * factor),
                                                           pack_means<kF16>(x[c + 1] * factor, y[c + 1] * factor));
      } else {
        *reinterpret_cast<uint32_t*>(at + n * 8) = pack_means<kF16>(x[c] * factor, x[c + 1] * factor);
        *reinterpret_cast<uint32_t*>(at + n * 8 + 8) = pack_means<kF16>(y[c] * factor, y[c + 1] * factor);
      }
    }
  }
}

template <bool kFp8, int kRowTiles>
__device__ RowState first_state(const MlaAttendParams& params, const MlaItem& item) {
  const int row = item.row_begin + static_cast<int>(threadIdx.x) / Shape<kFp8, kRowTiles>::kRowLanes;
  const int token = row / params.heads;
  return {-INFINITY, 0.0f, token < item.num_tokens ? item.length - item.num_tokens + token : -1};
}

template <bool kFp8, int kRowTiles>
__global__ void __launch_bounds__(kThreads, kRowTiles == 1 ? 2 : 1)
    mla_mma_kernel(const __grid_constant__ MlaAttendParams params, const __grid_constant__ CUtensorMap map,
                   const int halves) {
  using S = Shape<kFp8, kRowTiles>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(shared_bytes);
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (int i = 0; i < halves; ++i) barrier_init(&shared.full[i], 1);
    barrier_init_fence();
    if constexpr (kFp8) prefetch_map(&map);
  }
  __syncthreads();
#endif
  dependency_wait();
  dependency_trigger();
  const int2 items = params.plan.slot_items[blockIdx.x];
  Filler<S> filler{params, map, shared, {params, items}, halves, {}};
  int ahead = 0;  // halves brought and not used up
  for (; ahead < halves && !filler.from.done(); ++ahead) filler.bring();
  const float scale = params.args.softmax_scale * kLog2e * (kFp8 ? params.args.kv_scale : 1.0f);
  RingCursor use;
  bool first = true;
  for (int i = items.x; i < items.y; ++i) {
    const MlaItem item = params.plan.items[i];
    uint32_t q[kRowTiles][kSteps][4];
    load_queries<kFp8, kRowTiles>(params, item, q);
    RowState state = first_state<kFp8, kRowTiles>(params, item);
    const int warp_row = item.row_begin + static_cast<int>(threadIdx.x) / 32 * (S::kRows / kWarps);
    const bool has_rows = warp_row < item.num_tokens * params.heads;
    if (!has_rows) clear_row<kFp8, kRowTiles>(shared);
    Output<kRowTiles> out = {};
    for (int token = 0; token < (item.block_end - item.block_begin) * kMlaBlock; token += S::kTokens) {
      const int block = item_block(item, token / kMlaBlock);
      const int position = block_position(params.batch, item.sequence, block) + token % kMlaBlock;
      const uint32_t ring = shared_address(shared.keys);
      uint32_t keys[2];
#pragma unroll
      for (uint32_t& half : keys) {
        half = ring + use.stage * S::kHalfBytes;
        filler.wait(use);
        use.next(halves);
      }
      __syncthreads();  // this tile is there for all warps, and all are done with the one before
      if (!first) ahead -= 2;
      for (; ahead < halves && !filler.from.done(); ++ahead) filler.bring();
      first = false;
      multiply_keys<kFp8, kRowTiles>(shared, threadIdx.x / 32 % 2 == 0 ? keys[0] : keys[1], q);
      __syncthreads();
      const int valid = item.length - position;
      if (valid < S::kHalf) clear_tokens<S>(shared.keys + (keys[0] - ring), max(0, valid));
      if (valid < S::kTokens) clear_tokens<S>(shared.keys + (keys[1] - ring), max(0, valid - S::kHalf));
      if (has_rows) update_row<kFp8, kRowTiles>(shared, state, scale, position);
      __syncthreads();
      multiply_values<kFp8, kRowTiles>(shared, keys, out);
    }
    finish_rows<kFp8, kRowTiles>(params, item, shared, state);
    __syncthreads();
    const MlaItemOutput to(params, item, S::kRows);
    const int rows = item.num_tokens * params.heads - item.row_begin;
    if (to.is_f16) {
      store_output<kFp8, true, kRowTiles>(to, rows, shared.scale, out);
    } else {
      store_output<kFp8, false, kRowTiles>(to, rows, shared.scale, out);
    }
  }
}

template <bool kFp8, int kRowTiles>
constexpr size_t shared_bytes_of(int halves) {
  using S = Shape<kFp8, kRowTiles>;
  return sizeof(typename S::Shared) + static_cast<size_t>(halves) * S::kHalfBytes;
}

template <bool kFp8, int kRowTiles>
cudaError_t launch_one(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream) {
  static_assert(shared_bytes_of<kFp8, kRowTiles>(4) <= 99 * 1024);
  static_assert(kRowTiles == 2 || shared_bytes_of<kFp8, kRowTiles>(5) <= 113 * 1024, "two blocks a multiprocessor");
  const size_t bytes = shared_bytes_of<kFp8, kRowTiles>(config.key_halves);
  const LaunchShape shape{dim3(config.slots), dim3(kThreads), bytes, stream};
  CUtensorMap map{};
  if (kFp8 && device_limits().capability >= 90) {
    const cudaError_t error = make_page_map(params.args, Shape<kFp8, kRowTiles>::kHalf, kMlaStrips, &map);
    if (error != cudaSuccess) return error;
  }
  return launch(mla_mma_kernel<kFp8, kRowTiles>, shape, params, map, config.key_halves);
}

template <bool kFp8, int kRowTiles>
cudaError_t prepare_one() {
  // Five halves only where they fit: elsewhere the portable kernels run with four.
  const size_t most = shared_bytes_of<kFp8, kRowTiles>(kMostHalves), least = shared_bytes_of<kFp8, kRowTiles>(4);
  return allow_shared(mla_mma_kernel<kFp8, kRowTiles>,
                      most <= static_cast<size_t>(device_limits().shared_of_block) ? most : least);
}

}  // namespace

cudaError_t mla_mma_prepare() {
  for (const cudaError_t error :
       {prepare_one<false, 1>(), prepare_one<true, 1>(), prepare_one<false, 2>(), prepare_one<true, 2>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t mla_mma_launch(const MlaDecodeConfig& config, const MlaAttendParams& params, cudaStream_t stream) {
  const bool fp8 = config.format == LatentFormat::kF8E4M3;
  if (config.kernel == MlaKernel::kMma16) {
    return fp8 ? launch_one<true, 1>(config, params, stream) : launch_one<false, 1>(config, params, stream);
  }
  return fp8 ? launch_one<true, 2>(config, params, stream) : launch_one<false, 2>(config, params, stream);
}

}  // namespace perigee

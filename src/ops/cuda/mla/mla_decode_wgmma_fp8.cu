// MLA decode on Hopper over an fp8 cache: 64 query rows a block, keys and values converted on their way into the
// product.
//
// A tile of 64 keys stays e4m3 in shared memory, as the bulk copy brought it, and is the left operand of both products:
// scores^T = keys queries^T and output^T = values^T weights^T. A left operand may come from registers, so each warp
// loads its share of e4m3, widens it to f16, exactly, and multiplies; nothing wide is written back. Shared memory,
// which binds this kernel, is then read for half of the time that the products take.
//
// Three warpgroups. The first two own a half of the output each, 256 columns, and, in turn, the tiles of keys: the
// owner of a tile makes its scores and, of these, its weights, which it leaves in shared memory; then both add weights
// * values to their halves. So one warpgroup's softmax runs beside the other's products. Both run the same
// instructions, which fit the instruction cache once. Of the third warpgroup two warps sum the weights and one thread
// brings tiles.
//
// A fragment wants pairs of 16-bit numbers, neighbours in K, where a load of bytes gives others. For scores K, the
// columns of keys, is taken in the order that loads give, in queries too (store_query). For outputs a load gives two
// columns of two keys, which are two rows of the product: rows are taken in that order (Output).
//
// Weights are 2^(score - base). The base of a row is passed from tile to tile and moves only when a score exceeds it by
// more than 8 (as in mla_decode_wgmma.cu). Query rows lie along the registers here, keys across the warps; so what a
// tile usually asks of other threads is one vote, whether any base must move.
#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_page_map.h"
#include "ops/cuda/mla/mla_wgmma.cuh"
#include "ops/cuda/mla/mla_wgmma_tiles.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // other architectures compile this file to empty kernels
#endif

namespace perigee {
namespace {

using mla_wgmma::arrive_by_warp, mla_wgmma::place;
using mla_wgmma::kColumnBytes, mla_wgmma::kColumns, mla_wgmma::kGroup, mla_wgmma::kRows, mla_wgmma::kTokens;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kHeadroom = 8;    // weights are at most 2^8
constexpr float kUnseen = 1e30f;  // minus the base of a row that has seen no key: any score exceeds it
constexpr int kStages = 4;
constexpr int kRopeStages = 2;             // rope columns are of no use after the scores
constexpr int kStripBytes = kTokens * 64;  // 64 columns of a tile
constexpr int kLatentBytes = kMlaLatent / 64 * kStripBytes;
constexpr int kHalfStrips = kMlaLatent / 2 / 64;  // of the output's halves
constexpr int kThreadRows = 16;                   // query rows that a thread has scores of

enum NamedBarrier { kConsumers = 1, kScales = 2, kOneConsumer = 3 };  // kOneConsumer, + 1: of one warpgroup

// Arrays of two belong to the tiles of one warpgroup each. Tiles lie as strips of [key][64 columns], chunk c of 16
// bytes of key k at c ^ (k / 2 % 4).
struct Shared {
  alignas(1024) uint8_t queries[kColumns * kColumnBytes];  // f16
  uint8_t weights[2][kColumnBytes];                        // f16 [row][key]; before: scratch, see by_warp()
  uint8_t latents[kStages][kLatentBytes];
  uint8_t rope[kRopeStages][kStripBytes];
  float minus_base[kRows];  // after the last tile that was weighed
  float shrink[2][kRows];   // 2^(base before - base of the tile), if
  int moved[2];             // any base moved
  int last[kRows];          // the last position that a row sees; -1: no such row
  float scale[kRows];       // from outputs to sixteenths of means
  uint64_t full[kStages], empty[kStages], rope_empty[kRopeStages];
  uint64_t weights_full[2], weights_empty[2];

  // Maxima of each row over a warp's keys.
  __device__ float* by_warp(int half, int warp) { return reinterpret_cast<float*>(weights[half]) + warp * kRows; }
};

// The place of a tile in the rings, from its number.
struct Ring {
  uint32_t number = 0;

  __device__ __forceinline__ int stage() const { return number % kStages; }
  __device__ __forceinline__ int parity() const { return number / kStages % 2; }
  __device__ __forceinline__ int rope_stage() const { return number % kRopeStages; }
  __device__ __forceinline__ int rope_parity() const { return number / kRopeStages % 2; }
};

// A consumer warpgroup, and its place in the tiles of the block.
struct Consumer {
  int half;             // of the output; its tiles are those of this parity in their item
  Ring next;            // the tile whose values it adds next
  uint32_t parity = 0;  // bit w: of the weights of the next tile of warpgroup w

  __device__ __forceinline__ int weights_parity(int owner) const { return parity >> owner & 1; }
};

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}
__device__ __forceinline__ int warp() {
  return threadIdx.x % kGroup / 32;
}
// The i-th of the rows that this thread has scores of, from its first on; i and i + 1 are neighbours if i is even.
__device__ __forceinline__ constexpr int row_step(int i) {
  return i / 2 * 8 + i % 2;
}
__device__ __forceinline__ int thread_row(int i) {
  return lane() % 4 * 2 + row_step(i);
}

// Left operands of four steps of 16 along K, and the bytes that they are made of, as two loads of four matrices give
// them.
struct Operands {
  uint32_t a[4][4];

  // They are complete here, and nothing that reads them is under way.
  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
  }
};
struct Bytes {
  uint32_t of_load[2][4];
};

// Columns 4 t .. 4 t + 3 of a row are the fragment's 2 t, 2 t + 1, 2 t + 8, 2 t + 9, for t = lane % 4.
__device__ __forceinline__ void widen_keys(const Bytes& from, Operands& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t(&a)[4] = to.a[i / 2];
    e4m3x4_to_f16(from.of_load[i / 4][i % 4], a[i % 2], a[i % 2 + 2]);
  }
}

// Columns 2 g, 2 g + 1 of a warp's 16 are the fragment's rows g, g + 8, for g = lane / 4.
__device__ __forceinline__ void widen_values(const Bytes& from, Operands& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t(&a)[4] = to.a[i / 2];
    const uint32_t by_column = __byte_perm(from.of_load[i / 4][i % 4], 0, 0x3120);  // from key, column 00 01 10 11
    e4m3x4_to_f16(by_column, a[i % 2 * 2], a[i % 2 * 2 + 1]);
  }
}

// Multiplies kCount groups of four steps: while one is under way, the next is widened and the bytes after it loaded.
template <int kCount, typename Load, typename Widen, typename Multiply>
__device__ __forceinline__ void multiply_groups(Load load, Widen widen, Multiply multiply) {
  Operands operands[2];
  Bytes bytes;
  load(0, bytes);
  widen(bytes, operands[0]);
  load(1, bytes);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(n, step, operands[n % 2].a[step]);
    wgmma_commit();
    if (n > 0) {
      wgmma_wait_for<1>();
      operands[(n + 1) % 2].keep();
    }
    if (n + 1 < kCount) widen(bytes, operands[(n + 1) % 2]);
    if (n + 2 < kCount) load(n + 2, bytes);
  }
  wgmma_wait_for<0>();
}

// s = keys queries^T of a tile. This thread's keys are its warp's 16, at lane / 4 and 8 further, its rows thread_row():
// s[4 j], s[4 j + 1] the first key and rows 2 j, 2 j + 1; s[4 j + 2], s[4 j + 3] the second.
__device__ __forceinline__ void multiply_keys(Shared& shared, const Ring& ring, float (&s)[32]) {
  const uint64_t queries = matrix_k_major(shared_address(shared.queries));
  const int key = warp() * 16 + lane() % 16, chunk = lane() / 16;
  const uint32_t offset = key * 64 + ((chunk ^ (key / 2 % 4)) << 4);
  const uint32_t rope = shared_address(shared.rope[ring.rope_stage()]) + offset;
  const uint32_t latents = shared_address(shared.latents[ring.stage()]) + offset;
  const auto load = [&](int n, Bytes& bytes) {
    const uint32_t strip = n == 0 ? rope : latents + (n - 1) * kStripBytes;
    load_matrix_x4(bytes.of_load[0], strip);
    load_matrix_x4(bytes.of_load[1], strip ^ 32);
  };
  multiply_groups<kColumns>(load, widen_keys, [&](int n, int step, const uint32_t(&keys)[4]) {
    const int column = n == 0 ? kColumns - 1 : n - 1;
    wgmma_n64_registers(s, keys, matrix_behind(queries, column * kColumnBytes + step * 32), n > 0 || step > 0);
  });
  wgmma_settle(s);
}

// Strip i holds the half's i-th 64 columns; element j is of row thread_row(j / 4 * 2 + j % 2), column 16 warp + 2 (lane
// / 4) if j % 4 < 2, else the next.
using Output = float[kHalfStrips][32];

// A half of a tile's values: this thread's bytes of the operands.
struct Values {
  Bytes strips[kHalfStrips];

  __device__ __forceinline__ void load(const Shared& shared, int half, const Ring& ring) {
    const uint32_t from = shared_address(shared.latents[ring.stage()]) + half * kHalfStrips * kStripBytes +
                          lane() * 64 + ((warp() ^ (lane() / 2 % 4)) << 4);
#pragma unroll
    for (int i = 0; i < kHalfStrips; ++i) {
      load_matrix_x4_transposed(strips[i].of_load[0], from + i * kStripBytes);
      load_matrix_x4_transposed(strips[i].of_load[1], from + i * kStripBytes + 32 * 64);
    }
  }
};

// Queues out += values^T weights^T of a half of the output.
__device__ __forceinline__ void multiply_values(const Shared& shared, int owner, const Values& values, Output& out) {
  const uint64_t weights = matrix_k_major(shared_address(shared.weights[owner]));
  Operands operands[2];
  widen_values(values.strips[0], operands[0]);
#pragma unroll
  for (int i = 0; i < kHalfStrips; ++i) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_n64_registers(out[i], operands[i % 2].a[step], matrix_behind(weights, step * 32), true);
    wgmma_commit();
    if (i > 0) {
      wgmma_wait_for<1>();
      operands[(i + 1) % 2].keep();
    }
    if (i + 1 < kHalfStrips) widen_values(values.strips[i + 1], operands[(i + 1) % 2]);
  }
}

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

// Moves the bases that the tile's largest scores exceed; by one warpgroup.
__device__ __forceinline__ void move_bases(Shared& shared, int half, float (&largest)[kThreadRows], float scale) {
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    float x = largest[i];
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

// Minus the bases of this tile's weights. True if any moved; then shared.minus_base and shared.shrink are of this tile.
__device__ __forceinline__ bool settle_bases(Shared& shared, int half, const float (&s)[32], float scale,
                                             float (&minus)[kThreadRows]) {
  float largest[kThreadRows];
  read_rows(shared.minus_base, minus);
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    largest[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
    exceeds |= fmaf(largest[i], scale, minus[i]) > kHeadroom;
  }
  const bool moved = named_barrier_any(kOneConsumer + half, kGroup, exceeds);
  if (moved) {
    move_bases(shared, half, largest, scale);
    read_rows(shared.minus_base, minus);
  }
  return moved;
}

// Weights of the scores into shared memory.
__device__ __forceinline__ void store_weights(Shared& shared, int half, const float (&s)[32], float scale,
                                              const float (&minus)[kThreadRows]) {
  const int row = lane() / 16 * 8 + lane() % 8, chunk = 2 * warp() + lane() / 8 % 2;
  const uint32_t to = shared_address(shared.weights[half] + place(row, chunk));
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 2 * j + i / 2 * 2;
      const float x = exp2_fast(fmaf(s[4 * j + 2 * i], scale, minus[r]));
      const float y = exp2_fast(fmaf(s[4 * j + 2 * i + 1], scale, minus[r + 1]));
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

// The values of the next tile, which is `owner`'s, once it is weighed.
__device__ __forceinline__ void load_values(Shared& shared, const Consumer& me, int owner, Values& values) {
  barrier_wait(&shared.weights_full[owner], me.weights_parity(owner));
  values.load(shared, me.half, me.next);
}

// Scores and weights of an own tile, the i-th of the item; loads the values of the other's tile in front of it.
__device__ __forceinline__ void weigh(const MlaAttendParams& params, const MlaItem& item, Shared& shared,
                                      const Consumer& me, int i, Values& values) {
  const int half = me.half, other = half ^ 1;
  const float scale = params.args.softmax_scale * kLog2e * params.args.kv_scale;
  const int position = block_position(params.batch, item.sequence, item_block(item, i));
  const Ring ring{me.next.number + (i > 0 ? 1 : 0)};
  float s[32], minus[kThreadRows];
  barrier_wait(&shared.full[ring.stage()], ring.parity());
  multiply_keys(shared, ring, s);
  arrive_by_warp(&shared.rope_empty[ring.rope_stage()]);
  if (i > 0) barrier_wait(&shared.weights_full[other], me.weights_parity(other));  // bases are of the tile in front
  barrier_wait(&shared.weights_empty[half], me.weights_parity(half) ^ 1);
  if (position + kTokens > item.length - item.num_tokens) mask(shared, position, s);
  const bool moved = settle_bases(shared, half, s, scale, minus);
  if (threadIdx.x % kGroup == 0) shared.moved[half] = moved;
  store_weights(shared, half, s, scale, minus);
  if (item.length - position < kTokens) clear_tokens(shared.latents[ring.stage()], max(0, item.length - position));
  if (i > 0) {
    values.load(shared, half, me.next);  // takes as long as the fence
  } else {
    values = {};  // the compiler sees that nothing was kept through the scores
  }
  fence_async_proxy();
  arrive_by_warp(&shared.weights_full[half]);
}

// Adds weights * values of the item's tiles from `begin` on; the first one's values are loaded.
__device__ __forceinline__ void add_tiles(Shared& shared, Consumer& me, int begin, int end, Values& values,
                                          Output& out) {
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int owner = tile % 2, stage = me.next.stage();
    if (shared.moved[owner]) shrink_output(shared.shrink[owner], out);
    multiply_values(shared, owner, values, out);
    me.parity ^= 1 << owner;
    ++me.next.number;
    if (tile + 1 < end) load_values(shared, me, owner ^ 1, values);  // after the products under way
    wgmma_wait_for<0>();
#pragma unroll
    for (int i = 0; i < kHalfStrips; ++i) wgmma_settle(out[i]);
    arrive_by_warp(&shared.empty[stage]);
    if (owner != me.half) arrive_by_warp(&shared.weights_empty[owner]);
  }
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
    for (int tile = half; tile <= count; tile += 2) {  // own tiles, each after the other's tile in front of it
      Values values;
      if (tile < count) {
        weigh(params, item, shared, me, tile, values);
      } else {
        load_values(shared, me, half ^ 1, values);  // the last tile is the other's
      }
      if (tile == 0) load_values(shared, me, 0, values);
      add_tiles(shared, me, max(0, tile - 1), min(tile + 1, count), values, out);
    }
    named_barrier(kScales, 2 * kGroup + kRows);
    store_item(params, item, shared, half, out);
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

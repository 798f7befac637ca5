// Blocks stay and walk over tiles: 16 rows of W for each warps_k of their warps, whose parts of `in` differ. Each lane
// copies what it will multiply into slots of its own in shared memory, a ring of chunks across tiles, so that loads
// never stop at a tile's end and nobody waits for another lane's.
#include "ops/cuda/dequant.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/skinny.h"

namespace perigee {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

__device__ __forceinline__ void copy_async4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Where rows g and g + 8 of a lane's tile lie: the first, and how far from it the second.
struct Rows {
  const uint8_t *data = nullptr, *scale = nullptr;
  uint32_t data_step = 0, scale_step = 0;
};

// What a lane keeps of 128 columns of its two rows: pieces of 16 bytes and, in 4-byte words, a scale of each row. The
// columns of x that go with its 8 columns j begin at column(j).
template <WeightFormat kFormat>
struct Slot {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4Group32, kFp8 = kFormat == WeightFormat::kF8Block128;
  static constexpr int kRowPieces = kInt4 ? 1 : kFp8 ? 2 : 4;
  static constexpr int kBytes = kThreads * (32 * kRowPieces + (kInt4 || kFp8 ? 8 : 0));
  static constexpr int kCount = kInt4 ? 4 : kFp8 ? 3 : 2;

  uint8_t* base;  // of the block's slots
  __device__ uint8_t* piece(int i) const { return base + (i * kThreads + threadIdx.x) * 16; }
  __device__ uint8_t* scale(int r) const {
    return base + kThreads * 32 * kRowPieces + (r * kThreads + threadIdx.x) * 4;
  }

  __device__ void fill(const Rows& rows, int chunk) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* from = rows.data + r * rows.data_step + static_cast<int64_t>(chunk) * 64 * kRowPieces + t * 16;
      const uint8_t* scale_from = rows.scale + r * rows.scale_step;
#pragma unroll
      for (int i = 0; i < kRowPieces; ++i) copy_async16(shared_address(piece(r * kRowPieces + i)), from + i * 64);
      if constexpr (kInt4) copy_async4(shared_address(scale(r)), scale_from + chunk * 8 + t / 2 * 4);
      if constexpr (kFp8) copy_async4(shared_address(scale(r)), scale_from + chunk * 4);
    }
  }
  __device__ static int column(int j) {
    const int t = threadIdx.x % 4;
    return kInt4 ? t * 32 + j * 8 : kFp8 ? j / 2 * 64 + t * 16 + j % 2 * 8 : j * 32 + t * 8;
  }
  // Pairs of bf16: the 8 columns j of row r.
  __device__ uint4 pairs(int r, int j) const {
    if constexpr (kInt4) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(piece(r) + j * 4);
      const __nv_bfloat162 s = __bfloat162bfloat162(reinterpret_cast<const __nv_bfloat16*>(scale(r))[threadIdx.x % 2]);
      return {int4_pair(word, 0, s), int4_pair(word, 1, s), int4_pair(word, 2, s), int4_pair(word, 3, s)};
    } else if constexpr (kFp8) {
      const uint2 words = *reinterpret_cast<const uint2*>(piece(r * 2 + j / 2) + j % 2 * 8);
      return {fp8_pair(words.x, 0), fp8_pair(words.x, 2), fp8_pair(words.y, 0), fp8_pair(words.y, 2)};
    } else {
      return *reinterpret_cast<const uint4*>(piece(r * 4 + j));
    }
  }
  // Of the sums of 128 columns.
  __device__ float sum_scale(int r) const {
    if constexpr (kFp8) return *reinterpret_cast<const float*>(scale(r));
    return 1.0f;
  }
};

template <WeightFormat kFormat, int kTiles>
__device__ void multiply_chunk(const Slot<kFormat>& slot, const uint4 (&x)[kTiles][4], float (&sum)[kTiles][4]) {
  float part[kTiles][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4 a = slot.pairs(0, j), b = slot.pairs(1, j);
    const uint32_t low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_16x8x16(Bf16(), part[n], low, x[n][j].x, x[n][j].y);
      mma_16x8x16(Bf16(), part[n], high, x[n][j].z, x[n][j].w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += part[n][i] * slot.sum_scale(i / 2);
}

// Tokens of one item: rows of y, and x by x_divisor.
struct Tokens {
  int matrix = 0, begin = 0, count = 0;
};

// The tiles of one call, numbered item by item: an item's matrix, cut into groups of 16 * kWarps / warps_k rows.
struct Work {
  const GemmCall& c;
  int item_rows, row_items, groups;
  int warps_k, tile_bits;  // 2^tile_bits tiles of a group, warps_k warps for each
  uint32_t row_bytes, scale_row;
  bool fp8;

  __device__ int64_t tiles() const {
    const int items = c.items != nullptr ? *c.num_items : c.expert_ids != nullptr ? c.max_items : row_items * c.heads;
    return static_cast<int64_t>(items) * groups;
  }
  __device__ Tokens tokens(int item) const {
    if (c.items != nullptr) {
      const MoeItem found = c.items[item];
      return {found.expert, found.begin, found.count};
    }
    if (c.expert_ids != nullptr) return {c.expert_ids[item], item, 1};
    const int begin = item % row_items * item_rows;
    return {item / row_items, begin, min(item_rows, c.rows - begin)};
  }
  __device__ int64_t y_row(const Tokens& tokens, int m) const {
    return c.items != nullptr ? c.pairs[tokens.begin + m] : tokens.begin + m;
  }
  __device__ int head(const Tokens& tokens) const { return c.heads > 1 ? tokens.matrix : 0; }
  __device__ int part() const { return static_cast<int>(threadIdx.x) / 32 & (warps_k - 1); }
  // First row of W of this warp's tile.
  __device__ int first_row(int group) const {
    const int tile = static_cast<int>(threadIdx.x) / 32 * (1 << tile_bits) / kWarps;
    return ((group << tile_bits) + tile) * 16;
  }
  __device__ Rows matrix(int index) const {
    return {c.weight + index * c.weight_stride, static_cast<const uint8_t*>(c.scale) + index * c.scale_stride};
  }
  __device__ Rows rows(const Rows& matrix, int group) const {
    const int row = first_row(group) + static_cast<int>(threadIdx.x) % 32 / 4, last = c.out - 1;
    const auto first = static_cast<uint32_t>(min(row, last)), second = static_cast<uint32_t>(min(row + 8, last));
    const uint32_t first_scale = fp8 ? first / 8 : first, second_scale = fp8 ? second / 8 : second;
    return {matrix.data + static_cast<uint64_t>(first) * row_bytes,
            matrix.scale + static_cast<uint64_t>(first_scale) * scale_row, (second - first) * row_bytes,
            (second_scale - first_scale) * scale_row};
  }
};

// A place in a block's run of tiles: group `group` of item `item`, `left` tiles with this one, chunk `chunk` of them.
struct Cursor {
  int item, group, left, chunk;

  // True when this enters another tile; `chunk` is then the warp's first.
  __device__ bool next(const Work& work) {
    chunk += work.warps_k;
    if (chunk < work.c.chunks) return false;
    chunk = work.part();
    next_tile(work);
    return true;
  }
  __device__ void next_tile(const Work& work) {
    --left;
    if (++group == work.groups) group = 0, ++item;
  }
};

// What to copy next: this warp's chunks of one tile after another.
template <WeightFormat kFormat>
struct Loader {
  const Work& work;
  Cursor at;
  int item = -1;
  Rows matrix{}, rows{};

  __device__ Loader(const Work& w, const Cursor& first) : work(w), at(first) { open(); }
  __device__ void open() {
    if (at.left <= 0) return;
    if (at.item != item) {
      item = at.item;
      matrix = work.matrix(work.tokens(item).matrix);
    }
    rows = work.rows(matrix, at.group);
  }
  // One group of copies, empty behind the last tile.
  __device__ void load(const Slot<kFormat>& slot) {
    if (at.left > 0) {
      slot.fill(rows, at.chunk);
      if (at.next(work)) open();
    }
    copy_async_commit();
  }
};

// Columns of x that go with a chunk, in registers: asked for as soon as those before have been used, or, where there
// are too many to be kept meanwhile, just before their own use.
template <WeightFormat kFormat, int kTiles>
struct XColumns {
  static constexpr bool kKept = kTiles < 4;
  int item = -1, chunk = -1;  // of what the registers hold
  const uint16_t* x[kTiles];
  uint4 columns[kTiles][4] = {};

  __device__ void load(const Work& work, const Cursor& at) {
    if (kKept && at.item == item && at.chunk == chunk) return;
    const GemmCall& c = work.c;
    if (at.item != item) {
      const Tokens tokens = work.tokens(at.item);
      for (int n = 0; n < kTiles; ++n) {
        const int m = n * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
        x[n] = m < tokens.count ? c.x + work.y_row(tokens, m) / c.x_divisor * c.x_stride + work.head(tokens) * c.x_head
                                : nullptr;
      }
    }
    item = at.item, chunk = at.chunk;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Behind the last column the weights are zeros; of tokens that are not there nothing is stored.
        const int column = min(chunk * 128 + Slot<kFormat>::column(j), c.in - 8);
        if (x[n] != nullptr) columns[n][j] = *reinterpret_cast<const uint4*>(x[n] + column);
      }
  }
};

__device__ __forceinline__ void store(const GemmCall& c, int64_t at, float value) {
  if (c.output == GemmOutput::kF32)
    static_cast<float*>(c.y)[at] = value;
  else
    static_cast<__nv_bfloat16*>(c.y)[at] = __float2bfloat16_rn(value);
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Stores a warp's own sums: those of warps that share no tile.
template <int kTiles>
__device__ void store_warp(const Work& work, const Tokens& tokens, int group, const float (&sum)[kTiles][4]) {
  const GemmCall& c = work.c;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = work.first_row(group);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = n * 8 + 2 * t + i;
      if (m >= tokens.count) continue;
      const int64_t at = work.y_row(tokens, m) * c.y_stride + work.head(tokens) * c.y_head;
      if (c.output == GemmOutput::kSiluMul) {
        if (first + g < c.out) store(c, at + first / 2 + g, silu_mul(sum[n][i], sum[n][i + 2]));
      } else {
        if (first + g < c.out) store(c, at + first + g, sum[n][i]);
        if (first + g + 8 < c.out) store(c, at + first + g + 8, sum[n][i + 2]);
      }
    }
}

// Adds the warps' parts in their order and stores. partial[warp][row of 16][token].
template <int kTiles>
__device__ void store_block(const Work& work, const Tokens& tokens, int group, const float (*partial)[128 * kTiles]) {
  constexpr int kTokens = 8 * kTiles;
  const GemmCall& c = work.c;
  const bool silu = c.output == GemmOutput::kSiluMul;
  const int row_bits = silu ? 3 : 4, tile_bits = work.tile_bits, tiles = 1 << tile_bits;
  const auto sum = [&](int tile, int row, int m) {
    float total = 0;
    for (int w = 0; w < work.warps_k; ++w) total += partial[tile * work.warps_k + w][row * kTokens + m];
    return total;
  };
  for (int i = threadIdx.x; i < tokens.count << (row_bits + tile_bits); i += kThreads) {
    const int row = i & ((1 << row_bits) - 1), tile = i >> row_bits & (tiles - 1), m = i >> (row_bits + tile_bits);
    const int column = ((group << tile_bits) + tile << row_bits) + row;
    if (column >= (silu ? c.out / 2 : c.out)) continue;
    const float value = silu ? silu_mul(sum(tile, row, m), sum(tile, row + 8, m)) : sum(tile, row, m);
    store(c, work.y_row(tokens, m) * c.y_stride + work.head(tokens) * c.y_head + column, value);
  }
}

template <int kTiles>
using Partials = float[2][kWarps][128 * kTiles];  // of two tiles in turn

template <int kTiles>
__device__ void store_tile(const Work& work, const Tokens& tokens, int group, const float (&sum)[kTiles][4],
                           float (*partials)[128 * kTiles]) {
  if (work.warps_k == 1) return store_warp<kTiles>(work, tokens, group, sum);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* partial = partials[threadIdx.x / 32];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(g + i / 2 * 8) * 8 * kTiles + n * 8 + 2 * t + i % 2] = sum[n][i];
  __syncthreads();
  store_block<kTiles>(work, tokens, group, partials);
}

template <WeightFormat kFormat, int kTiles>
__device__ void multiply_tiles(const Work& work, Cursor at, Loader<kFormat>& loader, uint8_t* ring,
                               Partials<kTiles>& partials) {
  if (at.left <= 0) return;
  XColumns<kFormat, kTiles> x;
  if (x.kKept) x.load(work, at);
  Tokens tokens;
  float sum[kTiles][4] = {};
  for (int item = -1, slot = 0, turn = 0; at.left > 0;) {
    if (at.item != item) {
      item = at.item;
      tokens = work.tokens(item);
    }
    if (!x.kKept) x.load(work, at);
    const Slot<kFormat> weights{ring + slot * Slot<kFormat>::kBytes};
    copy_async_wait<Slot<kFormat>::kCount - 1>();
    multiply_chunk<kFormat, kTiles>(weights, x.columns, sum);
    Cursor ahead = at;
    const bool ends = ahead.next(work);
    if (x.kKept && ahead.left > 0) x.load(work, ahead);
    loader.load(weights);
    slot = slot + 1 == Slot<kFormat>::kCount ? 0 : slot + 1;
    if (ends) {
      store_tile<kTiles>(work, tokens, at.group, sum, partials[turn]);
      turn ^= 1;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = 0;
    }
    at = ahead;
  }
}

template <int kTiles>
constexpr int kBlocks = kTiles == 1 ? 3 : 2;  // of a multiprocessor

template <WeightFormat kFormat, int kTiles>
__global__ __launch_bounds__(kThreads, kBlocks<kTiles>) void skinny_kernel(const __grid_constant__ GemmCall c,
                                                                           uint32_t row_bytes, uint32_t scale_row,
                                                                           int warps_k) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& partials = *reinterpret_cast<Partials<kTiles>*>(shared + Slot<kFormat>::kCount * Slot<kFormat>::kBytes);
  const int tile_bits = __ffs(kWarps) - __ffs(warps_k), rows_block = 16 << tile_bits;
  const Work work{.c = c,
                  .item_rows = 8 * kTiles,
                  .row_items = (c.rows + 8 * kTiles - 1) / (8 * kTiles),
                  .groups = (c.out + rows_block - 1) / rows_block,
                  .warps_k = warps_k,
                  .tile_bits = tile_bits,
                  .row_bytes = row_bytes,
                  .scale_row = scale_row,
                  .fp8 = kFormat == WeightFormat::kF8Block128};
  // Weights never change: their loads need not wait for other kernels, where it is known which they are.
  const bool early = c.lists_settled || (c.items == nullptr && c.expert_ids == nullptr);
  if (!early) dependency_wait();
  const int64_t tiles = work.tiles();
  const int begin = static_cast<int>(tiles * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
  const Cursor at{begin / work.groups, begin % work.groups, end - begin, work.part()};
  Loader<kFormat> loader(work, at);
  for (int i = 0; i < Slot<kFormat>::kCount; ++i) loader.load({shared + i * Slot<kFormat>::kBytes});
  if (early) dependency_wait();
  dependency_trigger();
  multiply_tiles<kFormat, kTiles>(work, at, loader, shared, partials);
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, found = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
    return found;
  }();
  return count;
}

// Warps that share a tile, at least two chunks each: with few columns none do, and nobody waits for another.
int choose_warps_k(int chunks) {
  return chunks >= 2 * kWarps ? kWarps : chunks >= kWarps ? kWarps / 2 : chunks > 4 ? 2 : 1;
}

template <WeightFormat kFormat, int kTiles>
cudaError_t launch_skinny(const GemmCall& c, cudaStream_t stream) {
  constexpr size_t kShared = Slot<kFormat>::kCount * Slot<kFormat>::kBytes + sizeof(Partials<kTiles>);
  static_assert(kShared <= 98 * 1024);
  static const cudaError_t allowed = allow_shared(skinny_kernel<kFormat, kTiles>, kShared);
  if (allowed != cudaSuccess) return allowed;
  const int warps_k = choose_warps_k(c.chunks);
  const bool grouped = c.items != nullptr || c.expert_ids != nullptr;
  const int rows_block = 16 * kWarps / warps_k, item_rows = 8 * kTiles;
  const int items = grouped ? c.max_items : (c.rows + item_rows - 1) / item_rows * c.heads;
  const int64_t tiles = static_cast<int64_t>(items) * ((c.out + rows_block - 1) / rows_block);
  // As many tiles for each block, rather than some with one more than others.
  const int64_t most = static_cast<int64_t>(kBlocks<kTiles>) * multiprocessors(), turns = (tiles + most - 1) / most;
  const auto row_bytes = static_cast<uint32_t>(c.chunks * 64 * Slot<kFormat>::kRowPieces);
  const auto scale_row = static_cast<uint32_t>(c.chunks * (kFormat == WeightFormat::kF8Block128 ? 4 : 8));
  return launch(skinny_kernel<kFormat, kTiles>,
                {.grid = dim3(static_cast<unsigned>((tiles + turns - 1) / turns)),
                 .block = dim3(kThreads),
                 .shared_bytes = kShared,
                 .stream = stream},
                c, row_bytes, scale_row, warps_k);
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

// Blocks stay and walk over tiles of some rows of W, each for warps_k of their warps, whose parts of `in` differ. What
// a warp multiplies it copies itself, into slots of its own in shared memory, a ring of chunks across tiles, so that
// loads never stop at a tile's end and no warp waits for another's.
#include <algorithm>
#include <bit>
#include <optional>

#include "ops/cuda/launch.h"
#include "ops/cuda/gemm/skinny.h"
#include "ops/cuda/gemm/skinny_one_tile.cuh"
#include "ops/cuda/gemm/skinny_slot.cuh"
#include "ops/cuda/gemm/skinny_work.cuh"

namespace perigee {
namespace {

using namespace skinny;

// A place in a block's run of tiles: group `group` of item `item`, `left` tiles with this one, chunk `chunk` of them.
struct Cursor {
  int item, group, left, chunk;

  // True when this enters another tile; `chunk` is then the warp's first.
  __device__ bool next(const Work& work) {
    chunk += work.warps_k;
    if (chunk < work.c.chunks) return false;
    chunk = work.part();
    --left;
    if (++group == work.groups) group = 0, ++item;
    return true;
  }
};

// What to copy next: this warp's chunks of one tile after another.
template <typename Slot>
struct Loader {
  const Work& work;
  Cursor at;
  int item = -1;
  const uint8_t *matrix = nullptr, *scales = nullptr;
  typename Slot::Rows rows{};

  __device__ Loader(const Work& w, const Cursor& first) : work(w), at(first) { open(); }
  __device__ void open() {
    if (at.left <= 0) return;
    const GemmCall& c = work.c;
    if (at.item != item) {
      item = at.item;
      const int index = work.tokens(item).matrix;
      matrix = c.weight + index * c.weight_stride;
      scales = static_cast<const uint8_t*>(c.scale) + index * c.scale_stride;
    }
    rows.place(matrix, scales, {work.first_row(at.group), c.out - 1, work.row_bytes, work.scale_row});
    rows.skip(at.chunk);
  }
  // One group of copies, empty past the last tile.
  __device__ void load(const Slot& slot) {
    if (at.left > 0) {
      slot.fill(rows);
      if (at.next(work))
        open();
      else
        rows.skip(work.warps_k);
    }
    copy_async_commit();
  }
};

// Columns of x that go with a chunk, in registers: asked for as soon as those before have been used, or, where there
// are too many to be kept meanwhile, just before their own use.
template <typename Slot, int kTiles, bool kStaged>
struct XColumns {
  static constexpr bool kKept = kTiles < 4;
  int chunk = -1;  // of what the registers hold
  const uint16_t* x[kTiles];
  uint4 columns[kKept ? kTiles : 1][4];

  __device__ const uint16_t* row(const Work& work, const Tokens& tokens, int m) const {
    const uint32_t found = static_cast<uint32_t>(work.y_row(tokens, m)) / static_cast<uint32_t>(work.c.x_divisor);
    return work.c.x + found * work.c.x_stride + work.head(tokens) * work.c.x_head;
  }
  // Switches to another item; all threads of the block. Padding rows load the last real token and store nothing.
  __device__ void open(const Work& work, const Tokens& tokens, uint8_t* staged) {
    chunk = -1;
    const int lane = threadIdx.x % 32;
    if constexpr (kStaged) {
      const int pitch = work.c.chunks * 128 + 32;  // not a multiple of 64, so that neighbours meet no bank twice
      if (tokens.count * pitch * 2 <= kStagedBytes) {
        stage(work, tokens, pitch, staged);
        x[0] = reinterpret_cast<const uint16_t*>(staged) + min(lane / 4, tokens.count - 1) * pitch;
        return;
      }
    }
    for (int n = 0; n < kTiles; ++n) x[n] = row(work, tokens, min(n * 8 + lane / 4, tokens.count - 1));
  }
  // Copies the rows of x to shared memory, zeros past their last column.
  __device__ void stage(const Work& work, const Tokens& tokens, int pitch, uint8_t* staged) {
    constexpr int kEach = (kStagedBytes / 16 + kThreads - 1) / kThreads;
    const int pieces = work.c.chunks * 16;
    const float rows_of_one = 1.0f / static_cast<float>(pieces);  // a quotient of numbers below 2000 is exact by it
    const auto place = [&](int i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      const int m = static_cast<int>((static_cast<float>(at) + 0.5f) * rows_of_one);
      return make_int2(m, (at - m * pieces) * 8);
    };
    uint4 values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto [m, column] = place(i);
      values[i] = {0, 0, 0, 0};
      if (m < tokens.count && column < work.c.in)
        values[i] = *reinterpret_cast<const uint4*>(row(work, tokens, m) + column);
    }
    __syncthreads();  // nobody reads the rows before any more
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto [m, column] = place(i);
      if (m < tokens.count) *reinterpret_cast<uint4*>(staged + (m * pitch + column) * 2) = values[i];
    }
    __syncthreads();
  }
  // Switches to another chunk.
  __device__ void load(const Work& work, const Cursor& at) {
    if (kKept && at.chunk == chunk) return;
    chunk = at.chunk;
    if constexpr (kKept) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[n][j] = fetch(work.c, n, j);
    }
  }
  __device__ uint4 fetch(const GemmCall& c, int n, int j) const {
    // Behind the last column the weights are zeros: any columns do.
    const int column = chunk * 128 + Slot::column(0) + Slot::column_step(j);
    return *reinterpret_cast<const uint4*>(x[n] + min(column, c.in - 8));
  }
  __device__ uint4 get(const GemmCall& c, int n, int j) const {
    if constexpr (kKept) return columns[n][j];
    return fetch(c, n, j);
  }
};

template <WeightFormat kFormat, int kTokens>
struct Config {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4Group32;
  static constexpr int kTiles = kTokens, kSlots = kFormat == WeightFormat::kBF16 ? 2 : 3;
  using Weights = Slot<kFormat, kInt4 && kTiles == 1 ? 2 : 1, kSlots>;
  static constexpr bool kStaged = kInt4 && kTiles == 1;
  static constexpr int kBlocks = kTiles == 1 && !kStaged ? 3 : 2;  // of a multiprocessor
  static constexpr int kPart = 128 * Weights::kRowTiles * kTiles;
  struct Memory {
    alignas(128) uint8_t ring[kWarps][kSlots * Weights::kBytes];
    alignas(128) uint8_t staged[kStaged ? kStagedBytes : 128];  // rows of x
    float parts[2][kWarps][kPart];                              // of two tiles in turn
  };
};

template <typename C>
__device__ void multiply_tiles(const Work& work, Cursor at, Loader<typename C::Weights>& loader,
                               typename C::Weights slot, typename C::Memory& memory) {
  using Weights = typename C::Weights;
  constexpr int kTiles = C::kTiles, kRowTiles = Weights::kRowTiles;
  XColumns<Weights, kTiles, C::kStaged> x;
  Tokens tokens;
  float sum[kRowTiles][kTiles][4] = {};
  for (int item = -1, buffer = 0; at.left > 0;) {
    if (at.item != item) {
      item = at.item;
      tokens = work.tokens(item);
      x.open(work, tokens, memory.staged);
    }
    x.load(work, at);
    copy_async_wait<Weights::kCount - 1>();
    if (Weights::kShared) __syncwarp();
    slot.template multiply<kTiles>([&](int n, int j) { return x.get(work.c, n, j); }, sum);
    if (Weights::kShared) __syncwarp();
    Cursor ahead = at;
    const bool ends = ahead.next(work);
    if (x.kKept && ahead.left > 0 && ahead.item == item) x.load(work, ahead);
    loader.load(slot);
    slot.next();
    if (ends) {
      store_tile<kRowTiles, kTiles>(work, tokens, at.group, sum, {memory.parts[buffer][0], C::kPart});
      buffer ^= 1;
#pragma unroll
      for (int i = 0; i < kRowTiles * kTiles * 4; ++i) sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0;
    }
    at = ahead;
  }
}

template <typename C>
__global__ __launch_bounds__(kThreads, C::kBlocks) void skinny_kernel(const __grid_constant__ GemmCall c, Shape shape) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& memory = *reinterpret_cast<typename C::Memory*>(shared);
  const Work work{shape, c};
  // Weights never change: their loads need not wait for other kernels, where it is known which they are.
  const bool early = c.lists_settled || (c.items == nullptr && c.expert_ids == nullptr);
  if (!early) dependency_wait();
  const int tiles = work.tiles(), block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int each = tiles / blocks, rest = tiles - each * blocks;  // some have one more
  const int begin = each * block + min(block, rest);
  const Cursor at{begin / work.groups, begin % work.groups, each + (block < rest ? 1 : 0), work.part()};
  using Weights = typename C::Weights;
  Loader<Weights> loader(work, at);
  const Weights slot{memory.ring[threadIdx.x / 32], 0};
  for (int i = 0; i < Weights::kCount; ++i) loader.load({slot.ring, i * Weights::kBytes});
  dependency_wait();  // unless it has waited before: then this takes no time
  dependency_trigger();
  multiply_tiles<C>(work, at, loader, slot, memory);
}

// Warps that share a tile, at least two chunks each and about as many: with few columns none do, and nobody waits for
// another.
int choose_warps_k(const GemmCall& c) {
  const bool grouped = c.items != nullptr || c.expert_ids != nullptr || c.heads > 1;
  const bool short_of_tiles = !grouped && c.out < 32 * device_limits().multiprocessors;
  const bool even = c.chunks % kWarps == 0 || c.chunks >= 4 * kWarps || short_of_tiles;
  return c.chunks >= 2 * kWarps && even ? kWarps : c.chunks >= kWarps ? kWarps / 2 : c.chunks > 4 ? 2 : 1;
}

template <typename Weights>
Shape make_shape(const GemmCall& c, int item_rows) {
  Shape shape{.item_rows = item_rows,
              .row_items = (c.rows + item_rows - 1) / item_rows,
              .rows_tile = 16 * Weights::kRowTiles,
              .warps_k = choose_warps_k(c),
              .row_bytes = static_cast<uint32_t>(c.chunks * Weights::kChunkBytes),
              .scale_row = static_cast<uint32_t>(c.chunks * Weights::kChunkScales)};
  shape.tile_bits = std::countr_zero(static_cast<unsigned>(kWarps / shape.warps_k));
  const int rows_block = shape.rows_tile << shape.tile_bits;
  shape.groups = (c.out + rows_block - 1) / rows_block;
  return shape;
}

int count_items(const GemmCall& c, const Shape& shape) {
  const bool grouped = c.items != nullptr || c.expert_ids != nullptr;
  return grouped ? c.max_items : shape.row_items * c.heads;
}

int64_t count_tiles(const GemmCall& c, const Shape& shape) {
  return static_cast<int64_t>(count_items(c, shape)) * shape.groups;
}

template <typename C>
cudaError_t launch_skinny(const GemmCall& c, cudaStream_t stream) {
  const cudaError_t allowed = allow_shared_once<skinny_kernel<C>>(sizeof(typename C::Memory));
  if (allowed != cudaSuccess) return allowed;
  const Shape shape = make_shape<typename C::Weights>(c, 8 * C::kTiles);
  // As many tiles for each block, rather than some with one more than others.
  const int64_t tiles = count_tiles(c, shape), most = int64_t{C::kBlocks} * device_limits().multiprocessors;
  const int64_t rounds = (tiles + most - 1) / most;
  return launch(skinny_kernel<C>,
                {.grid = dim3(static_cast<unsigned>((tiles + rounds - 1) / rounds)),
                 .block = dim3(kThreads),
                 .shared_bytes = sizeof(typename C::Memory),
                 .stream = stream},
                c, shape);
}

constexpr int kSystemBytes = 1024;  // of shared memory, what the system takes for each block

// A call whose tiles the GPU holds at once, each in a block of its own, and what shared memory they take; none where
// it has more tiles or the GPU less memory.
template <typename C>
std::optional<OneTileShape> plan_one_tile(const GemmCall& c) {
  using Weights = typename C::Weights;
  OneTileShape shape{make_shape<Weights>(c, 8)};
  const DeviceLimits& limits = device_limits();
  const auto each = static_cast<int>((count_tiles(c, shape) + limits.multiprocessors - 1) / limits.multiprocessors);
  if (each > C::kBlocks) return {};
  const int chunks = (c.chunks + shape.warps_k - 1) / shape.warps_k;
  const int tokens = c.items != nullptr ? 8 : c.expert_ids != nullptr ? 1 : std::min(8, c.rows);
  shape.x_bytes = std::min(kStagedBytes / kWarps, tokens * (chunks * 256 + 64));
  shape.ring_bytes = std::min(C::kSlots, chunks) * Weights::kBytes;
  // No more blocks of a multiprocessor than that: those of the next kernel would take the memory's time from this one.
  const int least = limits.shared_of_multiprocessor / (C::kBlocks + 1);
  shape.shared_bytes = std::max(kWarps * (shape.ring_bytes + shape.x_bytes), least);
  if (shape.shared_bytes > std::min(limits.shared_of_block, limits.shared_of_multiprocessor / each - kSystemBytes))
    return {};
  return shape;
}

template <typename C>
cudaError_t launch_one_tile(const GemmCall& c, const OneTileShape& shape, cudaStream_t stream) {
  const int items = count_items(c, shape);
  const cudaError_t allowed = allow_shared_once<one_tile_kernel<C>>(device_limits().shared_of_block);
  if (allowed != cudaSuccess) return allowed;
  return launch(one_tile_kernel<C>,
                {.grid = dim3(static_cast<unsigned>(shape.groups), static_cast<unsigned>(items / c.heads),
                              static_cast<unsigned>(c.heads)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(shape.shared_bytes),
                 .stream = stream},
                c, shape);
}

template <WeightFormat kFormat, int kTiles>
cudaError_t launch_rows(const GemmCall& c, cudaStream_t stream) {
  using Many = Config<kFormat, kTiles>;
  static_assert(sizeof(typename Many::Memory) <= 99 * 1024);
  if constexpr (kTiles == 1) {
    using OneTile = OneTileConfig<kFormat>;
    if (const auto shape = plan_one_tile<OneTile>(c)) return launch_one_tile<OneTile>(c, *shape, stream);
  }
  return launch_skinny<Many>(c, stream);
}

template <WeightFormat kFormat>
cudaError_t launch_tiles(const GemmCall& c, int item_rows, cudaStream_t stream) {
  if (item_rows <= 8) return launch_rows<kFormat, 1>(c, stream);
  if (item_rows <= 16) return launch_rows<kFormat, 2>(c, stream);
  return launch_rows<kFormat, 4>(c, stream);
}

}  // namespace

cudaError_t skinny_gemm(WeightFormat format, const GemmCall& call, int item_rows, cudaStream_t stream) {
  switch (format) {
    case WeightFormat::kInt4Group32: return launch_tiles<WeightFormat::kInt4Group32>(call, item_rows, stream);
    case WeightFormat::kF8Block128: return launch_tiles<WeightFormat::kF8Block128>(call, item_rows, stream);
    default: return launch_tiles<WeightFormat::kBF16>(call, item_rows, stream);
  }
}

int skinny_parts(const GemmCall& call) {
  return choose_warps_k(call);
}

}  // namespace perigee

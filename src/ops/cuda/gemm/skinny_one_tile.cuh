// A product of few rows where the GPU holds all tiles at once: a block has one tile for the warps that share it and no
// run of tiles, so that hardly an instruction stands before its loads.
#pragma once

#include "ops/cuda/gemm/skinny_slot.cuh"
#include "ops/cuda/gemm/skinny_work.cuh"

namespace perigee::skinny {

// How a call lies in shared memory: for each warp a ring of chunks, then its columns of x.
struct OneTileShape : Shape {
  int ring_bytes = 0, x_bytes = 0, shared_bytes = 0;
};

template <WeightFormat kFormat>
struct OneTileConfig {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4Group32;
  // INT4 is bound by instructions, and asks for all that a warp has; others take turns with the next kernel's.
  static constexpr int kSlots = kInt4 ? 7 : kFormat == WeightFormat::kBF16 ? 3 : 4;
  static constexpr int kBlocks = 2;  // of a multiprocessor
  using Weights = Slot<kFormat, kInt4 ? 2 : 1, kSlots>;
};

// The tokens of this block, none past the last item.
__device__ inline Tokens one_tile_tokens(const Work& work) {
  const int item = static_cast<int>(blockIdx.y);
  if (work.c.items != nullptr && item >= __ldcg(work.c.num_items)) return {};
  if (work.c.items != nullptr || work.c.expert_ids != nullptr) return work.tokens(item);
  const int begin = item * work.item_rows;
  return {static_cast<int>(blockIdx.z), begin, min(work.item_rows, work.c.rows - begin)};
}

// The columns of x that a warp's chunks meet, of up to 8 tokens: in its own shared memory, where they fit. Where they
// lie is found out when this is made, from settled lists; what they are, by open() and load().
template <typename Slot>
struct OneTileColumns {
  static constexpr int kEach = kStagedBytes / kWarps / 16 / 32 + 1;  // pieces of 8 columns that a lane copies
  const GemmCall& c;
  uint8_t* memory;
  const uint16_t* from[kEach] = {};  // null: zeros, past the last column
  int to[kEach];                     // -1: nothing
  int mine;                          // byte of memory where the lane's token begins, -1: not staged
  uint4 columns[4];

  __device__ OneTileColumns(const Work& work, const Tokens& tokens, const OneTileShape& shape, int count)
      : c(work.c), memory(shared_x(shape)) {
    const int lane = threadIdx.x % 32, pitch = count * 256 + 64;
    const int token = max(0, min(lane / 4, tokens.count - 1));  // 0 where a block has none
    mine = tokens.count * pitch <= shape.x_bytes ? token * pitch + Slot::column(0) * 2 : -1;
    const float divisor = __fdividef(1, static_cast<float>(c.x_divisor)),
                chunks = __fdividef(1, static_cast<float>(count));
    const auto row = [&](int m) {
      const int y = c.items != nullptr ? __ldcg(c.pairs + tokens.begin + m) : tokens.begin + m;
      return c.x + quotient(y, divisor) * c.x_stride + work.head(tokens) * c.x_head;
    };
    if (mine < 0) from[0] = row(token);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      to[i] = -1;
      if (mine < 0 || 2 * i >= tokens.count * count) continue;
      const int at = lane / 16 + 2 * i, m = quotient(at, chunks), chunk = at - m * count;  // 16 lanes copy a chunk
      const int column = (work.part() + chunk * work.warps_k) * 128 + lane % 16 * 8;
      if (m < tokens.count) to[i] = m * pitch + chunk * 256 + lane % 16 * 16;
      if (to[i] >= 0 && column < c.in) from[i] = row(m) + column;
    }
  }
  // Of numbers below 4 million, by a divisor's reciprocal.
  __device__ static int quotient(int number, float reciprocal) {
    return static_cast<int>((static_cast<float>(number) + 0.5f) * reciprocal);
  }
  __device__ static uint8_t* shared_x(const OneTileShape& shape) {
    extern __shared__ __align__(128) uint8_t shared[];
    return shared + kWarps * shape.ring_bytes + static_cast<int>(threadIdx.x) / 32 * shape.x_bytes;
  }
  __device__ void open() const {
    if (mine < 0) return;
    uint4 values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      values[i] = from[i] != nullptr ? *reinterpret_cast<const uint4*>(from[i]) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (to[i] >= 0) *reinterpret_cast<uint4*>(memory + to[i]) = values[i];
    __syncwarp();
  }
  // Those of the warp's chunk i, which is `chunk` of the row.
  __device__ void load(int i, int chunk) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = chunk * 128 + Slot::column(0) + Slot::column_step(j);
      columns[j] = mine >= 0 ? *reinterpret_cast<const uint4*>(memory + mine + i * 256 + Slot::column_step(j) * 2)
                             : *reinterpret_cast<const uint4*>(from[0] + min(column, c.in - 8));
    }
  }
};

// A warp asks for as many of its chunks at once as its ring holds; sums are those of skinny_kernel, to the bit.
template <typename C>
__global__ __launch_bounds__(kThreads, C::kBlocks) void one_tile_kernel(const __grid_constant__ GemmCall c,
                                                                        OneTileShape shape) {
  using Weights = typename C::Weights;
  extern __shared__ __align__(128) uint8_t shared[];
  const Work work{shape, c};
  const bool early = c.lists_settled || (c.items == nullptr && c.expert_ids == nullptr);
  if (!early) dependency_wait();
  const Tokens tokens = one_tile_tokens(work);
  const int group = static_cast<int>(blockIdx.x), part = work.part();
  const int count = tokens.count == 0 ? 0 : (c.chunks - part + work.warps_k - 1) >> (3 - work.tile_bits);
  typename Weights::Rows rows;
  rows.place(c.weight + tokens.matrix * c.weight_stride,
             static_cast<const uint8_t*>(c.scale) + tokens.matrix * c.scale_stride,
             {work.first_row(group), c.out - 1, work.row_bytes, work.scale_row});
  rows.skip(part);
  uint8_t* const ring = shared + static_cast<int>(threadIdx.x) / 32 * shape.ring_bytes;
  const auto ask = [&](int i, int at) {
    if (i < count) {
      Weights{ring, at}.fill(rows);
      rows.skip(work.warps_k);
    }
    copy_async_commit();
  };
  for (int i = 0; i < C::kSlots; ++i) ask(i, i * Weights::kBytes);
  OneTileColumns<Weights> x(work, tokens, shape, count);
  dependency_wait();  // unless it has waited before: then this takes no time
  // The next kernel's weights are not to come before this one's.
  if (count <= C::kSlots) dependency_trigger();
  if (count == 0) return;
  x.open();
  x.load(0, part);
  float sum[Weights::kRowTiles][1][4] = {};
  for (int i = 0, at = 0; i < count; ++i) {
    copy_async_wait<C::kSlots - 1>();
    if (Weights::kShared) __syncwarp();
    Weights{ring, at}.template multiply<1>([&](int, int j) { return x.columns[j]; }, sum);
    if (i + 1 < count) x.load(i + 1, part + (i + 1) * work.warps_k);
    if (Weights::kShared) __syncwarp();
    ask(i + C::kSlots, at);
    if (i + C::kSlots == count) dependency_trigger();
    at = at + Weights::kBytes == shape.ring_bytes ? 0 : at + Weights::kBytes;
  }
  store_tile<Weights::kRowTiles, 1, true>(
      work, tokens, group, sum, {reinterpret_cast<float*>(shared), shape.ring_bytes / static_cast<int>(sizeof(float))});
}

}  // namespace perigee::skinny

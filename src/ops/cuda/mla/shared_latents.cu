#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mla/blocks_here.cuh"
#include "ops/cuda/mla/latent_rows.cuh"
#include "ops/cuda/mla/merge_ranks.cuh"
#include "ops/cuda/mla/result_row.h"
#include "ops/cuda/mla/shared_latents.h"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kMergeThreads = 64;  // eight columns each
constexpr int kRowsAtOnce = kThreads / 32;

__global__ void join_queries_kernel(const uint4* by_rank, int ranks, int64_t rows, int64_t width, uint4* all) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, rank = blockIdx.y;
  const uint4* from = by_rank + (rank * rows + row) * width;
  uint4* to = all + (row * ranks + rank) * width;
  for (int64_t c = threadIdx.x; c < width; c += kThreads) to[c] = from[c];
}

__global__ void list_owners_kernel(int32_t* to, int64_t count, int heads, int ranks) {
  dependency_wait();
  dependency_trigger();
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < count) to[i] = static_cast<int32_t>(i / heads % ranks);
}

// One block a row.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(Tensor whole, int ranks, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t row = blockIdx.x, column = 8 * static_cast<int64_t>(threadIdx.x);
  const auto result = [&](int rank) { return whole.row<const uint16_t>(row) + rank * result_columns(y.cols); };
  const auto lse_of = [&](int rank) { return *reinterpret_cast<const float*>(result(rank) + y.cols); };
  float most = -INFINITY;
  for (int r = 0; r < ranks; ++r) most = fmaxf(most, lse_of(r));
  if (column >= y.cols) return;
  RankMerge merge(most);
  for (int r = 0; r < ranks; ++r) {
    const uint4 means = *reinterpret_cast<const uint4*>(result(r) + column);
    merge.add(lse_of(r), {means.x, means.y, means.z, means.w});
  }
  *reinterpret_cast<uint4*>(y.row<uint16_t>(row) + column) = merge.columns();
}

// Block (i, y): part y of the i-th block that lies here.
__global__ void take_kernel(DeviceSequences sequences, int sequence, BlockPiece piece, LatentLayer cache, uint8_t* to) {
  dependency_wait();
  dependency_trigger();
  const IndexHere here(sequences, sequence);
  const int at = here.before(piece.begin) + static_cast<int>(blockIdx.x);
  const int block = at < here.count && here.index[at] < piece.end ? here.index[at] : -1;
  auto* const numbers = reinterpret_cast<int32_t*>(to + piece.numbers_at(cache));
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    numbers[blockIdx.x] = block;
    for (int i = blockIdx.x + 1; i >= piece.most && i % 4 != 0; ++i) numbers[i] = -1;
  }
  const int64_t words = kRowsOfBlock * cache.row_bytes / 16;
  const int64_t first = static_cast<int64_t>(sequence) * sequences.table_width;
  const int64_t page = block < 0 ? 0 : sequences.block_tables[first + at];
  const auto* from = reinterpret_cast<const uint4*>(cache.base + page * cache.page_bytes);
  auto* copy = reinterpret_cast<uint4*>(to) + blockIdx.x * words;
  for (int64_t i = blockIdx.y * kThreads + threadIdx.x; i < words; i += gridDim.y * kThreads)
    copy[i] = block < 0 ? make_uint4(0, 0, 0, 0) : from[i];
}

// Block (i, y): rows 8 y ... of the i-th block of all ranks, a warp a row.
__global__ void spread_kernel(const uint8_t* pieces, BlockPiece piece, LatentLayer cache, int64_t latent, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int rank = blockIdx.x / piece.most, i = blockIdx.x % piece.most;
  const uint8_t* of_rank = pieces + rank * piece.bytes(cache);
  const int block = reinterpret_cast<const int32_t*>(of_rank + piece.numbers_at(cache))[i];
  if (block < piece.begin || block >= piece.end) return;  // none; or, while ranks warm up without data, anything
  const int64_t row = blockIdx.y * kRowsAtOnce + threadIdx.x / 32, to = (block - piece.begin) * kRowsOfBlock + row;
  if (to >= y.rows) return;
  const uint8_t* from = of_rank + (i * kRowsOfBlock + row) * cache.row_bytes;
  for (int64_t c = threadIdx.x % 32; c < y.cols / 2; c += 32)
    reinterpret_cast<uint32_t*>(y.row<uint16_t>(to))[c] = latent_pair(cache, from, 2 * c, latent);
}

}  // namespace

cudaError_t join_queries(const uint16_t* by_rank, int ranks, const Tensor& all, cudaStream_t stream) {
  const int64_t width = all.cols / ranks / 8;
  CHECK(all.cols == 8 * width * ranks && all.contiguous(), all.cols, " columns of ", ranks, " ranks");
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(all.rows), static_cast<unsigned>(ranks)),
                          .block = dim3(kThreads),
                          .stream = stream};
  return launch(join_queries_kernel, shape, reinterpret_cast<const uint4*>(by_rank), ranks, all.rows, width,
                static_cast<uint4*>(all.data));
}

cudaError_t list_owners(int32_t* to, int64_t count, int heads, int ranks, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)),
                          .block = dim3(kThreads),
                          .stream = stream};
  return launch(list_owners_kernel, shape, to, count, heads, ranks);
}

cudaError_t merge_results(const Tensor& whole, int ranks, const Tensor& y, cudaStream_t stream) {
  CHECK(whole.dtype == DType::kF16 && whole.rows == y.rows && whole.cols == ranks * result_columns(y.cols) &&
            y.cols % 8 == 0 && y.cols <= 8 * kMergeThreads,
        y.cols, " columns of ", ranks, " ranks");
  if (y.rows == 0) return cudaSuccess;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(y.rows)), .block = dim3(kMergeThreads), .stream = stream};
  return launch(merge_kernel, shape, whole, ranks, y);
}

cudaError_t take_blocks(const DeviceSequences& sequences, int sequence, const BlockPiece& piece,
                        const LatentLayer& cache, uint8_t* to, cudaStream_t stream) {
  CHECK(cache.page_bytes % 16 == 0, cache.page_bytes, " bytes a page");
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(piece.most), 4), .block = dim3(kThreads), .stream = stream};
  return launch(take_kernel, shape, sequences, sequence, piece, cache, to);
}

cudaError_t spread_blocks(const uint8_t* pieces, int ranks, const BlockPiece& piece, const LatentLayer& cache,
                          int64_t latent, const Tensor& y, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ranks * piece.most), kRowsOfBlock / kRowsAtOnce),
                          .block = dim3(kThreads),
                          .stream = stream};
  return launch(spread_kernel, shape, pieces, piece, cache, latent, y);
}

}  // namespace perigee

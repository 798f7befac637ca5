#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_boxes.cuh"
#include "comm/cuda/peer_launch.h"
#include "ops/cuda/mla/merge_ranks.cuh"
#include "ops/cuda/mla/shared_exchange.h"

namespace perigee {
namespace {

constexpr int kQueryThreads = 256, kMergeThreads = 128;  // four columns each
constexpr int kPushThreads = kMergeThreads + 32;         // and one for the log-sum-exp
constexpr int kPiecesAtOnce = 2;
constexpr int64_t kMostPullBlocks = 1056;  // as many as a GPU runs at once, about

// Where every rank's operand lies, once it is complete there. One message of a rank is for all blocks of another.
// Block-wide. False: aborted.
__device__ __forceinline__ bool find_operands(const PeerCall& call, const void* mine,
                                              const char* (&operands)[kMostPeers]) {
  const PeerView& view = call.view;
  const int other = threadIdx.x;
  bool came = true;
  if (other < view.size) operands[other] = static_cast<const char*>(mine);
  if (other < view.size && other != view.rank) {
    const uint64_t bits = reinterpret_cast<uint64_t>(mine), high = uint64_t{call.flag()} << 32;
    if (blockIdx.x == 0) {
      fence_peers();
      store_peer128(view.memory[other]->messages[call.parity()][0][view.rank], (bits & 0xFFFFFFFFu) | high,
                    bits >> 32 | high);
    }
    uint64_t message[2] = {};
    came = call.wait([&] {
      load_peer128(call.own().messages[call.parity()][0][other], message);
      return message[0] >> 32 == call.flag() && message[1] >> 32 == call.flag();
    });
    fence_peers();
    operands[other] = reinterpret_cast<const char*>(message[1] << 32 | (message[0] & 0xFFFFFFFFu));
  }
  return __syncthreads_and(came);
}

// --- Queries: pieces of 16 bytes, `width` of them in a row of a rank's ---

struct Queries {
  const char* mine;
  char* all;
  uint32_t rows, width;

  // Piece p of a rank's in the rows of all.
  __device__ __forceinline__ char* place(uint32_t p, int rank, int ranks) const {
    const uint32_t row = p / width;
    return all + 16 * (static_cast<size_t>(row * ranks + rank) * width + p % width);
  }
};

template <int kRanks, Box kBox>
__global__ __launch_bounds__(kQueryThreads) void push_queries_kernel(const __grid_constant__ PeerView view,
                                                                     Queries queries) {
  const PeerCall call(view);
  const uint32_t first = blockIdx.x * kQueryThreads + threadIdx.x, step = gridDim.x * kQueryThreads;
  const uint32_t count = queries.rows * queries.width;
  for (uint32_t p = first; p < count; p += step) {
    uint32_t own[4];
    load_piece<16>(queries.mine + size_t{16} * p, own);
    post_to_all<kBox, kRanks>(call, p, own);
    store_piece<16>(queries.place(p, view.rank, view.size), own);
  }
  for (uint32_t p = first; p < count; p += step) {
    uint32_t pieces[kRanks][4];
    if (!take_of_all<kBox>(call, p, pieces)) break;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size && r != view.rank) store_piece<16>(queries.place(p, r, view.size), pieces[r]);
  }
  call.end();
}

__global__ __launch_bounds__(kQueryThreads) void pull_queries_kernel(const __grid_constant__ PeerView view,
                                                                     Queries queries) {
  __shared__ const char* operands[kMostPeers];
  const PeerCall call(view);
  if (find_operands(call, queries.mine, operands)) {
    const uint32_t ranks = view.size, count = queries.rows * ranks * queries.width;
    const uint32_t step = gridDim.x * kQueryThreads;
    for (uint32_t at = blockIdx.x * kQueryThreads + threadIdx.x; at < count; at += kPiecesAtOnce * step) {
      uint32_t pieces[kPiecesAtOnce][4];
#pragma unroll
      for (int k = 0; k < kPiecesAtOnce; ++k) {
        const uint32_t p = at + k * step, head_row = p / queries.width, row = head_row / ranks;
        const char* from = operands[head_row - row * ranks];
        if (p < count) load_piece<16>(from + size_t{16} * (row * queries.width + p % queries.width), pieces[k]);
      }
#pragma unroll
      for (int k = 0; k < kPiecesAtOnce; ++k)
        if (at + k * step < count) store_piece<16>(queries.all + size_t{16} * (at + k * step), pieces[k]);
    }
  }
  call.end();
}

// --- Results: a block has a row of y at a time, each thread four columns ---

struct Results {
  const float* results;
  Tensor y;
  int heads;

  __device__ __forceinline__ int64_t width() const { return y.cols + 4; }
  // Where row i of that rank's y begins in every rank's results.
  __device__ __forceinline__ int64_t offset(int64_t i, int rank, int ranks) const {
    return ((i / heads * ranks + rank) * heads + i % heads) * width();
  }
};

template <int kRanks>
__device__ __forceinline__ void merge_pieces(const PeerView& view, const uint32_t (&means)[kRanks][4],
                                             const uint32_t (&lse)[kRanks], const Results& x, int64_t row, int column) {
  float most = -INFINITY;
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < view.size) most = fmaxf(most, __uint_as_float(lse[r]));
  RankMerge merge(most);
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < view.size)
      merge.add(__uint_as_float(lse[r]), {__uint_as_float(means[r][0]), __uint_as_float(means[r][1]),
                                          __uint_as_float(means[r][2]), __uint_as_float(means[r][3])});
  *reinterpret_cast<uint2*>(x.y.row<uint16_t>(row) + column) = merge.columns();
}

// A row of a box has the pieces of a row of results, one of a thread; the last one begins with the log-sum-exp.
template <int kRanks, Box kBox>
__global__ __launch_bounds__(kPushThreads) void push_results_kernel(const __grid_constant__ PeerView view, Results x) {
  __shared__ uint32_t sums[2][kRanks];  // of every second row
  const PeerCall call(view);
  const int fours = static_cast<int>(x.y.cols / 4), piece = threadIdx.x;
  const auto number = [&](int64_t row) { return static_cast<size_t>(row) * (fours + 1) + piece; };
  uint32_t mine[kRanks][4];  // of a row for each rank: all of them are read before the first is sent
  const auto read_row = [&](int64_t row) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size) load_piece<16>(x.results + x.offset(row, r, view.size) + 4 * piece, mine[r]);
  };
  for (int64_t row = blockIdx.x; row < x.y.rows && piece <= fours; row += gridDim.x) {
    read_row(row);
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size && r != view.rank) post_to<kBox>(call, r, number(row), mine[r]);
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < x.y.rows; row += gridDim.x, turn ^= 1) {
    uint32_t pieces[kRanks][4];
    bool came = true;
    if (piece <= fours) {
      uint32_t own[4];
      load_piece<16>(x.results + x.offset(row, view.rank, view.size) + 4 * piece, own);
      put_own(own, view.rank, pieces);
      came = take_of_all<kBox>(call, number(row), pieces);
    }
    if (piece == fours)
#pragma unroll
      for (int r = 0; r < kRanks; ++r) sums[turn][r] = pieces[r][0];
    if (!__syncthreads_and(came)) break;
    uint32_t lse[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) lse[r] = sums[turn][r];
    if (piece < fours) merge_pieces(view, pieces, lse, x, row, 4 * piece);
  }
  call.end();
}

template <int kRanks>
__global__ __launch_bounds__(kMergeThreads) void pull_results_kernel(const __grid_constant__ PeerView view, Results x) {
  __shared__ const char* operands[kMostPeers];
  const PeerCall call(view);
  if (find_operands(call, x.results, operands)) {
    const int column = 4 * threadIdx.x;
    for (int64_t row = blockIdx.x; row < x.y.rows && column < x.y.cols; row += gridDim.x) {
      const int64_t offset = x.offset(row, view.rank, view.size);
      uint32_t means[kRanks][4], lse[kRanks][1], sums[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r >= view.size) continue;
        const auto* from = reinterpret_cast<const float*>(operands[r]) + offset;
        load_piece<16>(from + column, means[r]);
        load_piece<4>(from + x.y.cols, lse[r]);
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) sums[r] = lse[r][0];
      merge_pieces(view, means, sums, x, row, column);
    }
  }
  call.end();
}

// --- Launches ---

// Of `pieces` that go to each other rank: more than where sums take one shot, as pulling sends no less.
bool pushes(const PeerView& view, int64_t pieces) {
  const auto count = static_cast<size_t>(pieces);
  return 2 * count <= view.one_shot_bytes && 16 * count <= number_box_bytes(view.size);
}

unsigned blocks(const PeerView& view, bool push, int64_t wanted) {
  // Where ranks share a GPU, kernels of the others must find a place beside the blocks that wait for them.
  const int64_t most = view.one_gpu ? kMostPeerBlocks / 16 : push ? kMostPeerBlocks : kMostPullBlocks;
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, most));
}

Box box_of(const PeerView& view, int64_t pieces) {
  return static_cast<size_t>(16 * pieces) <= view.flagged_bytes ? Box::kFlagged : Box::kNumbers;
}

template <int kRanks>
auto queries_kernel_of(bool push, Box box) {
  if (!push) return pull_queries_kernel;
  return box == Box::kFlagged ? push_queries_kernel<kRanks, Box::kFlagged> : push_queries_kernel<kRanks, Box::kNumbers>;
}
auto queries_kernel(int ranks, bool push, Box box) {
  return ranks <= 2   ? queries_kernel_of<2>(push, box)
         : ranks <= 4 ? queries_kernel_of<4>(push, box)
                      : queries_kernel_of<8>(push, box);
}

template <int kRanks>
auto results_kernel_of(bool push, Box box) {
  if (!push) return pull_results_kernel<kRanks>;
  return box == Box::kFlagged ? push_results_kernel<kRanks, Box::kFlagged> : push_results_kernel<kRanks, Box::kNumbers>;
}
auto results_kernel(int ranks, bool push, Box box) {
  return ranks <= 2   ? results_kernel_of<2>(push, box)
         : ranks <= 4 ? results_kernel_of<4>(push, box)
                      : results_kernel_of<8>(push, box);
}

bool on16(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride * dtype_bytes(x.dtype) % 16 == 0;
}

}  // namespace

cudaError_t exchange_queries(const PeerView& view, const Tensor& mine, const Tensor& all, cudaStream_t stream) {
  CHECK(mine.contiguous() && all.contiguous() && on16(mine) && on16(all) && all.rows == mine.rows &&
            all.cols == view.size * mine.cols && all.rows * all.cols <= INT32_MAX,
        mine.rows, "x", mine.cols, " into ", all.rows, "x", all.cols);
  if (mine.rows == 0) return cudaSuccess;
  const auto width = static_cast<uint32_t>(mine.cols / 8), rows = static_cast<uint32_t>(mine.rows);
  const bool push = pushes(view, int64_t{rows} * width);
  const int64_t threads = push ? int64_t{rows} * width : int64_t{rows} * width * view.size / kPiecesAtOnce;
  const PeerLaunch shape{.blocks = blocks(view, push, (threads + kQueryThreads - 1) / kQueryThreads),
                         .threads = kQueryThreads,
                         .stream = stream};
  return launch_peers(queries_kernel(view.size, push, box_of(view, int64_t{rows} * width)), shape, view,
                      Queries{static_cast<const char*>(mine.data), static_cast<char*>(all.data), rows, width});
}

cudaError_t exchange_results(const PeerView& view, const Tensor& results, int heads, const Tensor& y,
                             cudaStream_t stream) {
  CHECK(results.contiguous() && on16(results) && results.rows == view.size * y.rows && results.cols == y.cols + 4 &&
            y.rows % heads == 0 && y.cols % 4 == 0 && y.cols <= 4 * kMergeThreads,
        results.rows, "x", results.cols, " into ", y.rows, "x", y.cols);
  if (y.rows == 0) return cudaSuccess;
  const bool push = pushes(view, y.rows * results.cols / 4);
  const PeerLaunch shape{.blocks = blocks(view, push, y.rows),
                         .threads = static_cast<unsigned>(push ? kPushThreads : kMergeThreads),
                         .stream = stream};
  return launch_peers(results_kernel(view.size, push, box_of(view, y.rows * results.cols / 4)), shape, view,
                      Results{results.row<const float>(0), y, heads});
}

cudaError_t load_exchanges() {
  for (const int ranks : {2, 4, 8})
    for (const bool push : {true, false})
      for (const Box box : {Box::kFlagged, Box::kNumbers}) {
        cudaFuncAttributes attributes;
        for (const cudaError_t error : {cudaFuncGetAttributes(&attributes, queries_kernel(ranks, push, box)),
                                        cudaFuncGetAttributes(&attributes, results_kernel(ranks, push, box))})
          if (error != cudaSuccess) return error;
      }
  return cudaSuccess;
}

}  // namespace perigee

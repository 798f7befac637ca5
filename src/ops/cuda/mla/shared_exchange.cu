#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_boxes.cuh"
#include "comm/cuda/peer_launch.h"
#include "ops/cuda/mla/merge_ranks.cuh"
#include "ops/cuda/mla/result_row.h"
#include "ops/cuda/mla/shared_exchange.h"

namespace perigee {
namespace {

constexpr int kQueryThreads = 256;
constexpr int kRowThreads = 64;              // of a row of results: eight columns each
constexpr int kPushRows = 4, kPullRows = 2;  // of a block
constexpr int kMeanThreads = kPushRows * kRowThreads, kPushThreads = kMeanThreads + 32;
constexpr int kPullThreads = kPullRows * kRowThreads;
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

// --- Results: a block has a few rows of y at a time, each thread eight columns of one ---

struct Results {
  const uint16_t* results;
  Tensor y;
  int heads;

  // Row i of that rank's y in the results that lie at `from`.
  __device__ __forceinline__ const uint16_t* row(const void* from, int64_t i, int rank, int ranks) const {
    const int64_t head = (i / heads * ranks + rank) * heads + i % heads;
    return static_cast<const uint16_t*>(from) + head * result_columns(y.cols);
  }
};

template <int kRanks>
__device__ __forceinline__ void merge_pieces(const PeerView& view, const uint32_t (&means)[kRanks][4],
                                             const float (&lse)[kRanks], const Results& x, int64_t row, int column) {
  float most = -INFINITY;
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < view.size) most = fmaxf(most, lse[r]);
  RankMerge merge(most);
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < view.size) merge.add(lse[r], means[r]);
  *reinterpret_cast<uint4*>(x.y.row<uint16_t>(row) + column) = merge.columns();
}

// The piece of 16 bytes that a thread pushes of a row of results: of its mean; or, in a block's last warp, the row's
// last one, which begins with the log-sum-exp.
struct PushedPiece {
  int pieces;   // that a mean has
  bool is_sum;  // else of a mean
  int row;      // of the block's at a time
  int number;   // in the row

  __device__ __forceinline__ explicit PushedPiece(const Tensor& y)
      : pieces(static_cast<int>(y.cols / 8)),
        is_sum(threadIdx.x >= kMeanThreads),
        row(is_sum ? threadIdx.x - kMeanThreads : threadIdx.x / kRowThreads),
        number(is_sum ? pieces : threadIdx.x % kRowThreads) {}
  __device__ __forceinline__ bool exists() const { return is_sum ? row < kPushRows : number < pieces; }
  // In a box the means of all rows come first, so that warps write whole lines over the links.
  __device__ __forceinline__ size_t place(int64_t of_row, int64_t rows) const {
    return static_cast<size_t>(is_sum ? rows * pieces + of_row : of_row * pieces + number);
  }
};

template <int kRanks, Box kBox>
__global__ __launch_bounds__(kPushThreads) void push_results_kernel(const __grid_constant__ PeerView view, Results x) {
  __shared__ float sums[2][kPushRows][kRanks];  // of every second turn
  const PeerCall call(view);
  const PushedPiece piece(x.y);
  const int64_t first = int64_t{blockIdx.x} * kPushRows, step = int64_t{gridDim.x} * kPushRows, rows = x.y.rows;
  const auto read = [&](int64_t row, int rank, uint32_t(&words)[4]) {
    load_piece<16>(x.row(x.results, row, rank, view.size) + 8 * piece.number, words);
  };
  for (int64_t row = first + piece.row; row < rows && piece.exists(); row += step) {
    uint32_t mine[kRanks][4];  // for each rank: all of them are read before the first is sent
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size) read(row, r, mine[r]);
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size && r != view.rank) post_to<kBox>(call, r, piece.place(row, rows), mine[r]);
  }
  int turn = 0;
  for (int64_t begin = first; begin < rows; begin += step, turn ^= 1) {
    const int64_t row = begin + piece.row;
    const bool has_row = row < rows && piece.exists();
    uint32_t pieces[kRanks][4];
    bool came = true;
    if (has_row) {
      uint32_t own[4];
      read(row, view.rank, own);
      put_own(own, view.rank, pieces);
      came = take_of_all<kBox>(call, piece.place(row, rows), pieces);
    }
    if (has_row && piece.is_sum)
#pragma unroll
      for (int r = 0; r < kRanks; ++r) sums[turn][piece.row][r] = __uint_as_float(pieces[r][0]);
    if (!__syncthreads_and(came)) break;
    if (has_row && !piece.is_sum) merge_pieces(view, pieces, sums[turn][piece.row], x, row, 8 * piece.number);
  }
  call.end();
}

template <int kRanks>
__global__ __launch_bounds__(kPullThreads) void pull_results_kernel(const __grid_constant__ PeerView view, Results x) {
  __shared__ const char* operands[kMostPeers];
  const PeerCall call(view);
  if (find_operands(call, x.results, operands)) {
    const int of_block = threadIdx.x / kRowThreads, column = 8 * (threadIdx.x % kRowThreads);
    const int64_t first = int64_t{blockIdx.x} * kPullRows + of_block, step = int64_t{gridDim.x} * kPullRows;
    for (int64_t row = first; row < x.y.rows && column < x.y.cols; row += step) {
      uint32_t means[kRanks][4], words[kRanks][1];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r >= view.size) continue;
        const uint16_t* from = x.row(operands[r], row, view.rank, view.size);
        load_piece<16>(from + column, means[r]);
        load_piece<4>(from + x.y.cols, words[r]);
      }
      float lse[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) lse[r] = __uint_as_float(words[r][0]);
      merge_pieces(view, means, lse, x, row, column);
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
  CHECK(results.dtype == DType::kF16 && results.contiguous() && on16(results) && results.rows == view.size * y.rows &&
            results.cols == result_columns(y.cols) && y.rows % heads == 0 && y.cols % 8 == 0 &&
            y.cols <= 8 * kRowThreads && on16(y),
        results.rows, "x", results.cols, " into ", y.rows, "x", y.cols);
  if (y.rows == 0) return cudaSuccess;
  const int64_t pieces = y.rows * results.cols / 8;
  const bool push = pushes(view, pieces);
  const int block_rows = push ? kPushRows : kPullRows;
  const PeerLaunch shape{.blocks = blocks(view, push, (y.rows + block_rows - 1) / block_rows),
                         .threads = static_cast<unsigned>(push ? kPushThreads : kPullThreads),
                         .stream = stream};
  return launch_peers(results_kernel(view.size, push, box_of(view, pieces)), shape, view,
                      Results{results.row<const uint16_t>(0), y, heads});
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

#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_boxes.cuh"
#include "comm/cuda/peer_kernels.h"
#include "comm/cuda/peer_launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 128;

// An operand as pieces: of a contiguous one, one long row.
struct Pieces {
  char* data;
  int64_t row_bytes;  // from row to row
  uint32_t of_row, count;
  uint32_t begin, end;  // of a call

  template <int kBytes>
  __device__ __forceinline__ char* at(uint32_t piece) const {
    return at_base<kBytes>(data, piece);
  }
  // Where it lies in an operand at `base`.
  template <int kBytes>
  __device__ __forceinline__ char* at_base(char* base, uint32_t piece) const {
    const uint32_t row = of_row == count ? 0 : piece / of_row;
    return base + row * row_bytes + static_cast<int64_t>(piece - row * of_row) * kBytes;
  }
};

// to[i] += the sum of terms i of a piece of so many bytes.
template <int kBytes, int kRanks>
__device__ __forceinline__ void add_to(const uint32_t (&pieces)[kRanks][piece_words(kBytes)], int ranks, char* to) {
  constexpr int kTerms = kBytes / 2;
  float total[2 * piece_words(kBytes)];
  total_of<Term>(pieces, ranks, total);
  if constexpr (kTerms % 4 == 0) {
    auto* fours = reinterpret_cast<float4*>(to);
#pragma unroll
    for (int i = 0; i < kTerms / 4; ++i) {
      const float4 before = fours[i];
      fours[i] = {before.x + total[4 * i], before.y + total[4 * i + 1], before.z + total[4 * i + 2],
                  before.w + total[4 * i + 3]};
    }
  } else {
    static_assert(kTerms == 1);
    *reinterpret_cast<float*>(to) += total[0];
  }
}

// x becomes the sum, or with kAdds, of terms, `to` += the sum, f32.
template <typename T, int kBytes, int kRanks, Box kBox, bool kAdds>
__global__ __launch_bounds__(kThreads) void one_shot_sum_kernel(const __grid_constant__ PeerView view, Pieces x,
                                                                Pieces to) {
  constexpr int kWords = piece_words(kBytes);
  const PeerCall call(view);
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const uint32_t count = x.end - x.begin;
  for (uint32_t p = first; p < count; p += step) {
    uint32_t own[kWords];
    load_piece<kBytes>(x.at<kBytes>(x.begin + p), own);
    if constexpr (kWords == 4)
      post_to_all<kBox, kRanks>(call, p, own);
    else
      post_all<kRanks>(call, p, own);
  }
  for (uint32_t p = first; p < count; p += step) {
    uint32_t own[kWords], pieces[kRanks][kWords] = {};
    load_piece<kBytes>(x.at<kBytes>(x.begin + p), own);
    put_own(own, view.rank, pieces);
    bool came;
    if constexpr (kWords == 4)
      came = take_of_all<kBox>(call, p, pieces);
    else
      came = take_all(call, p, pieces);
    if (!came) break;
    if constexpr (kAdds) {
      add_to<kBytes>(pieces, view.size, to.at<2 * kBytes>(x.begin + p));
    } else {
      uint32_t sum[kWords];
      sum_pieces<T>(pieces, view.size, sum);
      store_piece<kBytes>(x.at<kBytes>(x.begin + p), sum);
    }
  }
  call.end();
}

// Pieces of this rank: block b of rank r has stretch (i * ranks + r) * blocks + b of kWidePeerThreads pieces, for each
// i.
template <typename T, int kBytes, int kRanks>
__global__ __launch_bounds__(kWidePeerThreads) void two_shot_sum_kernel(const __grid_constant__ PeerView view,
                                                                        Pieces x) {
  constexpr int kWords = piece_words(kBytes), kAtOnce = kRanks >= 8 ? 1 : 8 / kRanks;
  __shared__ char* bases[1][kMostPeers];
  const PeerCall call(view);
  if (call.exchange_addresses(x.data, bases)) {
    const uint32_t step = view.size * gridDim.x * kWidePeerThreads;
    const uint32_t first = (view.rank * gridDim.x + blockIdx.x) * kWidePeerThreads + threadIdx.x;
    for (uint64_t at = first; at < x.count; at += uint64_t{step} * kAtOnce) {
      uint32_t pieces[kAtOnce][kRanks][kWords] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
          if (r < view.size && at + k * uint64_t{step} < x.count)
            load_piece<kBytes>(x.at_base<kBytes>(bases[0][r], static_cast<uint32_t>(at + k * uint64_t{step})),
                               pieces[k][r]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at + k * uint64_t{step} >= x.count) continue;
        uint32_t sum[kWords];
        sum_pieces<T>(pieces[k], view.size, sum);
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
          if (r < view.size)
            store_piece<kBytes>(x.at_base<kBytes>(bases[0][r], static_cast<uint32_t>(at + k * uint64_t{step})), sum);
      }
    }
    call.meet();
  }
  call.end();
}

// Piece p of rank r goes to piece r * count + p of each rank's `all`.
struct Gather {
  const char* mine;
  char* all;
  uint32_t count;
  uint32_t begin, end;  // of a call
};

template <int kBytes, int kRanks>
__global__ __launch_bounds__(kThreads) void one_shot_gather_kernel(const __grid_constant__ PeerView view, Gather x) {
  constexpr int kWords = piece_words(kBytes);
  const PeerCall call(view);
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads, count = x.end - x.begin;
  const auto place = [&](int r, uint32_t p) {
    return x.all + (static_cast<size_t>(r) * x.count + x.begin + p) * kBytes;
  };
  for (uint32_t p = first; p < count; p += step) {
    uint32_t own[kWords];
    load_piece<kBytes>(x.mine + (static_cast<size_t>(x.begin) + p) * kBytes, own);
    post_all<kRanks>(call, p, own);
    store_piece<kBytes>(place(view.rank, p), own);
  }
  for (uint32_t p = first; p < count; p += step) {
    uint32_t pieces[kRanks][kWords];
    if (!take_all(call, p, pieces)) break;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size && r != view.rank) store_piece<kBytes>(place(r, p), pieces[r]);
  }
  call.end();
}

template <int kBytes>
__global__ __launch_bounds__(kWidePeerThreads) void direct_gather_kernel(const __grid_constant__ PeerView view,
                                                                         Gather x) {
  __shared__ char* bases[1][kMostPeers];
  const PeerCall call(view);
  if (call.exchange_addresses(x.all, bases)) {
    for (uint32_t p = blockIdx.x * kWidePeerThreads + threadIdx.x; p < x.count; p += gridDim.x * kWidePeerThreads) {
      uint32_t own[piece_words(kBytes)];
      load_piece<kBytes>(x.mine + static_cast<size_t>(p) * kBytes, own);
      for (int i = 0; i < view.size; ++i)
        store_piece<kBytes>(
            bases[0][(view.rank + i) % view.size] + (static_cast<size_t>(view.rank) * x.count + p) * kBytes, own);
    }
    call.meet();
  }
  call.end();
}

struct Deal {
  const char* part;
  int64_t part_row_bytes;
  const int32_t* to;
  int32_t rows;
  uint32_t of_row;  // pieces of a row of `part`
  char* whole;
  int64_t whole_row_bytes;
  int32_t begin, end;  // rows of a call
};

// The rows of a block, as many as it has threads at a time: to whom, and which of that rank's rows it becomes.
template <int kBlock>
struct DealtRows {
  int32_t to[kBlock], at[kBlock];
  int32_t counts[kMostPeers];  // of each rank, before these rows
};

// Counts rows [begin, end) too. Block-wide.
template <int kBlock>
__device__ __forceinline__ void count_rows(const Deal& deal, int begin, int end, DealtRows<kBlock>& rows) {
  int counts[kMostPeers] = {};
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kBlock) {
    const int32_t to = deal.to[i];
#pragma unroll
    for (int r = 0; r < kMostPeers; ++r) counts[r] += to == r;
  }
#pragma unroll
  for (int r = 0; r < kMostPeers; ++r)
    if (counts[r] > 0) atomicAdd(&rows.counts[r], counts[r]);
  __syncthreads();
}

// Finds the places of rows [begin, begin + count), given the counts before them. Block-wide.
template <int kBlock>
__device__ __forceinline__ void place_rows(const Deal& deal, int begin, int count, DealtRows<kBlock>& rows) {
  const int mine = threadIdx.x;
  if (mine < count) rows.to[mine] = deal.to[begin + mine];
  __syncthreads();
  if (mine < count && rows.to[mine] >= 0) {
    int at = rows.counts[rows.to[mine]];
    for (int i = 0; i < mine; ++i) at += rows.to[i] == rows.to[mine];
    rows.at[mine] = at;
  }
  __syncthreads();
}

// Runs f(to, row of part, row of whole, piece) for the pieces of this block's rows. `again`: not for the first time.
template <int kBlock, typename F>
__device__ __forceinline__ void for_dealt(const Deal& deal, DealtRows<kBlock>& rows, bool again, const F& f) {
  const int of_block = (deal.end - deal.begin + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int first = deal.begin + static_cast<int>(blockIdx.x) * of_block, end = min(first + of_block, deal.end);
  const bool placed = again && of_block <= kBlock;
  if (!placed) {
    __syncthreads();
    if (threadIdx.x < kMostPeers) rows.counts[threadIdx.x] = 0;
    __syncthreads();
    count_rows(deal, 0, first, rows);
  }
  for (int begin = first; begin < end; begin += kBlock) {
    const int count = min(kBlock, end - begin);
    if (!placed) place_rows(deal, begin, count, rows);
    for (uint32_t i = threadIdx.x; i < count * deal.of_row; i += kBlock) {
      const uint32_t row = i / deal.of_row;
      if (rows.to[row] >= 0) f(rows.to[row], begin + static_cast<int>(row), rows.at[row], i - row * deal.of_row);
    }
    if (begin + count >= end) break;
    __syncthreads();
    count_rows(deal, begin, begin + count, rows);
  }
}

template <int kBytes>
__device__ __forceinline__ char* dealt_place(const Deal& deal, char* whole, int from, int row, uint32_t piece) {
  return whole + row * deal.whole_row_bytes + (static_cast<int64_t>(from) * deal.of_row + piece) * kBytes;
}

template <int kBytes, int kRanks>
__global__ __launch_bounds__(kThreads) void one_shot_deal_kernel(const __grid_constant__ PeerView view, Deal deal) {
  constexpr int kWords = piece_words(kBytes);
  __shared__ DealtRows<kThreads> rows;
  const PeerCall call(view);
  if (blockIdx.x == 0) call.greet();
  const auto number = [&](int row, uint32_t piece) {
    return static_cast<size_t>(row - deal.begin) * deal.of_row + piece;
  };
  for_dealt(deal, rows, false, [&](int to, int row, int at, uint32_t piece) {
    uint32_t own[kWords];
    load_piece<kBytes>(deal.part + row * deal.part_row_bytes + static_cast<size_t>(piece) * kBytes, own);
    if (to != view.rank) {
      post<kWords>(call.mailbox(to, view.rank) + box_offset<kWords>(number(row, piece)), own, call.flag());
    } else {
      store_piece<kBytes>(dealt_place<kBytes>(deal, deal.whole, view.rank, at, piece), own);
    }
  });
  bool came = true;
  for_dealt(deal, rows, true, [&](int to, int row, int at, uint32_t piece) {
    if (to != view.rank || !came) return;
    uint32_t pieces[kRanks][kWords];
    came = take_all(call, number(row, piece), pieces);
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (came && r < view.size && r != view.rank)
        store_piece<kBytes>(dealt_place<kBytes>(deal, deal.whole, r, at, piece), pieces[r]);
  });
  // A rank that gets no row, too, ends only once all have come.
  if (blockIdx.x == 0) call.await_greetings();
  call.end();
}

template <int kBytes>
__global__ __launch_bounds__(kWidePeerThreads) void direct_deal_kernel(const __grid_constant__ PeerView view,
                                                                       Deal deal) {
  __shared__ DealtRows<kWidePeerThreads> rows;
  __shared__ char* bases[1][kMostPeers];
  const PeerCall call(view);
  if (call.exchange_addresses(deal.whole, bases)) {
    for_dealt(deal, rows, false, [&](int to, int row, int at, uint32_t piece) {
      uint32_t own[piece_words(kBytes)];
      load_piece<kBytes>(deal.part + row * deal.part_row_bytes + static_cast<size_t>(piece) * kBytes, own);
      store_piece<kBytes>(dealt_place<kBytes>(deal, bases[0][to], view.rank, at, piece), own);
    });
    call.meet();
  }
  call.end();
}

__global__ __launch_bounds__(kThreads) void barrier_kernel(const __grid_constant__ PeerView view) {
  const PeerCall call(view);
  call.meet();
  call.end();
}

// --- The kernels of a call, by the number of ranks ---

template <typename T, int kBytes, int kRanks, bool kAdds>
auto one_shot_kernel_of(Box box) {
  if constexpr (piece_words(kBytes) == 4)
    if (box == Box::kNumbers) return one_shot_sum_kernel<T, kBytes, kRanks, Box::kNumbers, kAdds>;
  return one_shot_sum_kernel<T, kBytes, kRanks, Box::kFlagged, kAdds>;
}
template <typename T, int kBytes, bool kAdds = false>
auto one_shot_kernel(int ranks, Box box) {
  return ranks <= 2   ? one_shot_kernel_of<T, kBytes, 2, kAdds>(box)
         : ranks <= 4 ? one_shot_kernel_of<T, kBytes, 4, kAdds>(box)
                      : one_shot_kernel_of<T, kBytes, 8, kAdds>(box);
}
template <int kBytes>
auto add_kernel(int ranks, Box box) {
  return one_shot_kernel<Term, kBytes, true>(ranks, box);
}
template <typename T, int kBytes>
auto two_shot_kernel(int ranks) {
  return ranks <= 2   ? two_shot_sum_kernel<T, kBytes, 2>
         : ranks <= 4 ? two_shot_sum_kernel<T, kBytes, 4>
                      : two_shot_sum_kernel<T, kBytes, 8>;
}

template <int kBytes>
auto gather_kernel(int ranks, bool one_shot) {
  if (!one_shot) return direct_gather_kernel<kBytes>;
  return ranks <= 2   ? one_shot_gather_kernel<kBytes, 2>
         : ranks <= 4 ? one_shot_gather_kernel<kBytes, 4>
                      : one_shot_gather_kernel<kBytes, 8>;
}

template <int kBytes>
auto deal_kernel(int ranks, bool one_shot) {
  if (!one_shot) return direct_deal_kernel<kBytes>;
  return ranks <= 2   ? one_shot_deal_kernel<kBytes, 2>
         : ranks <= 4 ? one_shot_deal_kernel<kBytes, 4>
                      : one_shot_deal_kernel<kBytes, 8>;
}

// Pieces that a box holds.
template <int kBytes>
int64_t most_boxed(const PeerView& view, Box box) {
  if (box == Box::kNumbers) return static_cast<int64_t>(number_box_bytes(view.size)) / kBytes;
  const auto bytes = static_cast<int64_t>(mailbox_bytes(view.size));
  return piece_words(kBytes) == 4 ? bytes / 1024 * 32 : bytes / 8;
}

// An exchange of `count` units of so many pieces: run(begin, end, one_shot) for each of the calls that it takes. Where
// kernels reach nothing but boxes, no call has more than these hold.
template <int kBytes, typename Run>
cudaError_t in_calls(const PeerView& view, Box box, int64_t count, int64_t unit_pieces, const Run& run) {
  const int64_t pieces = count * unit_pieces, boxed = most_boxed<kBytes>(view, box);
  const size_t most = box == Box::kNumbers ? view.one_shot_bytes : view.one_shot_bytes / 2;
  const bool chosen = static_cast<size_t>(pieces) * kBytes <= most && pieces <= boxed;
  if (chosen || view.direct) return run(0, count, chosen);
  const int64_t at_once = boxed / unit_pieces;
  CHECK(at_once > 0, "rows of ", unit_pieces, " pieces");
  for (int64_t begin = 0; begin < count; begin += at_once)
    if (const cudaError_t error = run(begin, std::min(begin + at_once, count), true); error != cudaSuccess)
      return error;
  return cudaSuccess;
}

PeerLaunch shape_of(const PeerView& view, bool one_shot, int64_t threads, cudaStream_t stream) {
  const int64_t of_block = one_shot ? kThreads : kWidePeerThreads;
  const int64_t most = one_shot ? view.most_blocks() : kMostWidePeerBlocks;
  return {.blocks = static_cast<unsigned>(std::clamp<int64_t>((threads + of_block - 1) / of_block, 1, most)),
          .threads = static_cast<unsigned>(of_block),
          .stream = stream};
}

// x as pieces of kBytes; `flat`: one long row.
template <typename T, int kBytes>
Pieces pieces_of(const Tensor& x, bool flat) {
  const int64_t row_bytes = x.cols * static_cast<int64_t>(sizeof(T)), count = x.rows * row_bytes / kBytes;
  CHECK(count <= UINT32_MAX / 2, "a sum of ", x.rows, "x", x.cols);
  return {.data = static_cast<char*>(x.data),
          .row_bytes = x.row_stride * static_cast<int64_t>(sizeof(T)),
          .of_row = static_cast<uint32_t>(flat ? count : row_bytes / kBytes),
          .count = static_cast<uint32_t>(count),
          .begin = 0,
          .end = 0};
}

template <int kBytes>
Box box_of(const PeerView& view, const Pieces& pieces) {
  const bool flagged = piece_words(kBytes) != 4 || size_t{pieces.count} * kBytes <= view.flagged_bytes;
  return flagged ? Box::kFlagged : Box::kNumbers;
}

template <typename T, int kBytes>
cudaError_t sum(const PeerView& view, const Tensor& x, cudaStream_t stream) {
  Pieces pieces = pieces_of<T, kBytes>(x, x.contiguous());
  const int64_t count = pieces.count;
  const Box box = box_of<kBytes>(view, pieces);
  return in_calls<kBytes>(view, box, count, 1, [&](int64_t begin, int64_t end, bool one_shot) {
    pieces.begin = static_cast<uint32_t>(begin), pieces.end = static_cast<uint32_t>(end);
    if (one_shot)
      return launch_peers(one_shot_kernel<T, kBytes>(view.size, box), shape_of(view, true, end - begin, stream), view,
                          pieces, Pieces());
    const int64_t of_rank = (count + view.size - 1) / view.size;
    return launch_peers(two_shot_kernel<T, kBytes>(view.size), shape_of(view, false, of_rank, stream), view, pieces);
  });
}

// In one shot, in as many calls as boxes ask for: where GPUs reach each other's memory, reduce points of many rows have
// a kernel of their own (ops/cuda/scatter_norm.h).
template <int kBytes>
cudaError_t add(const PeerView& view, const Tensor& x, const Tensor& to, cudaStream_t stream) {
  const bool flat = x.contiguous() && to.contiguous();
  Pieces terms = pieces_of<Term, kBytes>(x, flat);
  const Box box = box_of<kBytes>(view, terms);
  const int64_t count = terms.count, at_once = most_boxed<kBytes>(view, box);
  for (int64_t begin = 0; begin < count; begin += at_once) {
    terms.begin = static_cast<uint32_t>(begin), terms.end = static_cast<uint32_t>(std::min(begin + at_once, count));
    if (const cudaError_t error =
            launch_peers(add_kernel<kBytes>(view.size, box), shape_of(view, true, terms.end - terms.begin, stream),
                         view, terms, pieces_of<float, 2 * kBytes>(to, flat));
        error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

bool on16(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
}

template <int kBytes>
cudaError_t gather(const PeerView& view, const void* mine, size_t bytes, void* all, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(bytes) / kBytes;
  CHECK(count <= UINT32_MAX / 2, "a gather of ", bytes, " bytes");
  Gather gather{.mine = static_cast<const char*>(mine),
                .all = static_cast<char*>(all),
                .count = static_cast<uint32_t>(count),
                .begin = 0,
                .end = 0};
  return in_calls<kBytes>(view, Box::kFlagged, count, 1, [&](int64_t begin, int64_t end, bool one_shot) {
    gather.begin = static_cast<uint32_t>(begin), gather.end = static_cast<uint32_t>(end);
    return launch_peers(gather_kernel<kBytes>(view.size, one_shot), shape_of(view, one_shot, end - begin, stream), view,
                        gather);
  });
}

template <int kBytes>
cudaError_t deal(const PeerView& view, Deal rows, cudaStream_t stream) {
  CHECK(rows.of_row <= UINT32_MAX / 2 / kWidePeerThreads, "rows of ", rows.of_row, " pieces");
  return in_calls<kBytes>(view, Box::kFlagged, rows.rows, rows.of_row, [&](int64_t begin, int64_t end, bool one_shot) {
    rows.begin = static_cast<int32_t>(begin), rows.end = static_cast<int32_t>(end);
    PeerLaunch shape = shape_of(view, one_shot, (end - begin) * rows.of_row, stream);
    // Rows are mostly not on 16 bytes: more blocks make up for the smaller pieces.
    if (!one_shot && shape.blocks == kMostWidePeerBlocks) shape.blocks = 2 * kMostWidePeerBlocks;
    shape.blocks = std::min(shape.blocks, static_cast<unsigned>(end - begin));
    return launch_peers(deal_kernel<kBytes>(view.size, one_shot), shape, view, rows);
  });
}

template <typename Kernel>
cudaError_t load(Kernel kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

template <int kBytes>
cudaError_t load_moves(int ranks, bool one_shot) {
  const cudaError_t error = load(gather_kernel<kBytes>(ranks, one_shot));
  if (error != cudaSuccess || kBytes == 1) return error;
  return load(deal_kernel<kBytes>(ranks, one_shot));
}

cudaError_t load_kernels(int ranks) {
  for (const cudaError_t error :
       {load(one_shot_kernel<float, 16>(ranks, Box::kNumbers)), load(one_shot_kernel<float, 16>(ranks, Box::kFlagged)),
        load(one_shot_kernel<float, 4>(ranks, Box::kFlagged)),
        load(one_shot_kernel<__nv_bfloat16, 16>(ranks, Box::kNumbers)),
        load(one_shot_kernel<__nv_bfloat16, 16>(ranks, Box::kFlagged)),
        load(one_shot_kernel<__nv_bfloat16, 2>(ranks, Box::kFlagged)), load(add_kernel<16>(ranks, Box::kNumbers)),
        load(add_kernel<16>(ranks, Box::kFlagged)), load(add_kernel<2>(ranks, Box::kFlagged)),
        load(two_shot_kernel<float, 16>(ranks)), load(two_shot_kernel<float, 4>(ranks)),
        load(two_shot_kernel<__nv_bfloat16, 16>(ranks)), load(two_shot_kernel<__nv_bfloat16, 2>(ranks))})
    if (error != cudaSuccess) return error;
  for (const bool one_shot : {true, false})
    for (const cudaError_t error :
         {load_moves<16>(ranks, one_shot), load_moves<4>(ranks, one_shot), load_moves<1>(ranks, one_shot)})
      if (error != cudaSuccess) return error;
  return cudaSuccess;
}

}  // namespace

cudaError_t peer_all_reduce(const PeerView& view, const Tensor& x, cudaStream_t stream) {
  const int64_t bytes = x.dtype == DType::kF32 ? 4 : 2;
  const bool wide = on16(x.data, x.cols * bytes) && x.row_stride * bytes % 16 == 0;
  if (x.dtype == DType::kF32) return wide ? sum<float, 16>(view, x, stream) : sum<float, 4>(view, x, stream);
  return wide ? sum<__nv_bfloat16, 16>(view, x, stream) : sum<__nv_bfloat16, 2>(view, x, stream);
}

cudaError_t peer_add_up(const PeerView& view, const Tensor& x, const Tensor& to, cudaStream_t stream) {
  const bool wide = on16(x.data, 2 * x.cols) && x.row_stride % 8 == 0 && on16(to.data, 4 * to.row_stride);
  return wide ? add<16>(view, x, to, stream) : add<2>(view, x, to, stream);
}

cudaError_t peer_all_gather(const PeerView& view, const void* mine, size_t bytes, void* all, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(bytes);
  if (on16(mine, count) && on16(all, count)) return gather<16>(view, mine, bytes, all, stream);
  const bool words = (reinterpret_cast<uintptr_t>(mine) | reinterpret_cast<uintptr_t>(all) | bytes) % 4 == 0;
  return words ? gather<4>(view, mine, bytes, all, stream) : gather<1>(view, mine, bytes, all, stream);
}

cudaError_t peer_all_to_all(const PeerView& view, const Tensor& part, const int32_t* to, const Tensor& whole,
                            cudaStream_t stream) {
  Deal rows{.part = part.row<const char>(0),
            .part_row_bytes = 4 * part.row_stride,
            .to = to,
            .rows = static_cast<int32_t>(part.rows),
            .of_row = static_cast<uint32_t>(part.cols),
            .whole = whole.row<char>(0),
            .whole_row_bytes = 4 * whole.row_stride,
            .begin = 0,
            .end = 0};
  if (!on16(part.data, 4 * part.cols) || !on16(whole.data, rows.whole_row_bytes) || rows.part_row_bytes % 16 != 0)
    return deal<4>(view, rows, stream);
  rows.of_row /= 4;
  return deal<16>(view, rows, stream);
}

cudaError_t peer_barrier(const PeerView& view, cudaStream_t stream) {
  return launch_peers(barrier_kernel, {.threads = kThreads, .stream = stream}, view);
}

cudaError_t load_peer_kernels() {
  for (const int ranks : {2, 4, 8})
    if (const cudaError_t error = load_kernels(ranks); error != cudaSuccess) return error;
  return load(barrier_kernel);
}

}  // namespace perigee

#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_launch.h"
#include "comm/cuda/peer_pieces.cuh"
#include "ops/cuda/launch.h"
#include "ops/cuda/norm_row.cuh"
#include "ops/cuda/reduce_norm.h"

namespace perigee {
namespace {

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
// Writes into the same place of another block of the cluster.
__device__ __forceinline__ void store_in_block(float* place, int block, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

// The RMSNorm of one row by a cluster of kCluster blocks, with the bits of NormRow: of its kNormThreads threads, which
// have kNormFours pieces of 4 columns each, block b stands for those from b * kOwn on. So many blocks send and receive
// a row faster than one. Piece k of a block is piece k / kOwn of thread k % kOwn; each of its own threads has kRounds.
template <int kCluster>
struct SpreadRow {
  static constexpr int kOwn = kNormThreads / kCluster, kPieces = kOwn * kNormFours;
  static constexpr int kThreads = kCluster == 1 ? 512 : 256, kRounds = kPieces / kThreads;
  static_assert(kOwn % 32 == 0 && kPieces % kThreads == 0);

  const int fours, first;  // columns / 4; the thread of NormRow that is this block's first
  float4 weight[kRounds];

  // Weights may be read before the kernel's wait.
  __device__ __forceinline__ SpreadRow(const float* weights, int64_t cols)
      : fours(static_cast<int>(cols / 4)), first(cluster_rank() * kOwn) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (has(i)) weight[i] = reinterpret_cast<const float4*>(weights)[column(i)];
    if constexpr (kCluster > 1) cluster_arrive();  // this block has started
  }
  __device__ __forceinline__ int column_of(int piece) const {
    return first + piece % kOwn + piece / kOwn * kNormThreads;
  }
  __device__ __forceinline__ int column(int round) const {
    return column_of(static_cast<int>(threadIdx.x) + round * kThreads);
  }
  __device__ __forceinline__ bool has(int round) const {
    return column(round) < fours;
  }

  // By all threads, for the `turn`-th row.
  __device__ __forceinline__ void normalize(const float4 (&v)[kRounds], float eps, int turn, uint16_t* out) const {
    __shared__ float4 row[kPieces];
    __shared__ float parts[2][kNormThreads / 32];  // of two turns: a block may be one ahead of another
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (has(i)) row[threadIdx.x + i * kThreads] = v[i];
    __syncthreads();
    if constexpr (kCluster > 1)
      if (turn == 0) cluster_wait();  // all blocks have started
    const int own = threadIdx.x, lane = own % 32;
    if (own < kOwn) {
      float squares = 0;
#pragma unroll
      for (int p = 0; p < kNormFours; ++p) {
        const float4 x = row[p * kOwn + own];
        if (first + own + p * kNormThreads < fours)
          squares = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares))));
      }
      squares = warp_sum(squares);
      float* part = &parts[turn % 2][(first + own) / 32];
      if constexpr (kCluster == 1) {
        if (lane == 0) *part = squares;
      } else {
        if (lane < kCluster) store_in_block(part, lane, squares);
      }
    }
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
    }
    float total = 0;
    for (const float part : parts[turn % 2]) total += part;
    const float factor = rsqrtf(total / static_cast<float>(4 * fours) + eps);
    auto* to = reinterpret_cast<uint2*>(out);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const float4 a = weight[i];
      if (has(i))
        to[column(i)] = {pack_pair(Bf16(), v[i].x * factor * a.x, v[i].y * factor * a.y),
                         pack_pair(Bf16(), v[i].z * factor * a.z, v[i].w * factor * a.w)};
    }
  }
};

struct Rows {
  Tensor residual, y, out;
  const float* weight;
  float eps;
};

__device__ __forceinline__ float4* fours_of(const Tensor& x, int row) {
  return reinterpret_cast<float4*>(x.row<float>(row));
}

// residual += sum.
__device__ __forceinline__ float4 add_sum(float4* residual, const uint32_t (&sum)[4]) {
  float4 v = *residual;
  v = {v.x + __uint_as_float(sum[0]), v.y + __uint_as_float(sum[1]), v.z + __uint_as_float(sum[2]),
       v.w + __uint_as_float(sum[3])};
  return *residual = v;
}

template <int kCluster, int kRanks>
__global__ __launch_bounds__(SpreadRow<kCluster>::kThreads) void one_shot_norm_kernel(
    const __grid_constant__ PeerView view, const __grid_constant__ Rows rows) {
  using Row = SpreadRow<kCluster>;
  const Row row(rows.weight, rows.y.cols);
  const PeerCall call(view);
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  const auto offset = [&](int r, int round) { return (static_cast<size_t>(r) * row.fours + row.column(round)) * 32; };
  for (int r = first; r < rows.y.rows; r += step)
#pragma unroll
    for (int i = 0; i < Row::kRounds; ++i) {
      if (!row.has(i)) continue;
      uint32_t own[4];
      load_piece<16>(fours_of(rows.y, r) + row.column(i), own);
      post_all(call, offset(r, i), own);
    }
  for (int r = first, turn = 0; r < rows.y.rows; r += step, ++turn) {
    float4 v[Row::kRounds];
#pragma unroll
    for (int i = 0; i < Row::kRounds; ++i) {
      if (!row.has(i)) continue;
      uint32_t own[4], sum[4], pieces[kRanks][4] = {};
      load_piece<16>(fours_of(rows.y, r) + row.column(i), own);
      put_own(own, view.rank, pieces);
      take_all(call, offset(r, i), pieces);
      sum_pieces<float>(pieces, view.size, sum);
      v[i] = add_sum(fours_of(rows.residual, r) + row.column(i), sum);
    }
    row.normalize(v, rows.eps, turn, rows.out.row<uint16_t>(r));
  }
  call.end();
}

// Of a block's pieces rank q adds up eights q, q + ranks, ... of each row.
template <int kCluster, int kRanks>
__device__ __forceinline__ void sum_share(const PeerView& view, const Rows& rows, const SpreadRow<kCluster>& row,
                                          char* const (&bases)[kMostPeers]) {
  using Row = SpreadRow<kCluster>;
  constexpr int kAtOnce = kRanks >= 8 ? 1 : 8 / kRanks;
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  const int count = (static_cast<int>(rows.y.rows) - first + step - 1) / step;  // rows of this cluster
  const int share = (Row::kPieces / 8 + view.size - 1) / view.size * 8;         // pieces of a row, at most
  for (int at = threadIdx.x; at < count * share; at += Row::kThreads * kAtOnce) {
    uint32_t pieces[kAtOnce][kRanks][4] = {};
    int64_t places[kAtOnce];  // bytes from the beginning of y; negative: none
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int index = at + k * Row::kThreads, turn = index / share, own = index - turn * share;
      const int piece = (own / 8 * view.size + view.rank) * 8 + own % 8, column = row.column_of(piece);
      const bool here = turn < count && piece < Row::kPieces && column < row.fours;
      places[k] = here ? ((first + turn * step) * rows.y.row_stride + 4 * column) * 4 : -1;
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        if (here && r < view.size) load_piece<16>(bases[r] + places[k], pieces[k][r]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      uint32_t sum[4];
      sum_pieces<float>(pieces[k], view.size, sum);
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        if (places[k] >= 0 && r < view.size) store_piece<16>(bases[r] + places[k], sum);
    }
  }
}

template <int kCluster, int kRanks>
__global__ __launch_bounds__(SpreadRow<kCluster>::kThreads) void two_shot_norm_kernel(
    const __grid_constant__ PeerView view, const __grid_constant__ Rows rows) {
  using Row = SpreadRow<kCluster>;
  __shared__ char* bases[kMostPeers];
  const Row row(rows.weight, rows.y.cols);
  const PeerCall call(view);
  if (call.exchange_addresses(rows.y.data, bases)) {
    sum_share<kCluster, kRanks>(view, rows, row, bases);
    call.meet();
  }
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  for (int r = first, turn = 0; r < rows.y.rows; r += step, ++turn) {
    float4 v[Row::kRounds];
#pragma unroll
    for (int i = 0; i < Row::kRounds; ++i) {
      if (!row.has(i)) continue;
      uint32_t sum[4];
      load_piece<16>(fours_of(rows.y, r) + row.column(i), sum);
      v[i] = add_sum(fours_of(rows.residual, r) + row.column(i), sum);
    }
    row.normalize(v, rows.eps, turn, rows.out.row<uint16_t>(r));
  }
  call.end();
}

constexpr int kCluster = 8;

bool one_shot(const PeerView& view, const Tensor& y) {
  const auto bytes = static_cast<size_t>(y.rows * y.cols * 4);
  return bytes <= view.one_shot_bytes && 2 * bytes <= kMailboxBytes;
}

template <int kBlocks>
auto norm_kernel(int ranks, bool one_shot) {
  if (ranks <= 2) return one_shot ? one_shot_norm_kernel<kBlocks, 2> : two_shot_norm_kernel<kBlocks, 2>;
  if (ranks <= 4) return one_shot ? one_shot_norm_kernel<kBlocks, 4> : two_shot_norm_kernel<kBlocks, 4>;
  return one_shot ? one_shot_norm_kernel<kBlocks, 8> : two_shot_norm_kernel<kBlocks, 8>;
}

}  // namespace

bool reduce_norm_fits(const Tensor& residual, const Tensor& y, const Tensor& out) {
  return in_fours(residual) && in_fours(y) && out.dtype == DType::kBF16 && out.row_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(out.data) % 8 == 0;
}

bool reduce_norm_pays(const PeerView& view, const Tensor& y) {
  return one_shot(view, y);
}

cudaError_t reduce_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                             float eps, const Tensor& out, cudaStream_t stream) {
  CHECK(reduce_norm_fits(residual, y, out), "a norm of ", y.cols, " columns");
  if (y.rows == 0) return cudaSuccess;
  const bool once = one_shot(view, y), clusters = device_limits().capability >= 90;
  const unsigned cluster = clusters ? kCluster : 1;
  const int64_t most = view.most_blocks() / cluster;
  const PeerLaunch shape{
      .blocks = cluster * static_cast<unsigned>(std::min(y.rows, most)),
      .threads = static_cast<unsigned>(clusters ? SpreadRow<kCluster>::kThreads : SpreadRow<1>::kThreads),
      .cluster = cluster,
      .stream = stream};
  const Rows rows{.residual = residual, .y = y, .out = out, .weight = weight, .eps = eps};
  return launch_peers(clusters ? norm_kernel<kCluster>(view.size, once) : norm_kernel<1>(view.size, once), shape, view,
                      rows);
}

cudaError_t load_reduce_norm() {
  const bool clusters = device_limits().capability >= 90;
  for (const int ranks : {2, 4, 8})
    for (const bool one_shot : {true, false}) {
      cudaFuncAttributes attributes;
      const cudaError_t error = cudaFuncGetAttributes(
          &attributes, clusters ? norm_kernel<kCluster>(ranks, one_shot) : norm_kernel<1>(ranks, one_shot));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

}  // namespace perigee

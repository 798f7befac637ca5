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

  // By all threads.
  __device__ __forceinline__ void normalize(const float4 (&v)[kRounds], float eps, uint16_t* out) const {
    __shared__ float4 row[kPieces];
    __shared__ float parts[kNormThreads / 32];
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (has(i)) row[threadIdx.x + i * kThreads] = v[i];
    __syncthreads();
    if constexpr (kCluster > 1) cluster_wait();  // all blocks have started
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
      float* part = &parts[(first + own) / 32];
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
    for (const float part : parts) total += part;
    const float factor = rsqrtf(total / static_cast<float>(4 * fours) + eps);
    auto* to = reinterpret_cast<uint2*>(out);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const float4 a = weight[i];
      if (has(i)) to[column(i)] = normed_four(v[i], factor, a);
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

// A cluster has one row.
template <int kCluster, int kRanks>
__global__ __launch_bounds__(SpreadRow<kCluster>::kThreads) void reduce_norm_kernel(
    const __grid_constant__ PeerView view, const __grid_constant__ Rows rows) {
  using Row = SpreadRow<kCluster>;
  const Row row(rows.weight, rows.y.cols);
  const PeerCall call(view);
  const int r = blockIdx.x / kCluster;
  const size_t first = static_cast<size_t>(r) * row.fours;  // piece
  const float4* y = fours_of(rows.y, r);
  uint32_t own[Row::kRounds][4];
#pragma unroll
  for (int i = 0; i < Row::kRounds; ++i) {
    if (!row.has(i)) continue;
    load_piece<16>(y + row.column(i), own[i]);
    post_all(call, first + row.column(i), own[i]);
  }
  float4 v[Row::kRounds];
#pragma unroll
  for (int i = 0; i < Row::kRounds; ++i) {
    if (!row.has(i)) continue;
    float4& residual = fours_of(rows.residual, r)[row.column(i)];
    v[i] = residual;
    uint32_t sum[4], pieces[kRanks][4] = {};
    put_own(own[i], view.rank, pieces);
    take_all(call, first + row.column(i), pieces);
    sum_pieces<float>(pieces, view.size, sum);
    v[i] = {v[i].x + __uint_as_float(sum[0]), v[i].y + __uint_as_float(sum[1]), v[i].z + __uint_as_float(sum[2]),
            v[i].w + __uint_as_float(sum[3])};
    residual = v[i];
  }
  row.normalize(v, rows.eps, rows.out.row<uint16_t>(r));
  call.end();
}

constexpr int kCluster = 8;

template <int kBlocks>
auto norm_kernel(int ranks) {
  return ranks <= 2   ? reduce_norm_kernel<kBlocks, 2>
         : ranks <= 4 ? reduce_norm_kernel<kBlocks, 4>
                      : reduce_norm_kernel<kBlocks, 8>;
}

// The blocks of 64 rows are too many to be resident at once.
int64_t most_rows(const PeerView& view) {
  return view.most_blocks() / (2 * kCluster);
}

}  // namespace

bool has_clusters() {
  return device_limits().capability >= 90;
}

bool reduce_norm_pays(const PeerView& view, const Tensor& residual, const Tensor& y, const Tensor& out) {
  const auto fours = static_cast<size_t>(y.rows * y.cols / 4);
  return in_fours(residual) && in_fours(y) && out.dtype == DType::kBF16 && out.row_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(out.data) % 8 == 0 && y.rows <= most_rows(view) &&
         16 * fours <= view.one_shot_bytes && box_bytes<4>(fours) <= mailbox_bytes(view.size);
}

cudaError_t reduce_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                             float eps, const Tensor& out, cudaStream_t stream, bool clusters) {
  CHECK(reduce_norm_pays(view, residual, y, out), y.rows, " rows of ", y.cols, " columns");
  if (y.rows == 0) return cudaSuccess;
  const Rows rows{.residual = residual, .y = y, .out = out, .weight = weight, .eps = eps};
  const auto count = static_cast<unsigned>(y.rows);
  if (!clusters)
    return launch_peers(norm_kernel<1>(view.size),
                        {.blocks = count, .threads = SpreadRow<1>::kThreads, .stream = stream}, view, rows);
  return launch_peers(
      norm_kernel<kCluster>(view.size),
      {.blocks = kCluster * count, .threads = SpreadRow<kCluster>::kThreads, .cluster = kCluster, .stream = stream},
      view, rows);
}

cudaError_t load_reduce_norm(bool clusters) {
  for (const int ranks : {2, 4, 8}) {
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, clusters ? norm_kernel<kCluster>(ranks) : norm_kernel<1>(ranks));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace perigee

#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_launch.h"
#include "comm/cuda/peer_pieces.cuh"
#include "ops/cuda/norm_row.cuh"
#include "ops/cuda/scatter_norm.h"

namespace perigee {
namespace {

constexpr int kThreads = kNormThreads / kNormSplit;
using Row = NormRow<kNormSplit>;

struct Call {
  Tensor residual, y, out;
  const float* weight;
  float eps;
  RowShares shares;
};

// Row r of the residual += the sum of the ranks' y, into the block's registers as well.
template <int kRanks>
__device__ __forceinline__ void add_row(const Call& c, int ranks, char* const (&y)[kMostPeers], int64_t r, Row& row) {
  constexpr int kAtOnce = 16 / kRanks;  // pieces under way, of each rank
  auto* residual = reinterpret_cast<float4*>(c.residual.row<float>(r));
  const int64_t offset = r * c.y.row_stride * static_cast<int64_t>(sizeof(float));
#pragma unroll
  for (int first = 0; first < Row::kPieces; first += kAtOnce) {
    if (!row.has(first)) break;
    uint32_t pieces[kAtOnce][kRanks][4] = {};
    float4 before[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!row.has(first + k)) continue;
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank)
        if (rank < ranks) load_piece<16>(y[rank] + offset + 16 * row.column(first + k), pieces[k][rank]);
      before[k] = residual[row.column(first + k)];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!row.has(first + k)) continue;
      uint32_t sum[4];
      sum_pieces<float>(pieces[k], ranks, sum);
      const float4 b = before[k];
      row.v[first + k] = {b.x + __uint_as_float(sum[0]), b.y + __uint_as_float(sum[1]), b.z + __uint_as_float(sum[2]),
                          b.w + __uint_as_float(sum[3])};
      residual[row.column(first + k)] = row.v[first + k];
    }
  }
}

// A block has one row at a time.
template <int kRanks>
__global__ __launch_bounds__(kThreads) void scatter_norm_kernel(const __grid_constant__ PeerView view,
                                                                const __grid_constant__ Call c) {
  __shared__ char* bases[2][kMostPeers];  // of y and out
  Row row(c.weight, c.y.cols);
  const PeerCall call(view);
  void* const mine[] = {c.y.data, c.out.data};
  if (call.exchange_addresses(mine, bases)) {
    for (int64_t i = blockIdx.x; i < c.shares.each + c.shares.common; i += gridDim.x) {
      const bool own = i < c.shares.each;
      const int64_t r = i + (own ? view.rank : view.size - 1) * c.shares.each;
      add_row<kRanks>(c, view.size, bases[0], r, row);
      const int64_t offset = r * c.out.row_stride * static_cast<int64_t>(sizeof(uint16_t));
      row.normalize(c.eps, [&](int four, const uint2& y) {
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
          if (rank < view.size && (own || rank == view.rank))
            reinterpret_cast<uint2*>(bases[1][rank] + offset)[four] = y;
      });
      __syncthreads();  // normalize() of the next row
    }
    call.meet();
  }
  call.end();
}

auto kernel_of(int ranks) {
  return ranks <= 2 ? scatter_norm_kernel<2> : ranks <= 4 ? scatter_norm_kernel<4> : scatter_norm_kernel<8>;
}

}  // namespace

bool scatter_norm_pays(const PeerView& view, const Tensor& residual) {
  return view.direct && view.size > 1 && in_fours(residual) && residual.contiguous() &&
         static_cast<size_t>(residual.rows * residual.cols) * sizeof(float) > view.one_shot_bytes;
}

cudaError_t scatter_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                              float eps, const Tensor& out, cudaStream_t stream, int most_blocks) {
  CHECK(in_fours(residual) && in_fours(y) && y.rows == residual.rows && y.cols == residual.cols, y.rows, "x", y.cols);
  CHECK(out.dtype == DType::kBF16 && out.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(out.data) % 8 == 0,
        "a norm as ", dtype_name(out.dtype), " in rows of ", out.row_stride);
  if (y.rows == 0) return cudaSuccess;
  const Call call{
      .residual = residual, .y = y, .out = out, .weight = weight, .eps = eps, .shares = RowShares(y.rows, view.size)};
  // Where ranks share a GPU, all their blocks must find a place.
  const int64_t most = view.one_gpu ? kMostWidePeerBlocks : most_blocks;
  return launch_peers(kernel_of(view.size),
                      {.blocks = static_cast<unsigned>(std::min(call.shares.each + call.shares.common, most)),
                       .threads = kThreads,
                       .stream = stream},
                      view, call);
}

cudaError_t load_scatter_norm() {
  for (const int ranks : {2, 4, 8}) {
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_of(ranks)); error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

}  // namespace perigee

#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_boxes.cuh"
#include "comm/cuda/peer_launch.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/norm_row.cuh"
#include "ops/cuda/reduce_norm.h"
#include "ops/cuda/scatter_norm.h"
#include "ops/cuda/spread_row.cuh"

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
  constexpr int kAtOnce = std::min(Row::kPieces, 32 / kRanks);  // pieces under way, of each rank
  auto* residual = reinterpret_cast<float4*>(c.residual.row<float>(r));
  const int64_t offset = r * c.y.row_stride * static_cast<int64_t>(sizeof(uint16_t));
#pragma unroll
  for (int first = 0; first < Row::kPieces; first += kAtOnce) {
    if (!row.has(first)) break;
    uint32_t terms[kAtOnce][kRanks][2] = {};
    float4 before[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!row.has(first + k)) continue;
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank)
        if (rank < ranks) load_piece<8>(y[rank] + offset + 8 * row.column(first + k), terms[k][rank]);
      before[k] = residual[row.column(first + k)];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!row.has(first + k)) continue;
      row.v[first + k] = add_terms(before[k], terms[k], ranks);
      residual[row.column(first + k)] = row.v[first + k];
    }
  }
}

// --- Few rows: pushed ---

constexpr int kCluster = 8;
using Spread = SpreadRow<kCluster>;
static_assert(Spread::kRounds == 1);

// A cluster has the rows of one place in every rank's share at a time. Everything goes into boxes of numbers: to each
// owner the terms of its rows, and from it the normed rows.
template <int kRanks>
__global__ __launch_bounds__(Spread::kThreads, 2) void push_norm_kernel(const __grid_constant__ PeerView view,
                                                                        const __grid_constant__ Call c) {
  Spread row(c.weight, c.y.cols);
  const PeerCall call(view);
  // In 32 bits: the boxes hold them.
  const int each = static_cast<int>(c.shares.each), places = each + static_cast<int>(c.shares.common);
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  const int four = row.column(0);
  const bool has = row.has(0);
  const auto row_of = [&](int place, int rank) { return place + (place < each ? rank : view.size - 1) * each; };
  const auto term_at = [&](int place) { return uint32_t{8} * (place * row.fours + four); };
  const auto normed_at = [&](int place) { return term_at(places + place); };

  for (int place = first; place < places && has; place += step) {
    uint32_t terms[kRanks][2];  // for the i-th other rank
    for_others<kRanks>(view, [&](int i, int other) {
      load_piece<8>(reinterpret_cast<const uint2*>(c.y.row<uint16_t>(row_of(place, other))) + four, terms[i]);
    });
    for_others<kRanks>(
        view, [&](int i, int other) { post_numbers(call.number_box(other, view.rank) + term_at(place), terms[i]); });
  }
  for (int place = first; place < places; place += step) {
    const int r = row_of(place, view.rank);
    float4 v[1] = {};
    if (has) {
      float4& residual = reinterpret_cast<float4*>(c.residual.row<float>(r))[four];
      const float4 before = residual;
      uint32_t own[2], terms[kRanks][2] = {};
      load_piece<8>(reinterpret_cast<const uint2*>(c.y.row<uint16_t>(r)) + four, own);
      put_own(own, view.rank, terms);
      take_numbers(call, term_at(place), terms);
      v[0] = add_terms(before, terms, view.size);
      residual = v[0];
    }
    row.normalize(v, c.eps, [&](int, const uint2& y) {
      const uint32_t normed[2] = {y.x, y.y};
      if (place < each) post_numbers_to_all<kRanks>(call, normed_at(place), normed);
      reinterpret_cast<uint2*>(c.out.row<uint16_t>(r))[four] = y;
    });
    if (place + step < places) row.go_on();
  }
  for (int place = first; place < each && has; place += step) {
    uint32_t normed[kRanks][2];
    take_numbers(call, normed_at(place), normed);
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < view.size && r != view.rank)
        reinterpret_cast<uint2*>(c.out.row<uint16_t>(row_of(place, r)))[four] = {normed[r][0], normed[r][1]};
  }
  call.end();
}

// --- Many rows: pulled ---

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
auto push_kernel_of(int ranks) {
  return ranks <= 2 ? push_norm_kernel<2> : ranks <= 4 ? push_norm_kernel<4> : push_norm_kernel<8>;
}

// All clusters wait for those of other ranks, so all of them must find a place at once. A GPU with 132 multiprocessors
// has room for 32.
constexpr int64_t kMostClusters = 16, kMostClustersOfOneGpu = 4;

}  // namespace

bool scatter_norm_pays(const PeerView& view, const Tensor& residual) {
  return view.direct && view.size > 1 && in_fours(residual) && residual.contiguous() &&
         static_cast<size_t>(residual.rows * residual.cols) * sizeof(uint16_t) > view.one_shot_bytes;
}

bool scatter_norm_pushes(const PeerView& view, const Tensor& residual) {
  const RowShares shares(residual.rows, view.size);
  const auto columns = static_cast<size_t>((shares.each + shares.common) * residual.cols);
  return has_clusters() && columns * 2 * sizeof(uint16_t) <= number_box_bytes(view.size);
}

cudaError_t scatter_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                              float eps, const Tensor& out, cudaStream_t stream, ScatterForm form, int most_blocks) {
  CHECK(in_fours(residual) && in_fours(y) && y.rows == residual.rows && y.cols == residual.cols, y.rows, "x", y.cols);
  CHECK(y.dtype == DType::kF16 && out.dtype == DType::kBF16 && out.row_stride % 4 == 0 &&
            reinterpret_cast<uintptr_t>(out.data) % 8 == 0,
        "a norm of ", dtype_name(y.dtype), " as ", dtype_name(out.dtype), " in rows of ", out.row_stride);
  if (y.rows == 0) return cudaSuccess;
  const Call call{
      .residual = residual, .y = y, .out = out, .weight = weight, .eps = eps, .shares = RowShares(y.rows, view.size)};
  const bool fits = scatter_norm_pushes(view, residual);
  CHECK(form != ScatterForm::kPush || fits, y.rows, " rows of ", y.cols, " columns to push");
  if (form == ScatterForm::kPush || (form == ScatterForm::kChosen && fits)) {
    const int64_t clusters =
        std::min(call.shares.each + call.shares.common, view.one_gpu ? kMostClustersOfOneGpu : kMostClusters);
    return launch_peers(push_kernel_of(view.size),
                        {.blocks = static_cast<unsigned>(kCluster * clusters),
                         .threads = Spread::kThreads,
                         .cluster = kCluster,
                         .stream = stream},
                        view, call);
  }
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
    if (!has_clusters()) continue;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, push_kernel_of(ranks)); error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

}  // namespace perigee

#include <algorithm>

#include "base/check.h"
#include "comm/cuda/peer_boxes.cuh"
#include "comm/cuda/peer_launch.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/reduce_norm.h"
#include "ops/cuda/spread_row.cuh"

namespace perigee {
namespace {

struct Rows {
  Tensor residual, y, out;
  const float* weight;
  float eps;
};

// A cluster has one row.
template <int kCluster, int kRanks, Box kBox>
__global__ __launch_bounds__(SpreadRow<kCluster>::kThreads) void reduce_norm_kernel(
    const __grid_constant__ PeerView view, const __grid_constant__ Rows rows) {
  using Row = SpreadRow<kCluster>;
  Row row(rows.weight, rows.y.cols);
  const PeerCall call(view);
  const int r = blockIdx.x / kCluster;
  const size_t first = static_cast<size_t>(r) * row.fours;  // piece
  const auto* y = reinterpret_cast<const uint2*>(rows.y.row<uint16_t>(r));
  auto* residual = reinterpret_cast<float4*>(rows.residual.row<float>(r));
  uint32_t own[Row::kRounds][2];
#pragma unroll
  for (int i = 0; i < Row::kRounds; ++i) {
    if (!row.has(i)) continue;
    load_piece<8>(y + row.column(i), own[i]);
    post_to_all<kBox, kRanks>(call, first + row.column(i), own[i]);
  }
  float4 v[Row::kRounds];
#pragma unroll
  for (int i = 0; i < Row::kRounds; ++i) {
    if (!row.has(i)) continue;
    const float4 before = residual[row.column(i)];
    uint32_t terms[kRanks][2] = {};
    put_own(own[i], view.rank, terms);
    take_of_all<kBox>(call, first + row.column(i), terms);
    v[i] = add_terms(before, terms, view.size);
    residual[row.column(i)] = v[i];
  }
  auto* out = reinterpret_cast<uint2*>(rows.out.row<uint16_t>(r));
  row.normalize(v, rows.eps, [&](int four, const uint2& y) { out[four] = y; });
  call.end();
}

constexpr int kCluster = 8;

template <int kBlocks, Box kBox>
auto norm_kernel_of(int ranks) {
  return ranks <= 2   ? reduce_norm_kernel<kBlocks, 2, kBox>
         : ranks <= 4 ? reduce_norm_kernel<kBlocks, 4, kBox>
                      : reduce_norm_kernel<kBlocks, 8, kBox>;
}
template <int kBlocks>
auto norm_kernel(int ranks, Box box) {
  return box == Box::kNumbers ? norm_kernel_of<kBlocks, Box::kNumbers>(ranks)
                              : norm_kernel_of<kBlocks, Box::kFlagged>(ranks);
}

// The blocks of 64 rows are too many to be resident at once.
int64_t most_rows(const PeerView& view) {
  return view.most_blocks() / (2 * kCluster);
}

// Rows that clusters of twice as many blocks have: each block sends half as much, where the GPU has room for them.
constexpr int kWideCluster = 2 * kCluster;
constexpr int64_t kMostWideRows = 4;
bool has_wide_clusters() {
  return device_limits().capability / 10 == 9;  // a size that is not portable
}

}  // namespace

bool has_clusters() {
  return device_limits().capability >= 90;
}

bool reduce_norm_pays(const PeerView& view, const Tensor& residual, const Tensor& y, const Tensor& out) {
  const size_t bytes = static_cast<size_t>(y.rows * y.cols) * sizeof(uint16_t);
  return in_fours(residual) && in_fours(y) && y.dtype == DType::kF16 && out.dtype == DType::kBF16 &&
         out.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(out.data) % 8 == 0 && y.rows <= most_rows(view) &&
         bytes <= std::min(view.one_shot_bytes, number_box_bytes(view.size));
}

cudaError_t reduce_norm_rows(const PeerView& view, const Tensor& residual, const Tensor& y, const float* weight,
                             float eps, const Tensor& out, cudaStream_t stream, bool clusters) {
  CHECK(reduce_norm_pays(view, residual, y, out), y.rows, " rows of ", y.cols, " columns");
  if (y.rows == 0) return cudaSuccess;
  const Rows rows{.residual = residual, .y = y, .out = out, .weight = weight, .eps = eps};
  const auto count = static_cast<unsigned>(y.rows);
  const size_t bytes = static_cast<size_t>(y.rows * y.cols) * sizeof(uint16_t);
  const Box box = bytes <= view.flagged_bytes ? Box::kFlagged : Box::kNumbers;
  if (clusters && y.rows <= kMostWideRows && has_wide_clusters())
    return launch_peers(norm_kernel<kWideCluster>(view.size, box),
                        {.blocks = kWideCluster * count,
                         .threads = SpreadRow<kWideCluster>::kThreads,
                         .cluster = kWideCluster,
                         .stream = stream},
                        view, rows);
  if (!clusters)
    return launch_peers(norm_kernel<1>(view.size, box),
                        {.blocks = count, .threads = SpreadRow<1>::kThreads, .stream = stream}, view, rows);
  return launch_peers(
      norm_kernel<kCluster>(view.size, box),
      {.blocks = kCluster * count, .threads = SpreadRow<kCluster>::kThreads, .cluster = kCluster, .stream = stream},
      view, rows);
}

cudaError_t load_reduce_norm(bool clusters) {
  for (const int ranks : {2, 4, 8})
    for (const Box box : {Box::kFlagged, Box::kNumbers}) {
      cudaFuncAttributes attributes;
      const cudaError_t error =
          cudaFuncGetAttributes(&attributes, clusters ? norm_kernel<kCluster>(ranks, box) : norm_kernel<1>(ranks, box));
      if (error != cudaSuccess) return error;
      if (!clusters || !has_wide_clusters()) continue;
      if (const cudaError_t wide = cudaFuncSetAttribute(norm_kernel<kWideCluster>(ranks, box),
                                                        cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
          wide != cudaSuccess)
        return wide;
    }
  return cudaSuccess;
}

}  // namespace perigee

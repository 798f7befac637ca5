// Pairs sorted by expert.
#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/moe/route.h"

namespace perigee {
namespace {

constexpr int kSortThreads = 1024;

constexpr int kSortPairs = 4096;  // of a block

// visit(pair, expert) of this thread's pairs of the block; several loads under way at once.
template <typename Visit>
__device__ __forceinline__ void for_each_pair(const int32_t* ids, int num_pairs, const Visit& visit) {
  constexpr int kEach = kSortPairs / kSortThreads;
  const int first = static_cast<int>(blockIdx.x) * kSortPairs + static_cast<int>(threadIdx.x);
  int experts[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    experts[i] = first + i * kSortThreads < num_pairs ? ids[first + i * kSortThreads] : -1;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (experts[i] >= 0) visit(first + i * kSortThreads, experts[i]);
}

// counts[block][expert] of each block's pairs.
__global__ __launch_bounds__(kSortThreads) void count_kernel(const int32_t* ids, int num_pairs, int experts,
                                                             int32_t* counts) {
  __shared__ int count[kMaxRoutedExperts];
  dependency_wait();
  dependency_trigger();
  const int e = threadIdx.x;
  count[e] = 0;
  __syncthreads();
  for_each_pair(ids, num_pairs, [&](int, int expert) { atomicAdd(&count[expert], 1); });
  __syncthreads();
  if (e < experts) counts[blockIdx.x * experts + e] = count[e];
}

// Inclusive prefix sums of two numbers over the block.
__device__ int2 prefix_sums(int2 v) {
  __shared__ int2 warps[kSortThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [lane](int2 x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int a = __shfl_up_sync(~0u, x.x, step), b = __shfl_up_sync(~0u, x.y, step);
      if (lane >= step) x.x += a, x.y += b;
    }
    return x;
  };
  v = scan(v);
  if (lane == 31) warps[warp] = v;
  __syncthreads();
  if (warp == 0) warps[lane] = scan(warps[lane]);
  __syncthreads();
  if (warp > 0) v.x += warps[warp - 1].x, v.y += warps[warp - 1].y;
  return v;
}

// Offsets of each expert, from the first block the items, then the places of the block's pairs. A single block counts
// by itself, of several each adds up all counts.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const int32_t* ids, int num_pairs, int experts,
                                                            int item_rows, const int32_t* counts, int32_t* pairs,
                                                            MoeItem* items, int32_t* num_items) {
  static_assert(kSortThreads == kMaxRoutedExperts);
  __shared__ int place[kSortThreads];
  dependency_wait();
  dependency_trigger();
  const int e = threadIdx.x;
  int count = 0, before = 0;
  if (counts == nullptr) {
    place[e] = 0;
    __syncthreads();
    for_each_pair(ids, num_pairs, [&](int, int expert) { atomicAdd(&place[expert], 1); });
    __syncthreads();
    count = place[e];
  } else if (e < experts) {
    for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
      if (block == static_cast<int>(blockIdx.x)) before = count;
      count += counts[block * experts + e];
    }
  }
  const int my_items = (count + item_rows - 1) / item_rows;
  const int2 upto = prefix_sums({count, my_items});
  const int begin = upto.x - count, first_item = upto.y - my_items;
  if (blockIdx.x == 0) {
    if (e == kSortThreads - 1) *num_items = upto.y;
    for (int i = 0; i < my_items; ++i)
      items[first_item + i] = {e, begin + i * item_rows, min(item_rows, count - i * item_rows)};
  }
  place[e] = begin + before;
  __syncthreads();
  for_each_pair(ids, num_pairs, [&](int pair, int expert) { pairs[atomicAdd(&place[expert], 1)] = pair; });
}

}  // namespace

int64_t moe_max_items(int64_t num_pairs, int64_t num_experts, int64_t item_rows) {
  return std::min(num_pairs, num_experts + num_pairs / item_rows);
}

int64_t sort_counts(int64_t num_pairs, int64_t num_experts) {
  return num_pairs <= kSortPairs ? 0 : (num_pairs + kSortPairs - 1) / kSortPairs * num_experts;
}

cudaError_t sort_pairs(const int32_t* ids, int64_t num_pairs, int64_t num_experts, int item_rows, int32_t* counts,
                       const GemmCall& lists, cudaStream_t stream) {
  const auto pairs = static_cast<int>(num_pairs), experts = static_cast<int>(num_experts);
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((pairs + kSortPairs - 1) / kSortPairs)),
                          .block = dim3(kSortThreads),
                          .stream = stream};
  const bool many = shape.grid.x > 1;
  if (many) {
    const cudaError_t error = launch(count_kernel, shape, ids, pairs, experts, counts);
    if (error != cudaSuccess) return error;
  }
  return launch(sort_kernel, shape, ids, pairs, experts, item_rows,
                static_cast<const int32_t*>(many ? counts : nullptr), const_cast<int32_t*>(lists.pairs),
                const_cast<MoeItem*>(lists.items), const_cast<int32_t*>(lists.num_items));
}

}  // namespace perigee

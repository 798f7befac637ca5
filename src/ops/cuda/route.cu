#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/route.h"

namespace perigee {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;

// scores[token][expert] = x . W[expert]; a block does one expert and kTokens tokens, its warps each their columns.
template <int kTokens>
__global__ __launch_bounds__(kScoreThreads) void score_kernel(Tensor x, const float* weight, int64_t experts,
                                                              float* scores) {
  __shared__ float parts[kScoreWarps][kTokens];
  const int64_t expert = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * kTokens;
  const float* w = weight + expert * x.cols;
  dependency_wait();
  dependency_trigger();
  float sum[kTokens] = {};
  for (int64_t c = 4 * threadIdx.x; c < x.cols; c += 4 * kScoreThreads) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(w + c));
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= x.rows) continue;
      const uint2 pairs = *reinterpret_cast<const uint2*>(x.row<uint16_t>(first + i) + c);
      const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.x));
      const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.y));
      sum[i] += low.x * v.x + low.y * v.y + high.x * v.z + high.y * v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    for (int offset = 16; offset > 0; offset /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][i] = sum[i];
  }
  __syncthreads();
  if (const int i = static_cast<int>(threadIdx.x); i < kTokens && first + i < x.rows) {
    float total = 0;
    for (int warp = 0; warp < kScoreWarps; ++warp) total += parts[warp][i];
    scores[(first + i) * experts + expert] = total;
  }
}

__device__ float warp_max(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
  return v;
}
__device__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// Index of the largest of x[0 ... count), the lowest of equals; -1 when all are -infinity or NaN.
__device__ int warp_arg_max(const float* x, int count) {
  float best = -INFINITY;
  int index = -1;
  for (int i = threadIdx.x % 32; i < count; i += 32)
    if (x[i] > best) {
      best = x[i];
      index = i;
    }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, best, offset);
    const int other_index = __shfl_xor_sync(~0u, index, offset);
    const bool better = other > best || (other == best && other_index >= 0 && (index < 0 || other_index < index));
    best = better ? other : best;
    index = better ? other_index : index;
  }
  return index;
}

struct SelectCall {
  const float* bias;
  int experts, top_k, num_groups, top_groups;
  bool softmax, normalize;
  float scale;
};

__device__ void keep_best_groups(const SelectCall& c, float* choice, float* totals) {
  const int lane = threadIdx.x % 32, size = c.experts / c.num_groups;
  for (int group = lane; group < c.num_groups; group += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = group * size; e < (group + 1) * size; ++e) {
      second = fmaxf(second, fminf(first, choice[e]));
      first = fmaxf(first, choice[e]);
    }
    totals[group] = first + second;
  }
  __syncwarp();
  unsigned kept[2] = {0, 0};  // at most 64 groups
  for (int i = 0; i < c.top_groups; ++i) {
    const int best = warp_arg_max(totals, c.num_groups);
    __syncwarp();
    if (best < 0) break;
    kept[best / 32] |= 1u << (best % 32);
    if (lane == 0) totals[best] = -INFINITY;
    __syncwarp();
  }
  for (int e = lane; e < c.experts; e += 32)
    if ((kept[e / size / 32] >> (e / size % 32) & 1u) == 0) choice[e] = -INFINITY;
  __syncwarp();
}

// One warp a token: scores in place of logits, then the k best.
__global__ void select_kernel(const float* logits, SelectCall c, int32_t* ids, float* weights) {
  __shared__ float scores[kMaxRoutedExperts], choice[kMaxRoutedExperts], totals[64];
  const int lane = threadIdx.x;
  const int64_t token = blockIdx.x;
  dependency_wait();
  dependency_trigger();
  float largest = -INFINITY, sum = 0;
  for (int e = lane; e < c.experts; e += 32) {
    const float z = logits[token * c.experts + e];
    scores[e] = c.softmax ? z : 1.0f / (1.0f + expf(-z));
    largest = fmaxf(largest, z);
  }
  if (c.softmax) {
    largest = warp_max(largest);
    for (int e = lane; e < c.experts; e += 32) sum += scores[e] = expf(scores[e] - largest);
    sum = warp_sum(sum);
    for (int e = lane; e < c.experts; e += 32) scores[e] /= sum;
  }
  for (int e = lane; e < c.experts; e += 32) choice[e] = scores[e] + (c.bias != nullptr ? c.bias[e] : 0.0f);
  __syncwarp();
  if (c.num_groups > 1) keep_best_groups(c, choice, totals);
  float total = 0;
  for (int k = 0; k < c.top_k; ++k) {
    // Only a row of NaN has no largest expert; its weights are NaN and the sampler's finite check reports it.
    const int best = max(warp_arg_max(choice, c.experts), 0);
    __syncwarp();
    total += scores[best];
    if (lane == 0) {
      ids[token * c.top_k + k] = best;
      choice[best] = -INFINITY;
    }
    __syncwarp();
  }
  const float divisor = c.normalize ? total + 1e-20f : 1.0f;
  for (int k = lane; k < c.top_k; k += 32)
    weights[token * c.top_k + k] = scores[ids[token * c.top_k + k]] / divisor * c.scale;
}

constexpr int kSortThreads = 1024;

// One block: counts, offsets and items of each expert, then the pairs' places.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const int32_t* ids, int num_pairs, int experts,
                                                            int item_rows, int32_t* pairs, MoeItem* items,
                                                            int32_t* num_items) {
  __shared__ int count[kMaxRoutedExperts], place[kMaxRoutedExperts], item_at[kMaxRoutedExperts];
  dependency_wait();
  dependency_trigger();
  const int e = threadIdx.x;
  count[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_pairs; i += blockDim.x) atomicAdd(&count[ids[i]], 1);
  __syncthreads();
  place[e] = count[e];
  item_at[e] = (count[e] + item_rows - 1) / item_rows;
  __syncthreads();
  for (int step = 1; step < kSortThreads; step *= 2) {  // inclusive prefix sums
    const int a = e >= step ? place[e - step] : 0, b = e >= step ? item_at[e - step] : 0;
    __syncthreads();
    place[e] += a;
    item_at[e] += b;
    __syncthreads();
  }
  if (e == kSortThreads - 1) *num_items = item_at[e];
  const int begin = place[e] - count[e], my_items = (count[e] + item_rows - 1) / item_rows;
  for (int i = 0; i < my_items; ++i)
    items[item_at[e] - my_items + i] = {e, begin + i * item_rows, min(item_rows, count[e] - i * item_rows)};
  __syncthreads();
  place[e] = begin;
  __syncthreads();
  for (int i = threadIdx.x; i < num_pairs; i += blockDim.x) pairs[atomicAdd(&place[ids[i]], 1)] = i;
}

__global__ void combine_kernel(const float* parts, const float* weights, int top_k, Tensor addend, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c >= y.cols) return;
  float sum = 0;
  for (int k = 0; k < top_k; ++k) {
    const int64_t pair = static_cast<int64_t>(blockIdx.y) * top_k + k;
    sum += weights[pair] * parts[pair * y.cols + c];
  }
  y.row<float>(blockIdx.y)[c] = addend.data == nullptr ? sum : sum + addend.row<float>(blockIdx.y)[c];
}

}  // namespace

cudaError_t route_rows(const Tensor& x, const RouterWeight& router, float* scores, const Routing& routing,
                       cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(router.num_experts);
  // One token more does not change the order in which a token's own products are added.
  const auto score = x.rows <= 2 ? score_kernel<2> : score_kernel<16>;
  const int tokens = x.rows <= 2 ? 2 : 16;
  const dim3 grid(experts, static_cast<unsigned>((x.rows + tokens - 1) / tokens));
  const cudaError_t error = launch(score, {.grid = grid, .block = dim3(kScoreThreads), .stream = stream}, x,
                                   router.weight.data(), router.num_experts, scores);
  if (error != cudaSuccess) return error;
  const SelectCall call{.bias = router.bias.data(),
                        .experts = static_cast<int>(router.num_experts),
                        .top_k = router.top_k,
                        .num_groups = router.num_groups,
                        .top_groups = router.top_groups,
                        .softmax = router.score == RouterScore::kSoftmax,
                        .normalize = router.normalize,
                        .scale = router.scale};
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(x.rows)), .block = dim3(32), .stream = stream};
  return launch(select_kernel, shape, static_cast<const float*>(scores), call, routing.ids, routing.weights);
}

int64_t moe_max_items(int64_t num_pairs, int64_t num_experts, int64_t item_rows) {
  return std::min(num_pairs, num_experts + num_pairs / item_rows);
}

cudaError_t sort_pairs(const int32_t* ids, int64_t num_pairs, int64_t num_experts, int item_rows, const GemmCall& lists,
                       cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(1), .block = dim3(kSortThreads), .stream = stream};
  return launch(sort_kernel, shape, ids, static_cast<int>(num_pairs), static_cast<int>(num_experts), item_rows,
                const_cast<int32_t*>(lists.pairs), const_cast<MoeItem*>(lists.items),
                const_cast<int32_t*>(lists.num_items));
}

cudaError_t combine_pairs(const float* parts, const Routing& routing, const Tensor* addend, const Tensor& y,
                          cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((y.cols + 255) / 256), static_cast<unsigned>(y.rows)),
                          .block = dim3(256),
                          .stream = stream};
  return launch(combine_kernel, shape, parts, static_cast<const float*>(routing.weights), routing.top_k,
                addend == nullptr ? Tensor() : *addend, y);
}

}  // namespace perigee

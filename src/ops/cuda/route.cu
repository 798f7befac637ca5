#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/route.h"

namespace perigee {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;

// scores[token][expert] = x . W[expert]; a block does kExperts experts and kTokens tokens, its threads each their
// columns, in an order that does not depend on how many of either.
template <int kTokens, int kExperts>
__global__ __launch_bounds__(kScoreThreads) void score_kernel(Tensor x, const float* weight, int experts,
                                                              float* scores) {
  __shared__ float parts[kScoreWarps][kTokens * kExperts];
  const int first_expert = blockIdx.x * kExperts;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokens;
  dependency_wait();
  dependency_trigger();
  float sum[kTokens][kExperts] = {};
  for (int64_t c = 4 * threadIdx.x; c < x.cols; c += 4 * kScoreThreads) {
    float4 w[kExperts];
#pragma unroll
    for (int e = 0; e < kExperts; ++e)
      w[e] = __ldg(reinterpret_cast<const float4*>(weight + min(first_expert + e, experts - 1) * x.cols + c));
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= x.rows) continue;
      const uint2 pairs = *reinterpret_cast<const uint2*>(x.row<uint16_t>(first + i) + c);
      const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.x));
      const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.y));
#pragma unroll
      for (int e = 0; e < kExperts; ++e)
        sum[i][e] += low.x * w[e].x + low.y * w[e].y + high.x * w[e].z + high.y * w[e].w;
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      for (int offset = 16; offset > 0; offset /= 2) sum[i][e] += __shfl_xor_sync(~0u, sum[i][e], offset);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][i * kExperts + e] = sum[i][e];
    }
  __syncthreads();
  const int i = threadIdx.x / kExperts, e = threadIdx.x % kExperts;
  if (i >= kTokens || first + i >= x.rows || first_expert + e >= experts) return;
  float total = 0;
  for (int warp = 0; warp < kScoreWarps; ++warp) total += parts[warp][i * kExperts + e];
  scores[(first + i) * experts + first_expert + e] = total;
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
  bool softmax, normalize, bias_in_weights;
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
    total += (c.bias_in_weights ? choice : scores)[best];
    __syncwarp();
    if (lane == 0) {
      ids[token * c.top_k + k] = best;
      if (c.bias_in_weights) scores[best] = choice[best];
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

__global__ void combine_kernel(const float* parts, const float* weights, int top_k, Tensor addend, bool accumulate,
                               Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (c >= y.cols) return;
  float sum = 0;
  for (int k = 0; k < top_k; ++k) {
    const int64_t pair = static_cast<int64_t>(blockIdx.y) * top_k + k;
    sum += weights[pair] * parts[pair * y.cols + c];
  }
  if (addend.data != nullptr) sum += addend.row<float>(blockIdx.y)[c];
  float& to = y.row<float>(blockIdx.y)[c];
  to = accumulate ? to + sum : sum;
}

}  // namespace

cudaError_t route_rows(const Tensor& x, const RouterWeight& router, float* scores, const Routing& routing,
                       cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(router.num_experts);
  const bool few = x.rows <= 4;
  const auto score = few ? score_kernel<2, 1> : score_kernel<8, 8>;
  const unsigned tokens = few ? 2 : 8, block_experts = few ? 1 : 8;
  const dim3 grid((experts + block_experts - 1) / block_experts, (static_cast<unsigned>(x.rows) + tokens - 1) / tokens);
  const cudaError_t error = launch(score, {.grid = grid, .block = dim3(kScoreThreads), .stream = stream}, x,
                                   router.weight.data(), static_cast<int>(experts), scores);
  if (error != cudaSuccess) return error;
  const SelectCall call{.bias = router.bias.data(),
                        .experts = static_cast<int>(router.num_experts),
                        .top_k = router.top_k,
                        .num_groups = router.num_groups,
                        .top_groups = router.top_groups,
                        .softmax = router.score == RouterScore::kSoftmax,
                        .normalize = router.normalize,
                        .bias_in_weights = router.bias_in_weights,
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

cudaError_t combine_pairs(const float* parts, const Routing& routing, const CombineAlso& also, const Tensor& y,
                          cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>((y.cols + 255) / 256), static_cast<unsigned>(y.rows)),
                          .block = dim3(256),
                          .stream = stream};
  return launch(combine_kernel, shape, parts, static_cast<const float*>(routing.weights), routing.top_k,
                also.addend == nullptr ? Tensor() : *also.addend, also.accumulate, y);
}

}  // namespace perigee

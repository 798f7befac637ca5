#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/route.h"

namespace perigee {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int64_t kFewTokens = 4;  // so few that W is read at memory speed by a block for each expert

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

// --- Scores of many tokens: bf16 products with W as the sum of three bf16 terms, which together hold all its bits. ---

constexpr int kTileTokens = 64, kTileExperts = 64, kTileDepth = 64;
constexpr int kPlaneBytes = kTileExperts * kTileDepth * 2, kScoreStage = 4 * kPlaneBytes;  // x, then W's terms

// Chunk of 16 bytes `chunk` of a row of 64 bf16.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// 16 columns of one row of x and of W, on their way to shared memory.
struct ScoreColumns {
  uint4 x[2];
  float4 w[4];

  // `x` and `w` are the thread's rows, null beyond the last.
  __device__ void load(const uint16_t* x_row, const float* w_row, int column, int end) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      x[i] = x_row != nullptr && column + 8 * i < end ? reinterpret_cast<const uint4*>(x_row + column)[i]
                                                      : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = w_row != nullptr && column + 4 * i < end ? __ldg(reinterpret_cast<const float4*>(w_row + column) + i)
                                                      : float4{0, 0, 0, 0};
  }
  __device__ void store(uint8_t* stage, int row, int chunk) const {
    *reinterpret_cast<uint4*>(stage + place(row, chunk)) = x[0];
    *reinterpret_cast<uint4*>(stage + place(row, chunk + 1)) = x[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 a = w[2 * half], b = w[2 * half + 1];
      float2 rest[4] = {{a.x, a.y}, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}};
#pragma unroll
      for (int term = 0; term < 3; ++term) {
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat162 rounded = __floats2bfloat162_rn(rest[i].x, rest[i].y);
          const float2 back = __bfloat1622float2(rounded);
          rest[i].x -= back.x, rest[i].y -= back.y;
          out[i] = *reinterpret_cast<const uint32_t*>(&rounded);
        }
        *reinterpret_cast<uint4*>(stage + (term + 1) * kPlaneBytes + place(row, chunk + half)) =
            make_uint4(out[0], out[1], out[2], out[3]);
      }
    }
  }
};

// sum += 64 columns of a warp's 16 tokens by 32 experts. The products of a stage are added on their own: the matrix
// unit's own sums cut bits off, and over thousands of columns that would be seen.
__device__ void add_scores(const uint8_t* stage, int token, int expert, float (&sum)[4][4]) {
  const int lane = threadIdx.x % 32;
  float part[4][4] = {};
#pragma unroll
  for (int k = 0; k < kTileDepth / 16; ++k) {
    uint32_t a[4];
    load_matrix_x4(a, shared_address(stage + place(token + lane % 16, 2 * k + lane / 16)));
#pragma unroll
    for (int term = 3; term > 0; --term) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[4];
        const int row = expert + pair * 16 + lane / 16 * 8 + lane % 8;
        load_matrix_x4(b, shared_address(stage + term * kPlaneBytes + place(row, 2 * k + lane / 8 % 2)));
        mma_16x8x16(Bf16(), part[2 * pair], a, b[0], b[1]);
        mma_16x8x16(Bf16(), part[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] += part[n][i];
}

// scores[split][token][expert]: block (tokens, experts, split), each split a run of `split_stages` stages.
__global__ __launch_bounds__(kScoreThreads, 2) void score_tile_kernel(Tensor x, const float* weight, int experts,
                                                                      int split_stages, float* scores) {
  extern __shared__ __align__(128) uint8_t shared[];
  dependency_wait();
  dependency_trigger();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = threadIdx.x / 4, chunk = threadIdx.x % 4 * 2;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTileTokens;
  const int first_expert = static_cast<int>(blockIdx.y) * kTileExperts;
  const auto columns = static_cast<int>(x.cols);
  const uint16_t* x_row = first_token + row < x.rows ? x.row<const uint16_t>(first_token + row) : nullptr;
  const float* w_row = first_expert + row < experts ? weight + (first_expert + row) * x.cols : nullptr;
  const int begin = static_cast<int>(blockIdx.z) * split_stages * kTileDepth;
  const int end = min(columns, begin + split_stages * kTileDepth);
  ScoreColumns next;
  next.load(x_row, w_row, begin + chunk * 8, end);
  next.store(shared, row, chunk);
  __syncthreads();
  float sum[4][4] = {};
  for (int column = begin, turn = 0; column < end; column += kTileDepth, turn ^= 1) {
    const bool more = column + kTileDepth < end;
    if (more) next.load(x_row, w_row, column + kTileDepth + chunk * 8, end);
    add_scores(shared + turn * kScoreStage, warp % 4 * 16, warp / 4 * 32, sum);
    if (more) next.store(shared + (turn ^ 1) * kScoreStage, row, chunk);
    __syncthreads();
  }
  float* to = scores + blockIdx.z * x.rows * experts;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t token = first_token + warp % 4 * 16 + lane / 4 + i / 2 * 8;
      const int expert = first_expert + warp / 4 * 32 + n * 8 + lane % 4 * 2 + i % 2;
      if (token < x.rows && expert < experts) to[token * experts + expert] = sum[n][i];
    }
}

// --- Choice. ---

__device__ float warp_max(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
  return v;
}
__device__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// A number whose order as an integer is that of the floats; 0: -infinity or NaN.
__device__ __forceinline__ uint32_t order_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);  // one zero
  return v > -INFINITY ? bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u) : 0;
}

// A lane's largest of x[lane], x[lane + 32], ..., the first of equals.
struct Best {
  uint32_t order = 0;
  int index = 0;
  __device__ void find(const float* x, int count) {
    order = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const uint32_t other = order_of(x[i]);
      if (other > order) order = other, index = i;
    }
  }
};

// The warp takes the largest of x[0 ... count), the lowest of equals, out of x and returns its index; -1 when all are
// -infinity or NaN. Only the lane that had it looks through its numbers again.
__device__ int take_largest(float* x, int count, Best& best) {
  const uint32_t order = __reduce_max_sync(~0u, best.order);
  if (order == 0) return -1;
  const bool has = best.order == order;
  const int index = __reduce_min_sync(~0u, has ? best.index : INT32_MAX);
  if (has && best.index == index) {
    x[index] = -INFINITY;
    best.find(x, count);
  }
  return index;
}

struct SelectCall {
  const float* bias;
  int experts, top_k, num_groups, top_groups;
  bool softmax, normalize, bias_in_weights;
  float scale;
  int splits;  // of the logits, to be added
  int64_t split_stride;
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
  Best best;
  best.find(totals, c.num_groups);
  for (int i = 0; i < c.top_groups; ++i) {
    const int group = take_largest(totals, c.num_groups, best);
    if (group < 0) break;
    kept[group / 32] |= 1u << (group % 32);
  }
  for (int e = lane; e < c.experts; e += 32)
    if ((kept[e / size / 32] >> (e / size % 32) & 1u) == 0) choice[e] = -INFINITY;
  __syncwarp();
}

constexpr int kMaxChoices = 64;

// One warp a token: scores in place of logits, then the k best.
__global__ void select_kernel(const float* logits, SelectCall c, int32_t* ids, float* weights) {
  __shared__ float scores[kMaxRoutedExperts], choice[kMaxRoutedExperts], totals[64], chosen[kMaxChoices];
  const int lane = threadIdx.x;
  const int64_t token = blockIdx.x;
  dependency_wait();
  dependency_trigger();
  float largest = -INFINITY, sum = 0;
  for (int e = lane; e < c.experts; e += 32) {
    float z = 0;
    for (int i = 0; i < c.splits; ++i) z += logits[i * c.split_stride + token * c.experts + e];
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
  Best best;
  best.find(choice, c.experts);
  float total = 0;
  for (int k = 0; k < c.top_k; ++k) {
    // Only a row of NaN has no largest expert; its weights are NaN and the sampler's finite check reports it.
    const int e = max(take_largest(choice, c.experts, best), 0);
    const float weight = scores[e] + (c.bias_in_weights && c.bias != nullptr ? c.bias[e] : 0.0f);
    total += weight;
    if (lane == 0) ids[token * c.top_k + k] = e, chosen[k] = weight;
  }
  __syncwarp();
  const float divisor = c.normalize ? total + 1e-20f : 1.0f;
  for (int k = lane; k < c.top_k; k += 32) weights[token * c.top_k + k] = chosen[k] / divisor * c.scale;
}

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

// Inclusive prefix sums over the block.
__device__ void prefix_sums(int (&a)[kSortThreads], int (&b)[kSortThreads]) {
  const int e = threadIdx.x;
  for (int step = 1; step < kSortThreads; step *= 2) {
    __syncthreads();
    const int from_a = e >= step ? a[e - step] : 0, from_b = e >= step ? b[e - step] : 0;
    __syncthreads();
    a[e] += from_a;
    b[e] += from_b;
  }
  __syncthreads();
}

// Offsets of each expert, from the first block the items, then the places of the block's pairs. A single block counts
// by itself, of several each adds up all counts.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const int32_t* ids, int num_pairs, int experts,
                                                            int item_rows, const int32_t* counts, int32_t* pairs,
                                                            MoeItem* items, int32_t* num_items) {
  static_assert(kSortThreads == kMaxRoutedExperts);
  __shared__ int place[kSortThreads], item_at[kSortThreads];
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
  place[e] = count;
  item_at[e] = my_items;
  prefix_sums(place, item_at);
  const int begin = place[e] - count, first_item = item_at[e] - my_items;
  if (blockIdx.x == 0) {
    if (e == kSortThreads - 1) *num_items = item_at[e];
    for (int i = 0; i < my_items; ++i)
      items[first_item + i] = {e, begin + i * item_rows, min(item_rows, count - i * item_rows)};
  }
  __syncthreads();
  place[e] = begin + before;
  __syncthreads();
  for_each_pair(ids, num_pairs, [&](int pair, int expert) { pairs[atomicAdd(&place[expert], 1)] = pair; });
}

// Four columns of a part.
__device__ __forceinline__ float4 part_columns(const float* p) {
  return __ldcs(reinterpret_cast<const float4*>(p));
}
__device__ __forceinline__ float4 part_columns(const __nv_bfloat16* p) {
  const uint2 pairs = __ldcs(reinterpret_cast<const uint2*>(p));
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.y));
  return {low.x, low.y, high.x, high.y};
}

constexpr int kCombineThreads = 128;

// A thread sums four columns of one token.
template <typename Part>
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const Part* parts, const float* weights, int top_k,
                                                                  Tensor addend, bool accumulate, Tensor y) {
  dependency_wait();
  dependency_trigger();
  const int64_t c = 4 * (blockIdx.x * static_cast<int64_t>(kCombineThreads) + threadIdx.x);
  if (c >= y.cols) return;
  float4 sum{};
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    const int64_t pair = static_cast<int64_t>(blockIdx.y) * top_k + k;
    const float weight = weights[pair];
    const float4 part = part_columns(parts + pair * y.cols + c);
    sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
  }
  const auto add = [&](const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
  if (addend.data != nullptr) add(*reinterpret_cast<const float4*>(addend.row<float>(blockIdx.y) + c));
  auto* to = reinterpret_cast<float4*>(y.row<float>(blockIdx.y) + c);
  if (accumulate) add(*to);
  *to = sum;
}

}  // namespace

namespace {

// Blocks of score_tile_kernel that fill the GPU, and stages below which a split is not worth its sums.
constexpr int64_t kScoreBlocks = 264, kLeastStages = 4;

int64_t score_stages(const RouterWeight& router) {
  return (router.hidden + kTileDepth - 1) / kTileDepth;
}

// Stages of one split.
int64_t split_stages(int64_t rows, const RouterWeight& router) {
  const int64_t stages = score_stages(router), blocks = (rows + kTileTokens - 1) / kTileTokens *
                                                        ((router.num_experts + kTileExperts - 1) / kTileExperts);
  const int64_t splits = std::clamp<int64_t>(kScoreBlocks / blocks, 1, std::max<int64_t>(1, stages / kLeastStages));
  return (stages + splits - 1) / splits;
}

bool by_tiles(int64_t rows, bool fixed_order) {
  return rows > kFewTokens && !fixed_order;
}

}  // namespace

int64_t route_splits(int64_t rows, const RouterWeight& router, bool fixed_order) {
  if (!by_tiles(rows, fixed_order)) return 1;
  const int64_t each = split_stages(rows, router);
  return (score_stages(router) + each - 1) / each;
}

cudaError_t route_rows(const Tensor& x, const RouterWeight& router, bool fixed_order, float* scores,
                       const Routing& routing, cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(router.num_experts);
  const int64_t splits = route_splits(x.rows, router, fixed_order);
  cudaError_t error = cudaSuccess;
  if (by_tiles(x.rows, fixed_order)) {
    static const cudaError_t allowed = allow_shared(score_tile_kernel, 2 * kScoreStage);
    if (allowed != cudaSuccess) return allowed;
    const dim3 grid((static_cast<unsigned>(x.rows) + kTileTokens - 1) / kTileTokens,
                    (experts + kTileExperts - 1) / kTileExperts, static_cast<unsigned>(splits));
    error =
        launch(score_tile_kernel,
               {.grid = grid, .block = dim3(kScoreThreads), .shared_bytes = 2 * kScoreStage, .stream = stream}, x,
               router.weight.data(), static_cast<int>(experts), static_cast<int>(split_stages(x.rows, router)), scores);
  } else {
    const bool few = x.rows <= kFewTokens;
    const auto score = few ? score_kernel<2, 1> : score_kernel<8, 8>;
    const unsigned tokens = few ? 2 : 8, block_experts = few ? 1 : 8;
    const dim3 grid((experts + block_experts - 1) / block_experts,
                    (static_cast<unsigned>(x.rows) + tokens - 1) / tokens);
    error = launch(score, {.grid = grid, .block = dim3(kScoreThreads), .stream = stream}, x, router.weight.data(),
                   static_cast<int>(experts), scores);
  }
  if (error != cudaSuccess) return error;
  const SelectCall call{.bias = router.bias.data(),
                        .experts = static_cast<int>(router.num_experts),
                        .top_k = router.top_k,
                        .num_groups = router.num_groups,
                        .top_groups = router.top_groups,
                        .softmax = router.score == RouterScore::kSoftmax,
                        .normalize = router.normalize,
                        .bias_in_weights = router.bias_in_weights,
                        .scale = router.scale,
                        .splits = static_cast<int>(splits),
                        .split_stride = x.rows * router.num_experts};
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(x.rows)), .block = dim3(32), .stream = stream};
  return launch(select_kernel, shape, static_cast<const float*>(scores), call, routing.ids, routing.weights);
}

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

cudaError_t combine_pairs(const Tensor& parts, const Routing& routing, const CombineAlso& also, const Tensor& y,
                          cudaStream_t stream) {
  constexpr unsigned kColumns = 4 * kCombineThreads;
  const LaunchShape shape{
      .grid = dim3((static_cast<unsigned>(y.cols) + kColumns - 1) / kColumns, static_cast<unsigned>(y.rows)),
      .block = dim3(kCombineThreads),
      .stream = stream};
  const Tensor addend = also.addend == nullptr ? Tensor() : *also.addend;
  const float* weights = routing.weights;
  if (parts.dtype == DType::kBF16)
    return launch(combine_kernel<__nv_bfloat16>, shape, parts.row<const __nv_bfloat16>(0), weights, routing.top_k,
                  addend, also.accumulate, y);
  return launch(combine_kernel<float>, shape, parts.row<const float>(0), weights, routing.top_k, addend,
                also.accumulate, y);
}

}  // namespace perigee

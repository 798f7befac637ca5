#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/moe/route.h"
#include "ops/uniform_routing.h"

namespace perigee {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;

// Four numbers of W as the sum of three pairs of bf16 each, which together hold all their bits. True: the first alone
// does not.
__device__ __forceinline__ bool split_terms(const float4& w, uint32_t (&terms)[3][2]) {
  float2 rest[2] = {{w.x, w.y}, {w.z, w.w}};
  bool more = false;
#pragma unroll
  for (int term = 0; term < 3; ++term)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(rest[i].x, rest[i].y);
      const float2 back = __bfloat1622float2(rounded);
      rest[i].x -= back.x, rest[i].y -= back.y;
      if (term == 0) more |= rest[i].x != 0 || rest[i].y != 0;
      terms[term][i] = *reinterpret_cast<const uint32_t*>(&rounded);
    }
  return more;
}

// --- Scores of few tokens: a block does 16 experts and 512 columns. ---
//
// W is asked for while the kernel in front still runs, by plain loads: nvcc puts those of __ldg after
// dependency_wait().

constexpr int kFewTokens = 64, kFewExperts = 16;
constexpr int kWarpChunks = 2, kFewColumns = kScoreWarps * kWarpChunks * 32;

// A warp's 16 experts by 32 columns, one lane's: rows g and g + 8, columns 8t ... 8t + 7, as terms.
struct WeightChunk {
  uint32_t a[3][2][4];  // [term][half of the columns][fragment]
  int terms;

  __device__ void make(const float4 (&w)[2][2]) {
    bool more = false;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t split[3][2];
        more |= split_terms(w[r][half], split);
#pragma unroll
        for (int term = 0; term < 3; ++term) a[term][half][r] = split[term][0], a[term][half][r + 2] = split[term][1];
      }
    terms = __any_sync(~0u, more) ? 3 : 1;
  }
  // sum += the products with a lane's columns of x, smallest terms first.
  __device__ void multiply(const uint4& x, float (&sum)[4]) const {
    if (terms > 1) {
#pragma unroll
      for (int term = 2; term > 0; --term) {
        mma_16x8x16(Bf16(), sum, a[term][0], x.x, x.y);
        mma_16x8x16(Bf16(), sum, a[term][1], x.z, x.w);
      }
    }
    mma_16x8x16(Bf16(), sum, a[0][0], x.x, x.y);
    mma_16x8x16(Bf16(), sum, a[0][1], x.z, x.w);
  }
};

// scores[split][token][expert]: block (experts, split, tokens), each split kFewColumns columns. A token's sums do not
// depend on how many others there are.
template <int kTiles>
__global__ __launch_bounds__(kScoreThreads, kTiles == 1 ? 3 : 2) void score_few_kernel(Tensor x, const float* weight,
                                                                                       int experts, float* scores) {
  constexpr int kPitch = kFewExperts + 1, kTokens = 8 * kTiles;
  __shared__ float parts[kScoreWarps][kTokens * kPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_expert = static_cast<int>(blockIdx.x) * kFewExperts, columns = static_cast<int>(x.cols);
  const int column = static_cast<int>(blockIdx.y) * kFewColumns + warp * kWarpChunks * 32 + t * 8;
  float4 w[kWarpChunks][2][2];
#pragma unroll
  for (int i = 0; i < kWarpChunks * 4; ++i) {
    const float* row = weight + min(first_expert + g + i / 2 % 2 * 8, experts - 1) * x.cols;
    const int from = column + i / 4 * 32;
    w[i / 4][i / 2 % 2][i % 2] =
        from < columns ? reinterpret_cast<const float4*>(row + from)[i % 2] : float4{0, 0, 0, 0};
  }
  WeightChunk chunks[kWarpChunks];
#pragma unroll
  for (int i = 0; i < kWarpChunks; ++i) chunks[i].make(w[i]);
  dependency_wait();
  dependency_trigger();
  const int64_t first = static_cast<int64_t>(blockIdx.z) * kTokens;
  const int count = static_cast<int>(min(static_cast<int64_t>(kTokens), x.rows - first));
  float sum[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kWarpChunks; ++i) {
    const int from = column + 32 * i;
    uint4 values[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      values[n] = from < columns && n * 8 + g < count
                      ? *reinterpret_cast<const uint4*>(x.row<const uint16_t>(first + n * 8 + g) + from)
                      : uint4{0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (n * 8 < count) chunks[i].multiply(values[n], sum[n]);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][(n * 8 + 2 * t + i % 2) * kPitch + g + i / 2 * 8] = sum[n][i];
  __syncthreads();
  float* to = scores + (blockIdx.y * x.rows + first) * experts + first_expert;
  for (int i = threadIdx.x; i < count * kFewExperts; i += kScoreThreads) {
    const int token = i / kFewExperts, expert = i % kFewExperts;
    if (first_expert + expert >= experts) continue;
    float total = 0;
    for (int w = 0; w < kScoreWarps; ++w) total += parts[w][token * kPitch + expert];
    to[static_cast<int64_t>(token) * experts + expert] = total;
  }
}

// --- Scores of many tokens: tiles of both in shared memory. ---

constexpr int kTileTokens = 128, kTileExperts = 64, kTileDepth = 64;
constexpr int kXBytes = kTileTokens * kTileDepth * 2, kTermBytes = kTileExperts * kTileDepth * 2;
constexpr int kScoreStage = kXBytes + 3 * kTermBytes;

// Chunk of 16 bytes `chunk` of a row of 64 bf16.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// 16 columns of two rows of x, 64 apart, and of one of W, on their way to shared memory.
struct ScoreColumns {
  uint4 x[2][2];
  float4 w[4];

  // Rows that are not there are null.
  __device__ void load(const uint16_t* const (&x_row)[2], const float* w_row, int column, int end) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        x[r][i] = x_row[r] != nullptr && column + 8 * i < end ? reinterpret_cast<const uint4*>(x_row[r] + column)[i]
                                                              : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = w_row != nullptr && column + 4 * i < end ? __ldg(reinterpret_cast<const float4*>(w_row + column) + i)
                                                      : float4{0, 0, 0, 0};
  }
  // True: W has more than a bf16's bits here.
  __device__ bool store(uint8_t* stage, int row, int chunk) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(stage + place(row + i / 2 * 64, chunk + i % 2)) = x[i / 2][i % 2];
    bool more = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t low[3][2], high[3][2];
      more |= split_terms(w[2 * half], low);
      more |= split_terms(w[2 * half + 1], high);
#pragma unroll
      for (int term = 0; term < 3; ++term)
        *reinterpret_cast<uint4*>(stage + kXBytes + term * kTermBytes + place(row, chunk + half)) =
            make_uint4(low[term][0], low[term][1], high[term][0], high[term][1]);
    }
    return more;
  }
};

using Scores = float[2][4][4];  // [16 tokens][8 experts][fragment]

// sum += 64 columns of a warp's 32 tokens by 32 experts, of the first `terms` terms of W. The products of a stage are
// added on their own: the matrix unit's own sums cut bits off, and over thousands of columns that would be seen.
__device__ void add_scores(const uint8_t* stage, int token, int expert, int terms, Scores& sum) {
  const int lane = threadIdx.x % 32;
  Scores part = {};
#pragma unroll
  for (int k = 0; k < kTileDepth / 16; ++k) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      load_matrix_x4(a[m], shared_address(stage + place(token + m * 16 + lane % 16, 2 * k + lane / 16)));
    for (int term = terms - 1; term >= 0; --term) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[4];
        const int row = expert + pair * 16 + lane / 16 * 8 + lane % 8;
        load_matrix_x4(b, shared_address(stage + kXBytes + term * kTermBytes + place(row, 2 * k + lane / 8 % 2)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_16x8x16(Bf16(), part[m][2 * pair], a[m], b[0], b[1]);
          mma_16x8x16(Bf16(), part[m][2 * pair + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
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
  const auto x_row = [&](int64_t token) { return token < x.rows ? x.row<const uint16_t>(token) : nullptr; };
  const uint16_t* const x_rows[2] = {x_row(first_token + row), x_row(first_token + row + 64)};
  const float* w_row = first_expert + row < experts ? weight + (first_expert + row) * x.cols : nullptr;
  const int begin = static_cast<int>(blockIdx.z) * split_stages * kTileDepth;
  const int end = min(static_cast<int>(x.cols), begin + split_stages * kTileDepth);
  ScoreColumns next;
  next.load(x_rows, w_row, begin + chunk * 8, end);
  bool more = next.store(shared, row, chunk);
  Scores sum = {};
  for (int column = begin, stage = 0; column < end; column += kTileDepth, stage ^= 1) {
    const int terms = __syncthreads_or(more) != 0 ? 3 : 1;
    const bool goes_on = column + kTileDepth < end;
    if (goes_on) next.load(x_rows, w_row, column + kTileDepth + chunk * 8, end);
    add_scores(shared + stage * kScoreStage, warp % 4 * 32, warp / 4 * 32, terms, sum);
    if (goes_on) more = next.store(shared + (stage ^ 1) * kScoreStage, row, chunk);
  }
  float* to = scores + blockIdx.z * x.rows * experts;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int64_t token = first_token + warp % 4 * 32 + i / 16 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int expert = first_expert + warp / 4 * 32 + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
    if (token < x.rows && expert < experts) to[token * experts + expert] = sum[i / 16][i / 4 % 4][i % 4];
  }
}

// --- Choice. ---

// A number whose order as an integer is that of the floats; 0: -infinity or NaN.
__device__ __forceinline__ uint32_t order_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);  // one zero
  return v > -INFINITY ? bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u) : 0;
}

// The numbers of a warp, taken largest first: lane l has kEach of them from x[l * kEach] on.
template <int kEach>
struct Largest {
  uint32_t order[kEach];

  // Of x[0 ... count).
  __device__ Largest(const float* x, int count) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) % 32 * kEach + i;
      order[i] = at < count ? order_of(x[at]) : 0;
    }
  }
  struct Found {
    uint32_t order;  // 0: all that are left are -infinity or NaN
    int index;
  };
  // The largest that is left, the lowest of equals.
  __device__ Found take() {
    uint32_t mine = order[0];
    int slot = 0;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (order[i] > mine) mine = order[i], slot = i;
    const uint32_t best = __reduce_max_sync(~0u, mine);
    const int winner = __ffs(__ballot_sync(~0u, mine == best)) - 1;
    slot = __shfl_sync(~0u, slot, winner);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i == slot && static_cast<int>(threadIdx.x) % 32 == winner) order[i] = 0;
    return {best, winner * kEach + slot};
  }
};

struct SelectCall {
  const float* bias;
  int experts, top_k, num_groups, top_groups;
  bool softmax, normalize, bias_in_weights, uniform;
  int64_t first_token;  // of the launch
  float scale;
  int first_here, num_here;  // RouterWeight::id_here
  int splits;                // of the logits, to be added
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
  Largest<2> left(totals, c.num_groups);
  for (int i = 0; i < c.top_groups; ++i) {
    const auto group = left.take();
    if (group.order == 0) break;
    kept[group.index / 32] |= 1u << (group.index % 32);
  }
  for (int e = lane; e < c.experts; e += 32)
    if ((kept[e / size / 32] >> (e / size % 32) & 1u) == 0) choice[e] = -INFINITY;
  __syncwarp();
}

constexpr int kMaxChoices = 64, kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;  // at most
constexpr int kSelectEach = kMaxRoutedExperts / kSelectThreads;

struct Choice {
  float scores[kMaxRoutedExperts], choice[kMaxRoutedExperts], totals[64], weights[kMaxChoices];
  uint32_t orders[kSelectWarps][kMaxChoices + 1];  // of each warp's share of the experts the best, then a zero
  int indices[kSelectWarps][kMaxChoices + 1], ids[kMaxChoices];
};

// The largest of the logits and the sum of exp(logit - largest), by each warp for itself.
__device__ float2 softmax_terms(int experts, const float* logits) {
  const int lane = threadIdx.x % 32;
  float largest = -INFINITY, sum = 0;
  for (int e = lane; e < experts; e += 32) largest = fmaxf(largest, logits[e]);
  largest = warp_max(largest);
  for (int e = lane; e < experts; e += 32) sum += expf(logits[e] - largest);
  return make_float2(largest, warp_sum(sum));
}

// Each warp's k best of its share of the experts.
__device__ void choose_by_warp(const SelectCall& c, Choice& s) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, share = (c.experts + warps - 1) / warps;
  const int first = warp * share;
  Largest<kSelectEach> left(s.choice + first, min(share, c.experts - first));
  for (int k = 0; k < c.top_k; ++k) {
    const auto found = left.take();
    if (threadIdx.x % 32 == 0) s.orders[warp][k] = found.order, s.indices[warp][k] = first + found.index;
    if (found.order == 0) break;
  }
  if (threadIdx.x % 32 == 0) s.orders[warp][c.top_k] = 0;
}

// The k best of those, by one warp: lane w has the next of warp w.
__device__ void choose(const SelectCall& c, Choice& s, int32_t* ids, float* weights) {
  const int lane = threadIdx.x, warps = blockDim.x / 32, from = min(lane, warps - 1);
  int next = 0;
  for (int k = 0; k < c.top_k; ++k) {
    const uint32_t order = lane < warps ? s.orders[from][next] : 0;
    const int index = s.indices[from][next];
    const uint32_t best = __reduce_max_sync(~0u, order);
    const int winner = __ffs(__ballot_sync(~0u, order == best)) - 1;
    // Only a row of NaN has no largest expert; its weights are NaN and the sampler's finite check reports it.
    if (lane == winner) s.ids[k] = best == 0 ? 0 : index, next += best != 0;
  }
  __syncwarp();
  for (int k = lane; k < c.top_k; k += 32)
    s.weights[k] = s.scores[s.ids[k]] + (c.bias_in_weights && c.bias != nullptr ? c.bias[s.ids[k]] : 0.0f);
  __syncwarp();
  float total = 0;
  for (int k = 0; k < c.top_k; ++k) total += s.weights[k];
  const float divisor = c.normalize ? total + 1e-20f : 1.0f;
  for (int k = lane; k < c.top_k; k += 32) {
    const int id = s.ids[k] - c.first_here;
    ids[k] = id >= 0 && id < c.num_here ? id : -1;
    weights[k] = s.weights[k] / divisor * c.scale;
  }
}

// One block a token, of a warp for each 32 experts while there are no more than kSelectThreads: the sum of the logits'
// splits, scores in their place, then the k best.
__global__ __launch_bounds__(kSelectThreads) void select_kernel(const float* logits, SelectCall c, int32_t* ids,
                                                                float* weights) {
  __shared__ Choice s;
  const auto token = static_cast<int64_t>(blockIdx.x);
  const int first = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  float bias[kSelectEach] = {}, z[kSelectEach] = {};
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i)
    if (c.bias != nullptr && first + i * threads < c.experts) bias[i] = c.bias[first + i * threads];
  dependency_wait();
  dependency_trigger();
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i) {
    if (i * threads + first >= c.experts) break;
    const float* from = logits + token * c.experts + i * threads + first;
#pragma unroll 8
    for (int split = 0; split < c.splits; ++split) z[i] += from[split * c.split_stride];
  }
  float2 softmax{0, 1};
  if (c.softmax) {
#pragma unroll
    for (int i = 0; i < kSelectEach; ++i)
      if (first + i * threads < c.experts) s.choice[first + i * threads] = z[i];
    __syncthreads();
    softmax = softmax_terms(c.experts, s.choice);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kSelectEach; ++i) {
    const int e = first + i * threads;
    if (e >= c.experts) break;
    const float score = c.softmax ? expf(z[i] - softmax.x) / softmax.y : 1.0f / (1.0f + expf(-z[i]));
    s.scores[e] = score;
    s.choice[e] = c.uniform ? uniform_choice(c.first_token + token, e) : score + bias[i];
  }
  __syncthreads();
  if (c.num_groups > 1 && !c.uniform) {
    if (threadIdx.x < 32) keep_best_groups(c, s.choice, s.totals);
    __syncthreads();
  }
  choose_by_warp(c, s);
  __syncthreads();
  if (threadIdx.x < 32) choose(c, s, ids + token * c.top_k, weights + token * c.top_k);
}

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

int64_t route_splits(int64_t rows, const RouterWeight& router, bool fixed_order) {
  if (!by_tiles(rows, fixed_order)) return (router.hidden + kFewColumns - 1) / kFewColumns;
  const int64_t each = split_stages(rows, router);
  return (score_stages(router) + each - 1) / each;
}

// Rows of one launch in fixed order, whose scores come in many splits.
constexpr int64_t kFixedRows = 512;

cudaError_t score_rows(const Tensor& x, const RouterWeight& router, bool fixed_order, float* scores,
                       cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(router.num_experts), rows = static_cast<unsigned>(x.rows);
  const auto splits = static_cast<unsigned>(route_splits(x.rows, router, fixed_order));
  if (by_tiles(x.rows, fixed_order)) {
    const cudaError_t allowed = allow_shared_once<score_tile_kernel>(2 * kScoreStage);
    if (allowed != cudaSuccess) return allowed;
    const dim3 grid((rows + kTileTokens - 1) / kTileTokens, (experts + kTileExperts - 1) / kTileExperts, splits);
    return launch(score_tile_kernel,
                  {.grid = grid, .block = dim3(kScoreThreads), .shared_bytes = 2 * kScoreStage, .stream = stream}, x,
                  router.weight.data(), static_cast<int>(experts), static_cast<int>(split_stages(x.rows, router)),
                  scores);
  }
  const unsigned tokens = rows <= 8 ? 8 : kFewTokens;
  const dim3 grid((experts + kFewExperts - 1) / kFewExperts, splits, (rows + tokens - 1) / tokens);
  return launch(rows <= 8 ? score_few_kernel<1> : score_few_kernel<kFewTokens / 8>,
                {.grid = grid, .block = dim3(kScoreThreads), .stream = stream}, x, router.weight.data(),
                static_cast<int>(experts), scores);
}

cudaError_t select_rows(int64_t first_token, int64_t rows, const RouterWeight& router, int64_t splits,
                        const float* scores, const Routing& routing, cudaStream_t stream) {
  const SelectCall call{.bias = router.bias.data(),
                        .experts = static_cast<int>(router.num_experts),
                        .top_k = router.top_k,
                        .num_groups = router.num_groups,
                        .top_groups = router.top_groups,
                        .softmax = router.score == RouterScore::kSoftmax,
                        .normalize = router.normalize,
                        .bias_in_weights = router.bias_in_weights && !router.uniform,
                        .uniform = router.uniform,
                        .first_token = first_token,
                        .scale = router.scale,
                        .first_here = static_cast<int>(router.first_here),
                        .num_here = static_cast<int>(router.num_experts - router.num_elsewhere),
                        .splits = static_cast<int>(splits),
                        .split_stride = rows * router.num_experts};
  const auto threads = static_cast<unsigned>(std::min<int64_t>((router.num_experts + 31) / 32 * 32, kSelectThreads));
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(threads), .stream = stream};
  return launch(select_kernel, shape, scores, call, routing.ids, routing.weights);
}

}  // namespace

int64_t route_scratch(int64_t rows, const RouterWeight& router, bool fixed_order) {
  const int64_t at_once = fixed_order ? std::min(rows, kFixedRows) : rows;
  return route_splits(at_once, router, fixed_order) * at_once * router.num_experts;
}

int64_t route_most_scratch(int64_t rows, const RouterWeight& router, bool fixed_order) {
  if (fixed_order) return route_scratch(rows, router, true);
  const int64_t few = std::min<int64_t>(rows, kFewTokens) * route_splits(1, router, false);
  const int64_t widths = (router.num_experts + kTileExperts - 1) / kTileExperts;
  const int64_t most_splits = std::max<int64_t>(1, score_stages(router) / kLeastStages);
  // Rows times splits: there are several splits only where all blocks are kScoreBlocks at most.
  const int64_t many = std::min(rows * most_splits, std::max(rows, kScoreBlocks / widths * kTileTokens));
  return std::max(few, many) * router.num_experts;
}

cudaError_t route_rows(const Tensor& x, const RouterWeight& router, bool fixed_order, float* scores,
                       const Routing& routing, cudaStream_t stream) {
  const int64_t at_once = fixed_order ? kFixedRows : x.rows;
  for (int64_t first = 0; first < x.rows; first += at_once) {
    const Tensor some = x.row_range(first, std::min(at_once, x.rows - first));
    Routing to = routing;
    to.ids += first * router.top_k, to.weights += first * router.top_k;
    cudaError_t error = score_rows(some, router, fixed_order, scores, stream);
    if (error != cudaSuccess) return error;
    error = select_rows(first, some.rows, router, route_splits(some.rows, router, fixed_order), scores, to, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace perigee

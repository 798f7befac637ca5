// Work lists of MLA decode, and the kernel that joins partial results.
#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mla_plan.cuh"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kPlanThreads = 1024;
static_assert(kPlanThreads == kMlaMaxSequences, "one thread a sequence");

// Per sequence: its first row tile and its first unit of work. A unit is a key block (balanced) or a piece (fixed) of
// one row tile; all row tiles of a sequence have the same number of units.
struct PlanShared {
  int tile[kPlanThreads + 1];
  int unit[kPlanThreads + 1];
  int units_of_tile[kPlanThreads];
  int blocks[kPlanThreads];
  int warp_sums[2][32];
};

// Exclusive prefix sums of a and b over the threads; the totals of the block are behind the last.
__device__ void scan_two(PlanShared& shared, int a, int b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum_a = a, sum_b = b;
  for (int step = 1; step < 32; step *= 2) {
    const int up_a = __shfl_up_sync(~0u, sum_a, step), up_b = __shfl_up_sync(~0u, sum_b, step);
    if (lane >= step) sum_a += up_a, sum_b += up_b;
  }
  if (lane == 31) shared.warp_sums[0][warp] = sum_a, shared.warp_sums[1][warp] = sum_b;
  __syncthreads();
  int before_a = 0, before_b = 0;
  for (int w = 0; w < warp; ++w) before_a += shared.warp_sums[0][w], before_b += shared.warp_sums[1][w];
  shared.tile[threadIdx.x + 1] = before_a + sum_a;
  shared.unit[threadIdx.x + 1] = before_b + sum_b;
  if (threadIdx.x == 0) shared.tile[0] = shared.unit[0] = 0;
  __syncthreads();
}

// The last sequence whose first entry of `begin` is at most x: the one that holds x.
__device__ int find_sequence(const int* begin, int sequences, int x) {
  int low = 0, high = sequences;  // begin[low] <= x < begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begin[middle] <= x ? low : high) = middle;
  }
  return low;
}

struct PlanArgs {
  MlaPlan plan;
  MlaBatch batch;
  int heads, rows, slots, max_tokens;
};

__device__ MlaItem make_item(const PlanArgs& a, int sequence, int tile_of_sequence) {
  MlaItem item{};
  item.sequence = sequence;
  item.row_begin = tile_of_sequence * a.rows;
  item.length = a.batch.lengths[sequence];
  item.first_token = a.batch.first_row[sequence];
  item.num_tokens = a.batch.first_row[sequence + 1] - item.first_token;
  return item;
}

// Slot p takes the units [p * budget, (p + 1) * budget) of the row tiles laid end to end. Row tile v of slot p is item
// and partial p + v: walking along, either p or v grows by one, so the numbers are distinct and dense.
__device__ void list_balanced(const PlanArgs& a, const PlanShared& shared) {
  const int sequences = a.batch.sequences, total = shared.unit[sequences];
  const int budget = max(1, (total + a.slots - 1) / a.slots);
  for (int p = threadIdx.x; p < a.slots; p += kPlanThreads) {
    const int low = min(p * budget, total), high = min(low + budget, total);
    int2 range = make_int2(0, 0);
    int s = low < high ? find_sequence(shared.unit, sequences, low) : 0;
    for (int at = low; at < high;) {
      const int blocks = shared.units_of_tile[s];
      const int r = (at - shared.unit[s]) / blocks, start = shared.unit[s] + r * blocks;
      const int index = p + shared.tile[s] + r;
      MlaItem item = make_item(a, s, r);
      item.block_begin = at - start;
      item.block_end = min(high - start, blocks);
      item.partial = item.block_end - item.block_begin == blocks ? -1 : index;
      a.plan.items[index] = item;
      if (at == low) range.x = index;
      range.y = index + 1;
      at = start + item.block_end;
      while (at < high && at >= shared.unit[s + 1]) ++s;
    }
    a.plan.slot_items[p] = range;
  }
  for (int v = threadIdx.x; v < shared.tile[sequences]; v += kPlanThreads) {
    const int s = find_sequence(shared.tile, sequences, v), blocks = shared.units_of_tile[s];
    const int start = shared.unit[s] + (v - shared.tile[s]) * blocks;
    const int first = start / budget, last = (start + blocks - 1) / budget;
    a.plan.tile_partials[v] = make_int2(first + v, last - first + 1);
  }
}

__device__ void list_fixed(const PlanArgs& a, const PlanShared& shared) {
  const int sequences = a.batch.sequences, total = shared.unit[sequences];
  const int budget = max(1, (total + a.slots - 1) / a.slots);
  for (int p = threadIdx.x; p < a.slots; p += kPlanThreads) {
    a.plan.slot_items[p] = make_int2(min(p * budget, total), min((p + 1) * budget, total));
  }
  for (int i = threadIdx.x; i < total; i += kPlanThreads) {
    const int s = find_sequence(shared.unit, sequences, i), pieces = shared.units_of_tile[s];
    const int r = (i - shared.unit[s]) / pieces, piece = (i - shared.unit[s]) % pieces;
    MlaItem item = make_item(a, s, r);
    item.block_begin = piece * kMlaFixedBlocks;
    item.block_end = min(item.block_begin + kMlaFixedBlocks, shared.blocks[s]);
    item.partial = pieces == 1 ? -1 : i;
    a.plan.items[i] = item;
    if (piece == 0) a.plan.tile_partials[shared.tile[s] + r] = make_int2(i, pieces);
  }
}

__global__ void __launch_bounds__(kPlanThreads) mla_plan_kernel(PlanArgs a, bool fixed) {
  __shared__ PlanShared shared;
  dependency_wait();
  dependency_trigger();
  const int s = threadIdx.x;
  int tiles = 0, units = 0, blocks = 0;
  if (s < a.batch.sequences) {
    const int tokens = a.batch.first_row[s + 1] - a.batch.first_row[s];
    blocks = a.batch.local_blocks ? a.batch.local_blocks[s] : (a.batch.lengths[s] + kMlaBlock - 1) / kMlaBlock;
    if (tokens > 0 && blocks > 0) {
      tiles = (tokens * a.heads + a.rows - 1) / a.rows;
      units = fixed ? (blocks + kMlaFixedBlocks - 1) / kMlaFixedBlocks : blocks;
    }
  }
  shared.units_of_tile[s] = units;
  shared.blocks[s] = blocks;
  scan_two(shared, tiles, tiles * units);
  for (int row = threadIdx.x; row < a.max_tokens; row += kPlanThreads) {
    const bool used = row < a.batch.first_row[a.batch.sequences];
    a.plan.row_sequence[row] = used ? find_sequence(a.batch.first_row, a.batch.sequences, row) : -1;
  }
  if (s < a.batch.sequences) a.plan.tile_begin[s] = tiles > 0 ? shared.tile[s] : -1;
  if (fixed) {
    list_fixed(a, shared);
  } else {
    list_balanced(a, shared);
  }
}

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = 128;  // of one block: four a lane

struct CombineArgs {
  MlaPlan plan;
  const int32_t* first_row;
  int heads, rows;
  __nv_bfloat16* out;
  float* lse;
};

// Sum of this warp's share of the partials, each weighted by 2^(its log-sum-exp - the largest).
__device__ float4 weighted_sum(const CombineArgs& a, int2 partials, int row, float largest) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.y * kCombineColumns + lane * 4;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = warp; i < partials.y; i += kCombineThreads / 32) {
    const int64_t at = static_cast<int64_t>(partials.x + i) * a.rows + row;
    const float weight = __expf(a.plan.partial_lse[at] - largest);
    const float4 o = *reinterpret_cast<const float4*>(a.plan.partial_out + at * kMlaLatent + column);
    sum.x += weight * o.x;
    sum.y += weight * o.y;
    sum.z += weight * o.z;
    sum.w += weight * o.w;
  }
  return sum;
}

// Block (x, y): query row x (token * heads + head), columns 128 y .... Rows without any key get 0 and -inf.
__global__ void __launch_bounds__(kCombineThreads) mla_combine_kernel(CombineArgs a) {
  __shared__ float4 sums[kCombineThreads / 32][32];
  dependency_wait();
  dependency_trigger();
  const int token = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sequence = a.plan.row_sequence[token];
  if (sequence < 0) return;
  int2 partials = make_int2(0, 0);
  int row = 0;
  if (const int tile = a.plan.tile_begin[sequence]; tile >= 0) {
    const int flat = (token - a.first_row[sequence]) * a.heads + head;
    partials = a.plan.tile_partials[tile + flat / a.rows];
    row = flat % a.rows;
    if (partials.y == 1) return;
  }
  float largest = -INFINITY, weights = 0;
  for (int i = lane; i < partials.y; i += 32) {
    largest = fmaxf(largest, a.plan.partial_lse[static_cast<int64_t>(partials.x + i) * a.rows + row]);
  }
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (largest == -INFINITY) partials.y = 0;
  for (int i = lane; i < partials.y; i += 32) {
    weights += __expf(a.plan.partial_lse[static_cast<int64_t>(partials.x + i) * a.rows + row] - largest);
  }
  for (int step = 16; step > 0; step /= 2) weights += __shfl_xor_sync(~0u, weights, step);
  sums[warp][lane] = weighted_sum(a, partials, row, largest);
  __syncthreads();
  if (warp > 0) return;
  float4 sum = sums[0][lane];
  for (int w = 1; w < kCombineThreads / 32; ++w) {
    const float4 other = sums[w][lane];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
  }
  const float scale = weights > 0 ? 1 / weights : 0;
  const uint2 packed =
      make_uint2(pack_pair(Bf16(), sum.x * scale, sum.y * scale), pack_pair(Bf16(), sum.z * scale, sum.w * scale));
  const int64_t out_row = blockIdx.x;
  *reinterpret_cast<uint2*>(a.out + out_row * kMlaLatent + blockIdx.y * kCombineColumns + lane * 4) = packed;
  if (a.lse && blockIdx.y == 0 && lane == 0) a.lse[out_row] = weights > 0 ? largest + __logf(weights) : -INFINITY;
}

int rows_of(MlaKernel kernel) {
  switch (kernel) {
    case MlaKernel::kMma16: return 16;
    case MlaKernel::kMma32: return 32;
    case MlaKernel::kWgmma64: return 64;
  }
  return 0;
}

}  // namespace

MlaDecodeConfig mla_decode_config(const MlaDecodeShape& shape) {
  MlaDecodeConfig c;
  const int rows = shape.heads * shape.max_query;
  const bool hopper = shape.compute_capability == 90;
  c.kernel = rows <= 16 ? MlaKernel::kMma16 : hopper ? MlaKernel::kWgmma64 : MlaKernel::kMma32;
  c.lists = shape.lists;
  c.heads = shape.heads;
  c.fp8 = shape.fp8;
  c.rows = rows_of(c.kernel);
  // Two blocks of the small kernel fit a multiprocessor's shared memory on 80 (164 KiB) and 90 (228), one on 86, 89,
  // 120.
  const bool two = c.kernel == MlaKernel::kMma16 && (shape.compute_capability == 80 || hopper);
  c.slots = shape.multiprocessors * (two ? 2 : 1);
  c.max_sequences = shape.max_sequences;
  c.max_tokens = shape.max_tokens;
  c.max_tiles = shape.max_sequences + (shape.max_tokens * shape.heads + c.rows - 1) / c.rows;
  const int64_t tiles_of_sequence = (rows + c.rows - 1) / c.rows;
  const int64_t pieces = (shape.total_blocks / kMlaFixedBlocks + shape.max_sequences) * tiles_of_sequence;
  c.max_partials = c.lists == MlaLists::kFixed ? pieces : c.slots + c.max_tiles;
  return c;
}

size_t MlaDecodeConfig::workspace_bytes() const {
  return mla_plan_layout(*this).end;
}

std::string MlaDecodeConfig::name() const {
  const char* kernel_name = kernel == MlaKernel::kMma16 ? "mma16" : kernel == MlaKernel::kMma32 ? "mma32" : "wgmma64";
  return std::string("mla_decode ") + kernel_name + (fp8 ? " fp8 " : " bf16 ") +
         (lists == MlaLists::kFixed ? "fixed, " : "balanced, ") + std::to_string(slots) + " slots";
}

cudaError_t mla_decode_prepare() {
  for (const cudaError_t error : {mla_mma_prepare(), mla_wgmma_prepare()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t mla_plan(const MlaDecodeConfig& config, const MlaBatch& batch, void* workspace, cudaStream_t stream) {
  if (batch.sequences > config.max_sequences || config.max_sequences > kMlaMaxSequences) return cudaErrorInvalidValue;
  const PlanArgs args{
      mla_plan_view(config, workspace), batch, config.heads, config.rows, config.slots, config.max_tokens};
  return launch(mla_plan_kernel, {dim3(1), dim3(kPlanThreads), 0, stream}, args, config.lists == MlaLists::kFixed);
}

cudaError_t mla_decode(const MlaDecodeConfig& config, const MlaBatch& batch, const MlaDecodeArgs& args, void* workspace,
                       cudaStream_t stream) {
  const MlaAttendParams params{mla_plan_view(config, workspace), batch, args, config.heads};
  const cudaError_t error = config.kernel == MlaKernel::kWgmma64 ? mla_wgmma_launch(config, params, stream)
                                                                 : mla_mma_launch(config, params, stream);
  if (error != cudaSuccess) return error;
  const CombineArgs combine{
      params.plan, batch.first_row, config.heads, config.rows, static_cast<__nv_bfloat16*>(args.out), args.lse};
  const dim3 grid(config.max_tokens * config.heads, kMlaLatent / kCombineColumns);
  return launch(mla_combine_kernel, {grid, dim3(kCombineThreads), 0, stream}, combine);
}

}  // namespace perigee

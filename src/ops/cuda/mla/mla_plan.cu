// Work lists of MLA decode, and the kernel that joins partial results.
#include <algorithm>

#include "ops/cuda/launch.h"
#include "ops/cuda/mla/mla_plan.cuh"
#include "ops/cuda/mma.cuh"

namespace perigee {
namespace {

constexpr int kFewPartials = 32;  // a warp joins a row alone
constexpr int kItemBlocks = 2;    // key blocks that beginning and ending an item takes as long as, about

constexpr int kPlanThreads = 1024;
static_assert(kPlanThreads == kMlaMaxSequences, "one thread a sequence");

// Per sequence: its first row tile, its key blocks and, of balanced lists, its first unit of work: a key block of one
// row tile.
struct PlanShared {
  int tile[kPlanThreads + 1];
  int unit[kPlanThreads + 1];
  int blocks[kPlanThreads];
  int most_blocks;  // of a row tile
  int few_joins, many_joins;
  int2 warp_sums[32];
};

__device__ int2 operator+(int2 a, int2 b) {
  return make_int2(a.x + b.x, a.y + b.y);
}

// Sums of two numbers a thread: over the threads in front, over all.
struct Sums {
  int2 before, total;
};

__device__ Sums sum_threads(PlanShared& shared, int2 mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int2 up = make_int2(__shfl_up_sync(~0u, sum.x, step), __shfl_up_sync(~0u, sum.y, step));
    if (lane >= step) sum = sum + up;
  }
  __syncthreads();  // the sums before are read
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  Sums out{make_int2(sum.x - mine.x, sum.y - mine.y), make_int2(0, 0)};
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) out.before = out.before + shared.warp_sums[w];
    out.total = out.total + shared.warp_sums[w];
  }
  return out;
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
  int heads, rows, slots, max_tiles;
  bool fixed;
};

// A sequence's query tokens in the rows that are planned, and its length up to the last of them.
struct QueryTokens {
  int first, count, length;
};

__device__ QueryTokens query_tokens(const MlaBatch& batch, int sequence) {
  const int begin = batch.first_row[sequence], end = batch.first_row[sequence + 1];
  const int first = max(begin, batch.row_begin), last = min(end, batch.row_end);
  return {first, max(0, last - first), batch.lengths[sequence] - (end - last)};
}

__device__ MlaItem make_item(const PlanArgs& a, int sequence, int tile_of_sequence) {
  const QueryTokens tokens = query_tokens(a.batch, sequence);
  MlaItem item{};
  item.sequence = sequence;
  item.row_begin = tile_of_sequence * a.rows;
  item.length = tokens.length;
  item.first_token = tokens.first - a.batch.query_row;
  item.num_tokens = tokens.count;
  return item;
}

// Adds a join, in any order: each is worked on by itself.
__device__ void add_join(const PlanArgs& a, PlanShared& shared, const MlaItem& item, int first_partial, int count) {
  const int rows = min(a.rows, item.num_tokens * a.heads - item.row_begin);
  const bool few = a.fixed || count <= kFewPartials;  // fixed: one kind, as sums fall otherwise in the other
  const int at = few ? atomicAdd(&shared.few_joins, 1) : a.max_tiles - 1 - atomicAdd(&shared.many_joins, 1);
  a.plan.joins[at] = {item.first_token * a.heads + item.row_begin, rows, first_partial, count};
}

// How the units [0, total) of the row tiles, laid end to end, are divided among slots; a used slot gets at
// least one. Long lists: as evenly as whole units allow. Short ones: the same number for every slot but the last, which
// cuts sequences of equal length at equal places; there, each cut costs more than an idle slot. Where each slot can
// have as many whole row tiles, for hardly more units than its even share, nothing is cut or joined at all, and the
// row tiles of a sequence read the same keys at the same time.
struct WorkSplit {
  static constexpr int kShort = 8, kSavedBlocks = 8;  // units that a cut in each slot takes as long as, joins included
  const PlanShared& shared;
  int total, tiles, slots, budget, tiles_each;

  __device__ WorkSplit(const PlanShared& of, int sequences, int most_slots)
      : shared(of),
        total(of.unit[sequences]),
        tiles(of.tile[sequences]),
        slots(min(most_slots, total)),
        budget(0),
        tiles_each(0) {
    const int share = total > 0 ? (total + slots - 1) / slots : 0;
    if (share > 0 && share <= kShort) budget = share, slots = (total + share - 1) / share;
    const int each = tiles > 0 ? (tiles + most_slots - 1) / most_slots : 0;
    if (share <= kShort || each * of.most_blocks > share + kSavedBlocks) return;
    tiles_each = each, slots = (tiles + each - 1) / each;
  }
  __device__ int begin(int slot, int sequences) const {
    if (tiles_each > 0) return tile_begin(min(slot * tiles_each, tiles), sequences);
    return budget > 0 ? min(slot * budget, total) : static_cast<int>(static_cast<int64_t>(slot) * total / slots);
  }
  // Of the row tile `tile`, by a unit of it.
  __device__ int slot_of(int unit, int tile) const {
    if (tiles_each > 0) return tile / tiles_each;
    return budget > 0 ? unit / budget : static_cast<int>((static_cast<int64_t>(unit + 1) * slots - 1) / total);
  }

 private:
  __device__ int tile_begin(int tile, int sequences) const {
    if (tile >= tiles) return total;
    const int s = find_sequence(shared.tile, sequences, tile);
    return shared.unit[s] + (tile - shared.tile[s]) * shared.blocks[s];
  }
};

// Into how many pieces of equal length each row tile is cut where that loads slots about as evenly as cuts at any
// place; 0: it does not. Then a slot has one piece, row tiles of a sequence are cut at the same places, and their
// pieces lie with neighbouring slots, which read the same keys at the same time.
__device__ int even_pieces(const PlanShared& shared, int sequences, int slots) {
  const int tiles = shared.tile[sequences], share = (shared.unit[sequences] + slots - 1) / slots;
  if (tiles == 0 || tiles > slots || share <= WorkSplit::kShort) return 0;
  const int pieces = slots / tiles;
  return (shared.most_blocks + pieces - 1) / pieces <= share + WorkSplit::kSavedBlocks ? pieces : 0;
}

// Piece c of row tile v is partial v * pieces + c; the item of slot p is item p.
__device__ void list_even(const PlanArgs& a, PlanShared& shared, int pieces) {
  const int sequences = a.batch.sequences, tiles = shared.tile[sequences];
  for (int p = threadIdx.x; p < a.slots; p += kPlanThreads) {
    int2 range = make_int2(p, p);
    if (p < tiles * pieces) {
      const int s = find_sequence(shared.tile, sequences, p / pieces), first = shared.tile[s];
      const int of_sequence = shared.tile[s + 1] - first, at = p - first * pieces;
      const int r = at % of_sequence, c = at / of_sequence;
      const int blocks = shared.blocks[s], each = (blocks + pieces - 1) / pieces;
      MlaItem item = make_item(a, s, r);
      item.block_begin = item.block_first = c * each;
      item.block_end = min(blocks, (c + 1) * each);
      item.partial = each == blocks ? -1 : (first + r) * pieces + c;
      if (item.block_begin < item.block_end) a.plan.items[p] = item, range.y = p + 1;
    }
    a.plan.slot_items[p] = range;
  }
  for (int v = threadIdx.x; v < tiles; v += kPlanThreads) {
    const int s = find_sequence(shared.tile, sequences, v), blocks = shared.blocks[s];
    const int each = (blocks + pieces - 1) / pieces;
    if (each < blocks) add_join(a, shared, make_item(a, s, v - shared.tile[s]), v * pieces, (blocks + each - 1) / each);
  }
}

// The block of [begin, end) that a slot reads first. All slots then read blocks of the same place in chunks as long as
// a slot's share at the same time, so that keys are still in L2 when the other row tiles of their sequence need them.
__device__ int first_block(int begin, int end, int blocks, int share) {
  const int chunks = max(1, (blocks + share / 2) / max(1, share)), chunk = (blocks + chunks - 1) / chunks;
  const int first = (begin + chunk - 1) / chunk * chunk;
  return first < end ? first : begin;
}

// Row tile v of slot p is partial p + v: walking along, either p or v grows by one, so the numbers are distinct and
// dense. Items take the same places, those of a slot from the last to the first: the last begins its row tile, so all
// slots begin where a chunk of keys does (first_block).
__device__ void list_balanced(const PlanArgs& a, PlanShared& shared) {
  const int sequences = a.batch.sequences, total = shared.unit[sequences];
  const WorkSplit split(shared, sequences, a.slots);
  for (int p = threadIdx.x; p < a.slots; p += kPlanThreads) {
    const int low = p < split.slots ? split.begin(p, sequences) : total;
    const int high = p < split.slots ? split.begin(p + 1, sequences) : total;
    int2 range = make_int2(0, 0);
    int s = low < high ? find_sequence(shared.unit, sequences, low) : 0;
    if (low < high) {
      const int last = find_sequence(shared.unit, sequences, high - 1);
      range.x = p + shared.tile[s] + (low - shared.unit[s]) / shared.blocks[s];
      range.y = p + shared.tile[last] + (high - 1 - shared.unit[last]) / shared.blocks[last] + 1;
    }
    for (int at = low; at < high;) {
      const int blocks = shared.blocks[s];
      const int r = (at - shared.unit[s]) / blocks, start = shared.unit[s] + r * blocks;
      const int index = p + shared.tile[s] + r;
      MlaItem item = make_item(a, s, r);
      item.block_begin = at - start;
      item.block_end = min(high - start, blocks);
      item.partial = item.block_end - item.block_begin == blocks ? -1 : index;
      const bool shares = shared.tile[s + 1] - shared.tile[s] > 1;
      item.block_first = shares ? first_block(item.block_begin, item.block_end, blocks, high - low) : item.block_begin;
      a.plan.items[range.x + range.y - 1 - index] = item;
      at = start + item.block_end;
      while (at < high && at >= shared.unit[s + 1]) ++s;
    }
    a.plan.slot_items[p] = range;
  }
  for (int v = threadIdx.x; v < shared.tile[sequences]; v += kPlanThreads) {
    const int s = find_sequence(shared.tile, sequences, v), blocks = shared.blocks[s];
    const int start = shared.unit[s] + (v - shared.tile[s]) * blocks;
    const int first = split.slot_of(start, v), last = split.slot_of(start + blocks - 1, v);
    if (last > first) add_join(a, shared, make_item(a, s, v - shared.tile[s]), first + v, last - first + 1);
  }
}

// Key blocks of which a row of the tile sees a key; with `block_index`, all that are here.
__device__ int blocks_seen(const PlanArgs& a, const PlanShared& shared, const MlaItem& item) {
  const int blocks = shared.blocks[item.sequence];
  if (a.batch.block_index) return blocks;
  const int last_token = min(item.num_tokens - 1, (item.row_begin + a.rows - 1) / a.heads);
  const int seen = item.length - item.num_tokens + last_token + 1;
  return min(blocks, max(0, (seen + kMlaBlock - 1) / kMlaBlock));
}

// The row tile `v`, and its pieces and how long they take.
struct FixedTile {
  MlaItem item{};
  int blocks = 0;
  int2 work = make_int2(0, 0);
};

__device__ FixedTile fixed_tile(const PlanArgs& a, const PlanShared& shared, int v) {
  FixedTile tile;
  const int sequences = a.batch.sequences;
  if (v >= shared.tile[sequences]) return tile;
  const int s = find_sequence(shared.tile, sequences, v);
  tile.item = make_item(a, s, v - shared.tile[s]);
  tile.blocks = blocks_seen(a, shared, tile.item);
  const int pieces = mla_pieces(tile.blocks);
  tile.work = make_int2(pieces, tile.blocks + pieces * kItemBlocks);
  return tile;
}

// The items of a tile, `before` them those of the tiles in front. A slot takes the items that begin in its share of all
// work.
__device__ void list_tile(const PlanArgs& a, PlanShared& shared, const FixedTile& tile, int2 before, int2 total) {
  const auto slot_of = [&](int work) { return static_cast<int>(static_cast<int64_t>(work) * a.slots / total.y); };
  const int pieces = tile.work.x;
  const bool joined = pieces != 1;
  if (joined) add_join(a, shared, tile.item, before.x, pieces);
  int work = before.y;
  for (int piece = 0; piece < pieces; ++piece) {
    const int index = before.x + piece;
    MlaItem item = tile.item;
    item.block_begin = item.block_first = mla_piece_begin(piece);
    item.block_end = min(mla_piece_begin(piece + 1), tile.blocks);
    item.partial = joined ? index : -1;
    a.plan.items[index] = item;
    const int slot = slot_of(work);
    work += item.block_end - item.block_begin + kItemBlocks;
    for (int p = slot; p < slot_of(work); ++p) {
      a.plan.slot_items[p].y = index + 1;
      if (p + 1 < a.slots) a.plan.slot_items[p + 1].x = index + 1;
    }
  }
}

__device__ void list_fixed(const PlanArgs& a, PlanShared& shared) {
  const int tiles = shared.tile[a.batch.sequences];
  int2 mine = make_int2(0, 0);
  for (int v = threadIdx.x; v < tiles; v += kPlanThreads) mine = mine + fixed_tile(a, shared, v).work;
  const int2 total = sum_threads(shared, mine).total;
  if (threadIdx.x == 0) a.plan.slot_items[0].x = 0;
  for (int p = threadIdx.x; p < a.slots && total.x == 0; p += kPlanThreads) a.plan.slot_items[p] = make_int2(0, 0);
  int2 before = make_int2(0, 0);
  for (int base = 0; base < tiles; base += kPlanThreads) {
    const FixedTile tile = fixed_tile(a, shared, base + threadIdx.x);
    const Sums sums = sum_threads(shared, tile.work);
    if (base + threadIdx.x < tiles) list_tile(a, shared, tile, before + sums.before, total);
    before = before + sums.total;
  }
}

__global__ void __launch_bounds__(kPlanThreads) mla_plan_kernel(PlanArgs a) {
  __shared__ PlanShared shared;
  dependency_wait();
  dependency_trigger();
  const int s = threadIdx.x;
  QueryTokens tokens{};
  int blocks = 0;
  if (s == 0) shared.most_blocks = shared.few_joins = shared.many_joins = 0;
  if (s < a.batch.sequences) {
    tokens = query_tokens(a.batch, s);
    blocks = a.batch.local_blocks ? a.batch.local_blocks[s] : max(0, (tokens.length + kMlaBlock - 1) / kMlaBlock);
  }
  const int all_tiles = (tokens.count * a.heads + a.rows - 1) / a.rows;
  const int tiles = a.fixed || blocks > 0 ? all_tiles : 0;
  shared.blocks[s] = blocks;
  const Sums sums = sum_threads(shared, make_int2(tiles, tiles * blocks));
  shared.tile[s + 1] = sums.before.x + tiles;
  shared.unit[s + 1] = sums.before.y + tiles * blocks;
  if (tiles > 0) atomicMax(&shared.most_blocks, blocks);
  if (s == 0) shared.tile[0] = shared.unit[0] = 0;
  __syncthreads();
  if (a.fixed) {
    list_fixed(a, shared);
  } else {
    for (int r = tiles; r < all_tiles; ++r) add_join(a, shared, make_item(a, s, r), 0, 0);
    const int pieces = even_pieces(shared, a.batch.sequences, a.slots);
    if (pieces > 0) {
      list_even(a, shared, pieces);
    } else {
      list_balanced(a, shared);
    }
  }
  __syncthreads();
  if (s == 0) a.plan.num_joins[0] = shared.few_joins, a.plan.num_joins[1] = shared.many_joins;
}

constexpr int kJoinThreads = 256;
constexpr int kJoinBlocks = 4;  // of a multiprocessor
constexpr int kJoinSlices = 8;  // of 64 columns: blocks that share a row with many partials
constexpr int kFewSlices = 4;   // of 128 columns: warps that share a row with few
struct JoinArgs {
  MlaPlan plan;
  int rows, max_tiles;
  __nv_bfloat16* out;
  float* lse;
  uint16_t* results;
};

struct JoinShared {
  float warp_values[2][kJoinThreads / 32];
  float4 sums[kJoinThreads];
};

__device__ float reduce_warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ float reduce_warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A row's partial results, from one on.
struct Partials {
  const uint16_t* first;
  const float* first_lse;
  int rows;

  __device__ Partials(const JoinArgs& a, int partial, int row)
      : first(a.plan.partial_mean + (static_cast<int64_t>(partial) * a.rows + row) * kMlaLatent),
        first_lse(a.plan.partial_lse + static_cast<int64_t>(partial) * a.rows + row),
        rows(a.rows) {}
  __device__ float lse(int i) const { return first_lse[i * rows]; }
  // Sixteenths of four columns.
  __device__ float4 mean(int i, int column) const {
    const uint2 pairs = *reinterpret_cast<const uint2*>(first + static_cast<int64_t>(i) * rows * kMlaLatent + column);
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pairs.x));
    const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&pairs.y));
    return make_float4(x.x, x.y, y.x, y.y);
  }
};

// What is subtracted from log-sum-exps: the largest, or 0 where that is -inf, since -inf - -inf is NaN. fmaxf skips
// NaN: if there is nothing else, the largest is -inf, and the NaN shows in the sum.
__device__ float base_of(float largest) {
  return largest == -INFINITY ? 0 : largest;
}

// The largest log-sum-exp of a row's partials and the sum of exp(each - largest); the sum is 0 if there is nothing.
__device__ float2 join_weights(const JoinArgs& a, JoinShared& shared, const MlaJoin& join, int row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Partials from(a, join.first_partial, row);
  float largest = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < join.count; i += kJoinThreads) largest = fmaxf(largest, from.lse(i));
  const float warp_largest = reduce_warp_max(largest);
  if (lane == 0) shared.warp_values[0][warp] = warp_largest;
  __syncthreads();
  largest = reduce_warp_max(shared.warp_values[0][lane % (kJoinThreads / 32)]);
  largest = base_of(largest);
  for (int i = threadIdx.x; i < join.count; i += kJoinThreads) sum += __expf(from.lse(i) - largest);
  const float warp_sum = reduce_warp_sum(sum);
  if (lane == 0) shared.warp_values[1][warp] = warp_sum;
  __syncthreads();
  return make_float2(largest, reduce_warp_sum(lane < kJoinThreads / 32 ? shared.warp_values[1][lane] : 0));
}

__device__ void add_weighted(float4& sum, float weight, const float4& o) {
  sum.x += weight * o.x, sum.y += weight * o.y, sum.z += weight * o.z, sum.w += weight * o.w;
}

// Four columns of an output row, from the weighted sum of the partials.
template <bool kResults>
__device__ void store_joined(const JoinArgs& a, int64_t out_row, int column, const float4& sum, float2 weights) {
  const float scale = weights.y == 0 ? 0 : (kResults ? 1 : kMeanUnit) / weights.y;
  const float4 out = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
  const float lse = weights.y == 0 ? -INFINITY : weights.x + __logf(weights.y);
  if constexpr (kResults) {
    uint16_t* const row = a.results + out_row * kMlaResult;
    *reinterpret_cast<uint2*>(row + column) =
        make_uint2(pack_pair(F16(), out.x, out.y), pack_pair(F16(), out.z, out.w));
    if (column == 0) *reinterpret_cast<float4*>(row + kMlaLatent) = make_float4(lse, 0, 0, 0);
  } else {
    *reinterpret_cast<uint2*>(a.out + out_row * kMlaLatent + column) =
        make_uint2(pack_pair(Bf16(), out.x, out.y), pack_pair(Bf16(), out.z, out.w));
    if (a.lse && column == 0) a.lse[out_row] = lse;
  }
}

// A slice of one row with many partials, by a block: sixteen threads hold four columns each, and the groups of sixteen
// share the partials.
template <bool kResults>
__device__ void join_many(const JoinArgs& a, JoinShared& shared, const MlaJoin& join, int row, int slice) {
  constexpr int kWidth = kMlaLatent / kJoinSlices / 4, kGroups = kJoinThreads / kWidth;
  const float2 weights = join_weights(a, shared, join, row);
  const int group = threadIdx.x / kWidth, column = slice * kWidth * 4 + threadIdx.x % kWidth * 4;
  const int count = weights.y == 0 ? 0 : join.count;
  const Partials from(a, join.first_partial, row);
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 9
  for (int i = group; i < count; i += kGroups) {
    add_weighted(sum, __expf(from.lse(i) - weights.x), from.mean(i, column));
  }
  shared.sums[threadIdx.x] = sum;
  __syncthreads();
  if (group == 0) {
#pragma unroll
    for (int g = 1; g < kGroups; ++g) add_weighted(sum, 1, shared.sums[g * kWidth + threadIdx.x]);
    store_joined<kResults>(a, join.out_row + row, column, sum, weights);
  }
  __syncthreads();  // before the next row's sums
}

// A slice of one row, by a warp: four columns a lane, so that many partials are under way at once. Partials without a
// key that the row sees change no bit, and one partial comes out as it is.
template <bool kResults>
__device__ void join_few(const JoinArgs& a, const MlaJoin& join, int row, int slice) {
  const int lane = threadIdx.x % 32, column = slice * 128 + lane * 4;
  float2 weights = make_float2(-INFINITY, 0);  // y: of this lane's partials
  float4 sum = make_float4(0, 0, 0, 0);
  for (int begin = 0; begin < join.count; begin += 32) {
    const Partials from(a, join.first_partial + begin, row);
    const float lse = begin + lane < join.count ? from.lse(lane) : -INFINITY;
    const float largest = fmaxf(weights.x, reduce_warp_max(lse));
    const float weight = __expf(lse - base_of(largest));
    const float shrink = largest == weights.x ? 1 : __expf(weights.x - largest);
    weights = make_float2(largest, weights.y * shrink + weight);
    sum.x *= shrink, sum.y *= shrink, sum.z *= shrink, sum.w *= shrink;
#pragma unroll 8
    for (int i = 0; i < min(32, join.count - begin); ++i)
      add_weighted(sum, __shfl_sync(~0u, weight, i), from.mean(i, column));
  }
  weights = make_float2(base_of(weights.x), reduce_warp_sum(weights.y));
  store_joined<kResults>(a, join.out_row + row, column, sum, weights);
}

// Slices of rows with few partials are spread over the warps of the grid, of those with many over its blocks.
template <bool kResults>
__global__ void __launch_bounds__(kJoinThreads, kJoinBlocks) mla_join_kernel(const __grid_constant__ JoinArgs a) {
  __shared__ JoinShared shared;
  // The work list was there before attention, which this waits for, began.
  const int few = __ldcg(a.plan.num_joins) * a.rows * kFewSlices, many = __ldcg(a.plan.num_joins + 1) * a.rows;
  dependency_wait();
  dependency_trigger();
  for (int unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < few; unit += gridDim.x * (kJoinThreads / 32)) {
    const MlaJoin join = a.plan.joins[unit / kFewSlices / a.rows];
    const int row = unit / kFewSlices % a.rows;
    if (row < join.rows) join_few<kResults>(a, join, row, unit % kFewSlices);
  }
  for (int unit = blockIdx.x; unit < many * kJoinSlices; unit += gridDim.x) {
    const MlaJoin join = a.plan.joins[a.max_tiles - 1 - unit / kJoinSlices / a.rows];
    const int row = unit / kJoinSlices % a.rows;
    if (row < join.rows) join_many<kResults>(a, shared, join, row, unit % kJoinSlices);
  }
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
  const bool hopper = shape.compute_capability == 90, fixed = shape.lists == MlaLists::kFixed;
  c.kernel = choose_mla_decode({.heads = shape.heads,
                                .max_query = shape.max_query,
                                .format = shape.format,
                                .fixed = fixed,
                                .compute_capability = shape.compute_capability});
  c.lists = shape.lists;
  c.heads = shape.heads;
  c.format = shape.format;
  c.results = shape.results;
  c.rows = rows_of(c.kernel);
  // Two blocks of the small kernel fit a multiprocessor's shared memory on 90 (228 KiB), one elsewhere.
  const bool two = c.kernel == MlaKernel::kMma16 && hopper;
  c.key_halves = two ? 5 : 4;
  c.multiprocessors = shape.multiprocessors;
  c.slots = shape.multiprocessors * (two ? 2 : 1);
  c.max_sequences = shape.max_sequences;
  c.max_tokens = shape.max_tokens;
  c.max_tiles = shape.max_sequences + (shape.max_tokens * shape.heads + c.rows - 1) / c.rows;
  if (fixed) c.max_tiles = static_cast<int>(shape.max_pieces);
  c.max_partials = fixed ? shape.max_pieces : c.slots + c.max_tiles;
  return c;
}

// The small kernel serves runs of few tokens, another one all others; either needs more with more of them.
size_t mla_most_workspace_bytes(MlaDecodeShape shape) {
  size_t bytes = 0;
  for (const int longest : {1, shape.max_tokens}) {
    shape.max_query = longest;
    bytes = std::max(bytes, mla_decode_config(shape).workspace_bytes());
  }
  return bytes;
}

size_t MlaDecodeConfig::workspace_bytes() const {
  return mla_plan_layout(*this).end;
}

std::string MlaDecodeConfig::name() const {
  return std::string("mla_decode ") + perigee::name(kernel) + " " + latent_format_name(format) + " " +
         (lists == MlaLists::kFixed ? "fixed, " : "balanced, ") + std::to_string(slots) + " slots";
}

cudaError_t mla_decode_prepare() {
  for (const cudaError_t error : {mla_mma_prepare(), mla_wgmma_prepare(), mla_wgmma_fp8_prepare()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t mla_plan(const MlaDecodeConfig& config, const MlaBatch& batch, void* workspace, cudaStream_t stream) {
  if (batch.sequences > config.max_sequences || config.max_sequences > kMlaMaxSequences) return cudaErrorInvalidValue;
  const PlanArgs args{
      mla_plan_view(config, workspace), batch, config.heads, config.rows, config.slots, config.max_tiles,
      config.lists == MlaLists::kFixed};
  return launch(mla_plan_kernel, {dim3(1), dim3(kPlanThreads), 0, stream}, args);
}

cudaError_t mla_decode(const MlaDecodeConfig& config, const MlaBatch& batch, const MlaDecodeArgs& args, void* workspace,
                       cudaStream_t stream) {
  if (config.format == LatentFormat::kF8Tiles && config.kernel != MlaKernel::kWgmma64) return cudaErrorInvalidValue;
  const MlaAttendParams params{mla_plan_view(config, workspace), batch, args, config.heads};
  const auto attend = config.kernel != MlaKernel::kWgmma64     ? mla_mma_launch
                      : config.format == LatentFormat::kF8E4M3 ? mla_wgmma_fp8_launch
                                                               : mla_wgmma_launch;
  const cudaError_t error = attend(config, params, stream);
  if (error != cudaSuccess) return error;
  const JoinArgs join{params.plan, config.rows, config.max_tiles, static_cast<__nv_bfloat16*>(args.out),
                      args.lse,    args.results};
  const dim3 grid(std::min(config.max_tiles * config.rows * kJoinSlices, config.multiprocessors * kJoinBlocks));
  return launch(config.results ? mla_join_kernel<true> : mla_join_kernel<false>, {grid, dim3(kJoinThreads), 0, stream},
                join);
}

}  // namespace perigee

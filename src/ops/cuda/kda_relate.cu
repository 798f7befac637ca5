// What the tokens of a chunk are to each other. A decay between tokens j < i is cut where the largest power of two of
// their positions in the chunk lies between them: at level h, of blocks of h tokens in pairs, i lies in a pair's second
// block and j in its first, and the decay is that from the second's begin through i times that after j to the first's
// end. So each level is one matrix product, of numbers <= 1 that never were differences of sums.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;  // of a thread, by two channels
constexpr int kLevels = 5;
constexpr int kHalf = 16;          // rows, and columns, of a level
constexpr int kRow = kKdaDim + 8;  // elements of a row in shared memory: eight rows touch all banks
constexpr int kTail = kKdaTaps - 1;

struct Level {
  uint16_t q_high[kHalf][kRow], q_low[kHalf][kRow];
  uint16_t k_high[kHalf][kRow], k_low[kHalf][kRow];
  uint16_t left_high[kHalf][kRow], left_low[kHalf][kRow];  // keys of first blocks
};
struct Shared {
  Level levels[2];
  float sums[kLevels][2][2][kHalf][kHalf + 4];  // [level][half of the channels][qk, kk]
  float lengths[2][kKdaChunk][4];               // [half of the channels] q.q, k.k, q.k
  float of_block[kKdaChunk / kTokens][kKdaDim];
  float relation[kKdaChunk][kKdaChunk];     // L
  float inverse[kKdaChunk][kKdaChunk + 1];  // (I + L)^-1
  float product[kHalf][kHalf + 1];
  float diagonal[kKdaChunk], beta[kKdaChunk];
};

// A thread's tokens and channels.
struct Part {
  float2 q[kTokens], k[kTokens];
  float2 through[kTokens], after[kTokens];  // decays within a block: from its begin through the token, after it

  // From blocks of h to blocks of 2 h tokens, 2 h <= kTokens.
  template <int h>
  __device__ void join() {
#pragma unroll
    for (int first = 0; first < kTokens; first += 2 * h) {
      const float2 left = through[first + h - 1], right = through[first + 2 * h - 1];
#pragma unroll
      for (int i = first; i < first + h; ++i) after[i] = {after[i].x * right.x, after[i].y * right.y};
#pragma unroll
      for (int i = first + h; i < first + 2 * h; ++i) through[i] = {through[i].x * left.x, through[i].y * left.y};
    }
  }
  // The thread's tokens are the second block of a pair, or the first; `other` is the decay of the other block.
  __device__ void join(bool second, float2 other) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (second)
        through[i] = {through[i].x * other.x, through[i].y * other.y};
      else
        after[i] = {after[i].x * other.x, after[i].y * other.y};
    }
  }
};

struct Place {
  int token, channel;  // first of the thread's

  __device__ Place() {
    const int warp = threadIdx.x / 32;
    token = warp / 2 * kTokens;
    channel = warp % 2 * 64 + threadIdx.x % 32 * 2;
  }
};

struct Chunk {
  const KdaCall& call;
  KdaRun run;
  KdaRange range;
  int32_t sequence, head;

  __device__ int64_t row(int position) const { return run.first_row + position - run.position; }
};

__device__ float2 load_pair(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}

__device__ float2 silu(float2 x) {
  return {x.x * kda_sigmoid(x.x), x.y * kda_sigmoid(x.y)};
}

// The thread's outputs of the convolution of q, k or v; zeros for tokens that are not there. kInner: all tokens are
// there, and those before them are rows of the batch too.
template <bool kInner>
__device__ void convolve(const Chunk& c, const float* unit, int part, Place at, float2 (&out)[kTokens]) {
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  const int64_t column = part * width + c.head * kKdaDim + at.channel;
  const int begin = c.range.begin + at.token;
  const float* const rows = c.call.qkv.row<float>(c.row(begin - kTail)) + column;
  float2 taps[kKdaTaps], x[kTail + kTokens];
#pragma unroll
  for (int j = 0; j < kKdaTaps; ++j) taps[j] = load_pair(c.call.conv + j * 3 * width + column);
#pragma unroll
  for (int i = 0; i < kTail + kTokens; ++i) {
    const float* from = rows + i * c.call.qkv.row_stride;
    x[i] = {0, 0};
    if (!kInner) {
      const int position = begin - kTail + i, before = position - c.run.position;
      if (before < -kTail || position >= c.range.end) continue;
      if (before < 0) from = unit + kKdaDim * kKdaDim + (part * kTail + kTail + before) * kKdaDim + at.channel;
    }
    x[i] = load_pair(from);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float2 sum = {0, 0};
#pragma unroll
    for (int j = 0; j < kKdaTaps; ++j) {
      sum.x = fmaf(taps[j].x, x[i + j].x, sum.x);
      sum.y = fmaf(taps[j].y, x[i + j].y, sum.y);
    }
    out[i] = kInner || begin + i < c.range.end ? silu(sum) : make_float2(0, 0);
  }
}

// Decay of each of the thread's tokens by itself; 1 for those that are not there.
template <bool kInner>
__device__ void decays(const Chunk& c, Place at, float2 (&out)[kTokens]) {
  const int column = c.head * kKdaDim + at.channel, begin = c.range.begin + at.token;
  const float rate = c.call.rate[c.head];
  const float2 bias = load_pair(c.call.dt_bias + column);
  const float* const rows = c.call.a.row<float>(c.row(begin)) + column;
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
    if (kInner || begin + i < c.range.end) out[i] = load_pair(rows + i * c.call.a.row_stride);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float2 g = {kda_log_decay(rate, out[i].x + bias.x), kda_log_decay(rate, out[i].y + bias.y)};
    out[i] = kInner || begin + i < c.range.end ? make_float2(expf(g.x), expf(g.y)) : make_float2(1, 1);
  }
}

// Sums over the warp of three numbers for each of eight tokens: lane l gets those of token l / 4.
__device__ void sum_tokens(float (&x)[kTokens][3], float (&total)[3]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int mask = 16 >> step, kept = 4 >> step;  // tokens that a lane keeps
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < kept; ++i)
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        const float given = upper ? x[i][n] : x[i + kept][n], own = upper ? x[i + kept][n] : x[i][n];
        x[i][n] = own + __shfl_xor_sync(~0u, given, mask);
      }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    total[n] = x[0][n] + __shfl_xor_sync(~0u, x[0][n], 2);
    total[n] += __shfl_xor_sync(~0u, total[n], 1);
  }
}

// q and k to length 128^-1/2 and 1; q_i . k_i goes to shared.diagonal.
__device__ void normalise(Shared& shared, Place at, Part& part) {
  const int lane = threadIdx.x % 32, half = at.channel / 64;
  float x[kTokens][3], total[3];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float2 q = part.q[i], k = part.k[i];
    x[i][0] = q.x * q.x + q.y * q.y;
    x[i][1] = k.x * k.x + k.y * k.y;
    x[i][2] = q.x * k.x + q.y * k.y;
  }
  sum_tokens(x, total);
  if (lane % 4 == 0)
    *reinterpret_cast<float4*>(shared.lengths[half][at.token + lane / 4]) = {total[0], total[1], total[2], 0};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float4 a = *reinterpret_cast<const float4*>(shared.lengths[0][at.token + i]);
    const float4 b = *reinterpret_cast<const float4*>(shared.lengths[1][at.token + i]);
    const float q = 0.08838834764831845f * kda_inverse_root(a.x + b.x + 1e-6f), k = kda_inverse_root(a.y + b.y + 1e-6f);
    part.q[i] = {part.q[i].x * q, part.q[i].y * q};
    part.k[i] = {part.k[i].x * k, part.k[i].y * k};
    if (at.channel == 0) shared.diagonal[at.token + i] = (a.z + b.z) * q * k;
  }
}

// The thread's rows of a level: tokens of second blocks as q and k, of first blocks as k.
template <int h>
__device__ void write_level(Level& level, Place at, const Part& part) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = at.token + i, row = token / (2 * h) * h + token % h;
    const float2 q = part.q[i], k = part.k[i], through = part.through[i], after = part.after[i];
    if ((token / h) % 2 == 1) {
      store_split(level.q_high[row], level.q_low[row], at.channel, q.x * through.x, q.y * through.y);
      store_split(level.k_high[row], level.k_low[row], at.channel, k.x * through.x, k.y * through.y);
    } else {
      store_split(level.left_high[row], level.left_low[row], at.channel, k.x * after.x, k.y * after.y);
    }
  }
}

// Products of a level: a warp takes one of q and k, eight columns and half of the channels.
__device__ void multiply_level(const Level& level, float (*sums)[2][kHalf][kHalf + 4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int matrix = warp / 2 % 2, columns = warp % 2 * 8, half = warp / 4;
  const uint32_t a = shared_address(matrix == 0 ? &level.q_high[lane % 16][half * 64 + lane / 16 * 8]
                                                : &level.k_high[lane % 16][half * 64 + lane / 16 * 8]);
  const uint32_t b = shared_address(&level.left_high[columns + lane % 8][half * 64 + lane / 8 * 8]);
  constexpr uint32_t kLow = sizeof(level.q_high);  // bytes from high to low
  float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t b_high[4], b_low[4];
    load_matrix_x4(b_high, b + 64 * step);
    load_matrix_x4(b_low, b + 64 * step + kLow);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t high[4], low[4];
      load_matrix_x4(high, a + 64 * step + 32 * k);
      load_matrix_x4(low, a + 64 * step + 32 * k + kLow);
      mma_16x8x16(Bf16(), sum[k], high, b_high[2 * k], b_high[2 * k + 1]);
      mma_16x8x16(Bf16(), rest[0], high, b_low[2 * k], b_low[2 * k + 1]);
      mma_16x8x16(Bf16(), rest[1], low, b_high[2 * k], b_high[2 * k + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) sum[0][n] += sum[1][n] + (rest[0][n] + rest[1][n]);
  auto& to = sums[half][matrix];
  const int row = lane / 4, column = columns + lane % 4 * 2;
  *reinterpret_cast<float2*>(&to[row][column]) = {sum[0][0], sum[0][1]};
  *reinterpret_cast<float2*>(&to[row + 8][column]) = {sum[0][2], sum[0][3]};
}

// All levels: sums of q_i . k_j and k_i . k_j, decayed, for j < i. Leaves the decays of the whole chunk in `part`.
__device__ void relate(Shared& shared, Place at, Part& part) {
  write_level<1>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level(shared.levels[0], shared.sums[0]);
  part.join<1>();
  write_level<2>(shared.levels[1], at, part);
  __syncthreads();
  multiply_level(shared.levels[1], shared.sums[1]);
  part.join<2>();
  write_level<4>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level(shared.levels[0], shared.sums[2]);
  part.join<4>();
  const int block = at.token / kTokens;
  *reinterpret_cast<float2*>(&shared.of_block[block][at.channel]) = part.through[kTokens - 1];
  write_level<8>(shared.levels[1], at, part);
  __syncthreads();
  multiply_level(shared.levels[1], shared.sums[3]);
  part.join(block % 2 == 1, load_pair(&shared.of_block[block ^ 1][at.channel]));
  write_level<16>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level(shared.levels[0], shared.sums[4]);
  const int other = block < 2 ? 2 : 0;
  const float2 x = load_pair(&shared.of_block[other][at.channel]),
               y = load_pair(&shared.of_block[other + 1][at.channel]);
  part.join(block >= 2, {x.x * y.x, x.y * y.y});
  __syncthreads();
}

// qk and L from the sums of both halves of the channels, at the level of each pair of tokens.
__device__ void write_relations(Shared& shared, KdaChunkData& data) {
  const int i = threadIdx.x / 8, first = threadIdx.x % 8 * 4;
  const float beta = shared.beta[i];
  float qk[4], relation[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int j = first + n;
    qk[n] = j == i ? shared.diagonal[i] : 0.0f;
    relation[n] = 0;
    if (j >= i) continue;
    const int level = 31 - __clz(i ^ j), inside = (1 << level) - 1;
    const int row = (i >> (level + 1) << level) | (i & inside), column = (j >> (level + 1) << level) | (j & inside);
    const auto& sums = shared.sums[level];
    qk[n] = sums[0][0][row][column] + sums[1][0][row][column];
    relation[n] = beta * (sums[0][1][row][column] + sums[1][1][row][column]);
  }
  *reinterpret_cast<float4*>(&shared.relation[i][first]) = {relation[0], relation[1], relation[2], relation[3]};
  *reinterpret_cast<uint2*>(data.qk + kda_at32(i, first)) = {pack_pair(Bf16(), qk[0], qk[1]),
                                                             pack_pair(Bf16(), qk[2], qk[3])};
}

// (I + L)^-1 of the two diagonal blocks of 16, by one warp: a column a lane, row by row.
__device__ void invert_blocks(Shared& shared) {
  const int lane = threadIdx.x % 32, block = lane / kHalf * kHalf, column = lane % kHalf;
  float x[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float sum[4] = {column == i ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(&shared.relation[block + i][block + j]);
      sum[0] = fmaf(-l.x, x[j], sum[0]);
      if (j + 1 < i) sum[1] = fmaf(-l.y, x[j + 1], sum[1]);
      if (j + 2 < i) sum[2] = fmaf(-l.z, x[j + 2], sum[2]);
      if (j + 3 < i) sum[3] = fmaf(-l.w, x[j + 3], sum[3]);
    }
    x[i] = sum[0] + sum[1] + (sum[2] + sum[3]);
    shared.inverse[block + i][lane] = x[i];
    shared.inverse[block + i][lane ^ kHalf] = 0;
  }
}

// The block below the diagonal: (I + L)^-1 of [A 0; B C] is [A^-1 0; -C^-1 B A^-1, C^-1]. Then all of it is written.
__device__ void finish_inverse(Shared& shared, KdaChunkData& data) {
  const int i = threadIdx.x / kHalf, column = threadIdx.x % kHalf;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kHalf; ++j) sum = fmaf(shared.relation[kHalf + i][j], shared.inverse[j][column], sum);
  shared.product[i][column] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int j = 0; j < kHalf; ++j) sum = fmaf(shared.inverse[kHalf + i][kHalf + j], shared.product[j][column], sum);
  shared.inverse[kHalf + i][column] = -sum;
  __syncthreads();
  const int row = threadIdx.x / 8, first = threadIdx.x % 8 * 4, to = kda_at32(row, first);
  const float* x = &shared.inverse[row][first];
  const SplitPair left = split_pair(x[0], x[1]), right = split_pair(x[2], x[3]);
  *reinterpret_cast<uint2*>(data.solve_high + to) = {left.high, right.high};
  *reinterpret_cast<uint2*>(data.solve_low + to) = {left.low, right.low};
}

__device__ void write_rows(const Shared& shared, Place at, const Part& part, KdaChunkData& data) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int row = at.token + i, to = kda_at128(row, at.channel);
    const float beta = shared.beta[row];
    const float2 q = part.q[i], k = part.k[i], through = part.through[i], after = part.after[i];
    store_split(data.k_high, data.k_low, to, beta * k.x * through.x, beta * k.y * through.y);
    *reinterpret_cast<uint32_t*>(data.q_high + to) = pack_pair(Bf16(), q.x * through.x, q.y * through.y);
    store_split(data.end_high, data.end_low, to, k.x * after.x, k.y * after.y);
  }
  if (at.token + kTokens == kKdaChunk) *reinterpret_cast<float2*>(data.decay + at.channel) = part.through[kTokens - 1];
}

template <bool kInner>
__device__ void write_values(const Chunk& c, const Shared& shared, const float* unit, Place at, KdaChunkData& data) {
  float2 v[kTokens];
  convolve<kInner>(c, unit, 2, at, v);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int row = at.token + i;
    const float beta = shared.beta[row];
    *reinterpret_cast<float2*>(data.v[at.channel / kKdaSlice] + kda_value_at(row, at.channel % kKdaSlice)) = {
        beta * v[i].x, beta * v[i].y};
  }
}

template <bool kInner>
__device__ void relate_tokens(const Chunk& c, const float* unit, Shared& shared, KdaChunkData& data) {
  const Place at;
  Part part;
  convolve<kInner>(c, unit, 0, at, part.q);
  convolve<kInner>(c, unit, 1, at, part.k);
  decays<kInner>(c, at, part.through);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) part.after[i] = {1, 1};
  normalise(shared, at, part);
  relate(shared, at, part);
  write_relations(shared, data);
  __syncthreads();
  if (threadIdx.x / 32 == 0) invert_blocks(shared);
  write_rows(shared, at, part, data);
  write_values<kInner>(c, shared, unit, at, data);
  __syncthreads();
  finish_inverse(shared, data);
}

// The chunk in a slot of some pieces; without tokens where it is not there.
__device__ Chunk chunk_of(const KdaCall& call, const KdaPieces& pieces, int slot) {
  int p = 0;
  while (p + 1 < pieces.count && slot >= pieces.pieces[p + 1].first_slot) ++p;
  const KdaPiece& piece = pieces.pieces[p];
  Chunk c{call, KdaRun(call.sequences, piece.sequence), {}, piece.sequence, static_cast<int32_t>(blockIdx.x)};
  if (c.run.length > 0 && c.run.prefill) c.range = kda_chunk(c.run, piece.first_chunk + slot - piece.first_slot);
  return c;
}

__device__ void relate_chunk(const Chunk& c, Shared& shared, KdaChunkData& data) {
  if (threadIdx.x < kKdaChunk) {
    const int position = c.range.begin + static_cast<int>(threadIdx.x);
    shared.beta[threadIdx.x] = position < c.range.end
                                   ? kda_sigmoid(__bfloat162float(c.call.b.row<__nv_bfloat16>(c.row(position))[c.head]))
                                   : 0.0f;
  }
  const float* unit = kda_unit(c.call.state, c.call.sequences, c.sequence, c.head);
  const bool inner = c.range.begin - kTail >= c.run.position && c.range.end - c.range.begin == kKdaChunk;
  inner ? relate_tokens<true>(c, unit, shared, data) : relate_tokens<false>(c, unit, shared, data);
}

// The outputs of a chunk from what kda_carry left of them, a warp a row. Other kernels wrote it lately: past L1.
__device__ void finish_chunk(const Chunk& c, const float* out) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, first = c.range.begin + static_cast<int>(threadIdx.x) / 32;
  const float4 weight = reinterpret_cast<const float4*>(c.call.o_norm)[lane];
  float4 o[kKdaChunk / kWarps] = {}, z[kKdaChunk / kWarps] = {};
#pragma unroll
  for (int i = 0; i < kKdaChunk / kWarps; ++i) {
    const int position = first + i * kWarps;
    if (position >= c.range.end) continue;
    const int64_t row = c.row(position);
    o[i] = __ldcg(reinterpret_cast<const float4*>(out + (row * c.call.heads + c.head) * kKdaDim) + lane);
    z[i] = reinterpret_cast<const float4*>(c.call.z.row<float>(row) + c.head * kKdaDim)[lane];
  }
#pragma unroll
  for (int i = 0; i < kKdaChunk / kWarps; ++i) {
    const int position = first + i * kWarps;
    if (position < c.range.end)
      kda_gated_norm(o[i], weight, c.call.eps, z[i], c.call.y.row<uint16_t>(c.row(position)) + c.head * kKdaDim);
  }
}

// Blocks (head, slot of `pieces`) relate, blocks after them (head, slot of `carried`) finish.
__global__ __launch_bounds__(kThreads, 2) void relate_kernel(const __grid_constant__ KdaCall call,
                                                             const __grid_constant__ KdaPieces pieces,
                                                             const __grid_constant__ KdaPieces carried) {
  extern __shared__ __align__(16) uint8_t memory[];
  if (!pieces.beside_carry) {
    dependency_wait();
    dependency_trigger();
  }
  const int slot = blockIdx.y;
  const bool relates = slot < pieces.num_slots;
  const Chunk c = relates ? chunk_of(call, pieces, slot) : chunk_of(call, carried, slot - pieces.num_slots);
  if (c.range.begin < c.range.end) {
    if (relates)
      relate_chunk(c, *reinterpret_cast<Shared*>(memory),
                   static_cast<KdaChunkData*>(pieces.scratch)[static_cast<int64_t>(slot) * call.heads + c.head]);
    else
      finish_chunk(c, carried.out);
  }
  if (pieces.beside_carry) dependency_wait();  // complete no earlier than the kernel before, as all others
}

}  // namespace

int64_t kda_scratch_bytes(int64_t num_slots, int64_t heads) {
  return num_slots * heads * static_cast<int64_t>(sizeof(KdaChunkData));
}

cudaError_t kda_load_relate() {
  return allow_shared(relate_kernel, sizeof(Shared));
}

cudaError_t kda_relate(const KdaCall& call, const KdaPieces& pieces, const KdaPieces& carried, cudaStream_t stream) {
  if (pieces.num_slots + carried.num_slots == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(pieces.num_slots + carried.num_slots));
  return launch(relate_kernel, {grid, dim3(kThreads), sizeof(Shared), stream}, call, pieces, carried);
}

}  // namespace perigee

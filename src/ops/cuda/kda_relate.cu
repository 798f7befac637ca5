// What the tokens of a chunk are to each other. A decay between tokens j < i is cut where the largest power of two of
// their positions in the chunk lies between them: at level h, of blocks of h tokens in pairs, i lies in a pair's second
// block and j in its first, and the decay is that from the second's begin through i times that after j to the first's
// end. So each level is one matrix product, of numbers <= 1 that never were differences of sums.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;         // of a thread, by two channels
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
  float sums[2][2][kKdaChunk][kKdaChunk];  // [half of the channels][qk, kk]
  float lengths[2][kKdaChunk][4];          // [half of the channels] q.q, k.k, q.k
  float of_block[kKdaChunk / kTokens][kKdaDim];
  float relation[kKdaChunk][kKdaChunk];  // L
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

// The thread's outputs of the convolution of q, k or v; zeros for tokens that are not there.
__device__ void convolve(const Chunk& c, const float* unit, int part, Place at, float2 (&out)[kTokens]) {
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  const int64_t column = part * width + c.head * kKdaDim + at.channel;
  float2 taps[kKdaTaps], x[kTail + kTokens];
#pragma unroll
  for (int j = 0; j < kKdaTaps; ++j) taps[j] = load_pair(c.call.conv + j * 3 * width + column);
#pragma unroll
  for (int i = 0; i < kTail + kTokens; ++i) {
    const int position = c.range.begin + at.token - kTail + i, before = position - c.run.position;
    x[i] = {0, 0};
    if (position >= c.range.end) continue;
    x[i] = before < 0
               ? (before >= -kTail
                      ? load_pair(unit + kKdaDim * kKdaDim + (part * kTail + kTail + before) * kKdaDim + at.channel)
                      : x[i])
               : load_pair(c.call.qkv.row<float>(c.row(position)) + column);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float2 sum = {0, 0};
#pragma unroll
    for (int j = 0; j < kKdaTaps; ++j) {
      sum.x = fmaf(taps[j].x, x[i + j].x, sum.x);
      sum.y = fmaf(taps[j].y, x[i + j].y, sum.y);
    }
    const bool there = c.range.begin + at.token + i < c.range.end;
    out[i].x = there ? sum.x * kda_sigmoid(sum.x) : 0.0f;
    out[i].y = there ? sum.y * kda_sigmoid(sum.y) : 0.0f;
  }
}

// Decay of each of the thread's tokens by itself; 1 for those that are not there.
__device__ void decays(const Chunk& c, Place at, float2 (&out)[kTokens]) {
  const int column = c.head * kKdaDim + at.channel;
  const float rate = c.call.rate[c.head];
  const float2 bias = load_pair(c.call.dt_bias + column);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int position = c.range.begin + at.token + i;
    out[i] = {1, 1};
    if (position >= c.range.end) continue;
    const float2 a = load_pair(c.call.a.row<float>(c.row(position)) + column);
    out[i] = {expf(kda_log_decay(rate, a.x + bias.x)), expf(kda_log_decay(rate, a.y + bias.y))};
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
    const float q = 0.08838834764831845f / sqrtf(a.x + b.x + 1e-6f), k = 1.0f / sqrtf(a.y + b.y + 1e-6f);
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
template <int h>
__device__ void multiply_level(const Level& level, float (*sums)[2][kKdaChunk][kKdaChunk]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int matrix = warp / 2 % 2, columns = warp % 2 * 8, half = warp / 4;
  const auto& high = matrix == 0 ? level.q_high : level.k_high;
  const auto& low = matrix == 0 ? level.q_low : level.k_low;
  float sum[4] = {}, rest[4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int channel = half * 64 + step * 32;
    uint32_t b_high[4], b_low[4];
    load_matrix_x4(b_high, shared_address(&level.left_high[columns + lane % 8][channel + lane / 8 * 8]));
    load_matrix_x4(b_low, shared_address(&level.left_low[columns + lane % 8][channel + lane / 8 * 8]));
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t a_high[4], a_low[4];
      load_matrix_x4(a_high, shared_address(&high[lane % 16][channel + 16 * k + lane / 16 * 8]));
      load_matrix_x4(a_low, shared_address(&low[lane % 16][channel + 16 * k + lane / 16 * 8]));
      mma_16x8x16(Bf16(), sum, a_high, b_high[2 * k], b_high[2 * k + 1]);
      mma_16x8x16(Bf16(), rest, a_high, b_low[2 * k], b_low[2 * k + 1]);
      mma_16x8x16(Bf16(), rest, a_low, b_high[2 * k], b_high[2 * k + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4 + n / 2 * 8, column = columns + lane % 4 * 2 + n % 2;
    if (row / h != column / h) continue;
    const int i = row / h * 2 * h + h + row % h, j = column / h * 2 * h + column % h;
    sums[half][matrix][i][j] = sum[n] + rest[n];
  }
}

// All levels: sums of q_i . k_j and k_i . k_j, decayed, for j < i. Leaves the decays of the whole chunk in `part`.
__device__ void relate(Shared& shared, Place at, Part& part) {
  write_level<1>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level<1>(shared.levels[0], shared.sums);
  part.join<1>();
  write_level<2>(shared.levels[1], at, part);
  __syncthreads();
  multiply_level<2>(shared.levels[1], shared.sums);
  part.join<2>();
  write_level<4>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level<4>(shared.levels[0], shared.sums);
  part.join<4>();
  const int block = at.token / kTokens;
  *reinterpret_cast<float2*>(&shared.of_block[block][at.channel]) = part.through[kTokens - 1];
  write_level<8>(shared.levels[1], at, part);
  __syncthreads();
  multiply_level<8>(shared.levels[1], shared.sums);
  part.join(block % 2 == 1, load_pair(&shared.of_block[block ^ 1][at.channel]));
  write_level<16>(shared.levels[0], at, part);
  __syncthreads();
  multiply_level<16>(shared.levels[0], shared.sums);
  const int other = block < 2 ? 2 : 0;
  const float2 x = load_pair(&shared.of_block[other][at.channel]),
               y = load_pair(&shared.of_block[other + 1][at.channel]);
  part.join(block >= 2, {x.x * y.x, x.y * y.y});
  __syncthreads();
}

// qk and L from the sums of both halves of the channels.
__device__ void write_relations(Shared& shared, KdaChunkData& data) {
  const int i = threadIdx.x / 8, first = threadIdx.x % 8 * 4;
  const float beta = shared.beta[i];
  float qk[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int j = first + n;
    qk[n] = j < i ? shared.sums[0][0][i][j] + shared.sums[1][0][i][j] : j == i ? shared.diagonal[i] : 0.0f;
    shared.relation[i][j] = j < i ? beta * (shared.sums[0][1][i][j] + shared.sums[1][1][i][j]) : 0.0f;
  }
  uint32_t* to = reinterpret_cast<uint32_t*>(data.qk + kda_at32(i, first));
  to[0] = pack_pair(Bf16(), qk[0], qk[1]);
  to[1] = pack_pair(Bf16(), qk[2], qk[3]);
}

// (I + L)^-1 by one warp, a column a lane, row by row.
__device__ void invert(const Shared& shared, KdaChunkData& data) {
  const int lane = threadIdx.x % 32;
  float x[kKdaChunk];
#pragma unroll
  for (int i = 0; i < kKdaChunk; ++i) {
    float sum[4] = {lane == i ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < i; ++j) sum[j % 4] = fmaf(-shared.relation[i][j], x[j], sum[j % 4]);
    x[i] = sum[0] + sum[1] + (sum[2] + sum[3]);
    const SplitPair pair = split_pair(x[i], 0);
    data.solve_high[kda_at32(i, lane)] = static_cast<uint16_t>(pair.high);
    data.solve_low[kda_at32(i, lane)] = static_cast<uint16_t>(pair.low);
  }
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

__device__ void write_values(const Chunk& c, const Shared& shared, const float* unit, Place at, KdaChunkData& data) {
  float2 v[kTokens];
  convolve(c, unit, 2, at, v);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int row = at.token + i;
    const float beta = shared.beta[row];
    *reinterpret_cast<float2*>(data.v[at.channel / kKdaSlice] + kda_value_at(row, at.channel % kKdaSlice)) = {
        beta * v[i].x, beta * v[i].y};
  }
}

// The chunk in slot blockIdx.y of head blockIdx.x.
__device__ void relate_chunk(const KdaCall& call, const KdaPieces& pieces, Shared& shared) {
  const int head = blockIdx.x, slot = blockIdx.y;
  int p = 0;
  while (p + 1 < pieces.count && slot >= pieces.pieces[p + 1].first_slot) ++p;
  const KdaPiece& piece = pieces.pieces[p];
  Chunk c{call, KdaRun(call.sequences, piece.sequence), {}, piece.sequence, head};
  if (c.run.length == 0 || !c.run.prefill) return;
  c.range = kda_chunk(c.run, piece.first_chunk + slot - piece.first_slot);
  if (c.range.begin >= c.range.end) return;
  const float* unit = kda_unit(call.state, call.sequences, piece.sequence, head);
  KdaChunkData& data = static_cast<KdaChunkData*>(pieces.scratch)[static_cast<int64_t>(slot) * call.heads + head];
  if (threadIdx.x < kKdaChunk) {
    const int position = c.range.begin + static_cast<int>(threadIdx.x);
    shared.beta[threadIdx.x] =
        position < c.range.end ? kda_sigmoid(__bfloat162float(call.b.row<__nv_bfloat16>(c.row(position))[head])) : 0.0f;
  }
  const Place at;
  Part part;
  convolve(c, unit, 0, at, part.q);
  convolve(c, unit, 1, at, part.k);
  decays(c, at, part.through);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) part.after[i] = {1, 1};
  normalise(shared, at, part);
  relate(shared, at, part);
  write_relations(shared, data);
  write_rows(shared, at, part, data);
  __syncthreads();
  if (threadIdx.x / 32 == 0) invert(shared, data);
  write_values(c, shared, unit, at, data);
}

__global__ __launch_bounds__(kThreads, 2) void relate_kernel(const __grid_constant__ KdaCall call,
                                                             const __grid_constant__ KdaPieces pieces) {
  extern __shared__ __align__(16) uint8_t memory[];
  if (!pieces.beside_carry) {
    dependency_wait();
    dependency_trigger();
  }
  relate_chunk(call, pieces, *reinterpret_cast<Shared*>(memory));
  if (pieces.beside_carry) dependency_wait();  // complete no earlier than the kernel before, as all others
}

}  // namespace

int64_t kda_scratch_bytes(int64_t num_slots, int64_t heads) {
  return num_slots * heads * static_cast<int64_t>(sizeof(KdaChunkData));
}

cudaError_t kda_load_relate() {
  return allow_shared(relate_kernel, sizeof(Shared));
}

cudaError_t kda_relate(const KdaCall& call, const KdaPieces& pieces, cudaStream_t stream) {
  if (pieces.num_slots == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(pieces.num_slots));
  return launch(relate_kernel, {grid, dim3(kThreads), sizeof(Shared), stream}, call, pieces);
}

}  // namespace perigee

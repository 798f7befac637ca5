// What the tokens of a chunk are to each other. The decay between tokens j < i is that from some point through i times
// that after j to the point. For tokens of different blocks of eight the point is the largest multiple of 16 between
// them, else of 8, and both factors are products of decays, <= 1. Within a block it is the block's middle: a factor may
// be a reciprocal, of at most four decays, and those are taken as 2^-24 at least, so that nothing overflows.
#include "ops/cuda/kda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;  // of a thread, by two channels: a block
constexpr int kHalf = 16;
constexpr int kRow = kKdaDim + 8;  // elements of a row in shared memory: eight rows touch all banks
constexpr int kTail = kKdaTaps - 1;
constexpr int kFactors = 8;    // Left and Right matrices each: 4 within blocks, 2 for 8, 2 for 16 tokens apart
constexpr int kProducts = 10;  // 4, 2 and, all combinations, 4
constexpr float kSmallestDecay = 0x1p-24f;

struct Later {
  uint16_t high[2 * kTokens][kRow], k_low[kTokens][kRow];  // queries, then keys, of a block
};
struct Earlier {
  uint16_t high[kTokens][kRow], low[kTokens][kRow];  // keys
};
struct Factors {
  Later later[kFactors];
  Earlier earlier[kFactors];
};
struct Relations {
  float sums[2][kProducts][2 * kTokens][kTokens];  // [half of the channels][product][q and k][earlier k]
  float relation[kKdaChunk][kKdaChunk];            // L
  float inverse[kKdaChunk][kKdaChunk + 1];         // (I + L)^-1
  float product[kHalf][kHalf + 1];
};
struct Shared {
  union {
    Factors factors;
    Relations relations;  // after them
  };
  float lengths[2][kKdaChunk][4];                // [half of the channels] q.q, k.k, q.k
  float of_block[kKdaChunk / kTokens][kKdaDim];  // decays
  float diagonal[kKdaChunk], beta[kKdaChunk];
};

// A thread's block and channels.
struct Place {
  int block, token, channel;  // first of the thread's

  __device__ Place() {
    const int warp = threadIdx.x / 32;
    block = warp / 2;
    token = block * kTokens;
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
// Beside another's carry nothing was waited for: what earlier kernels wrote is read from L2 (launch.h).
__device__ float2 load_earlier(const float* from) {
  return __ldcg(reinterpret_cast<const float2*>(from));
}
__device__ float2 times(float2 a, float2 b) {
  return {a.x * b.x, a.y * b.y};
}
__device__ float2 times(float a, float2 b) {
  return {a * b.x, a * b.y};
}
__device__ float2 reciprocal(float2 x) {
  return {kda_reciprocal(x.x), kda_reciprocal(x.y)};
}
__device__ float2 silu(float2 x) {
  return {x.x * kda_sigmoid(x.x), x.y * kda_sigmoid(x.y)};
}

// A load that stays where it is among others.
__device__ float2 load_now(const float* from) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from));
  return x;
}

// A thread's part of the batch's rows, all asked for before any is used. kInner: all tokens are there, and those before
// them are rows of the batch too.
struct Inputs {
  float2 qkv[3][kTail + kTokens], a[kTokens];

  template <bool kInner>
  __device__ void load(const Chunk& c, const float* unit, Place at) {
    const int begin = c.range.begin + at.token;
    const int64_t stride = c.call.qkv.row_stride, width = static_cast<int64_t>(c.call.heads) * kKdaDim;
    const int column = c.head * kKdaDim + at.channel;
    const float* const rows = c.call.qkv.row<float>(c.row(begin - kTail)) + column;
    const float* const gates = c.call.a.row<float>(c.row(begin)) + column;
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
      for (int i = 0; i < kTail + kTokens; ++i) {
        const float* from = rows + part * width + i * stride;
        qkv[part][i] = {0, 0};
        if (!kInner) {
          const int position = begin - kTail + i, before = position - c.run.position;
          if (before < -kTail || position >= c.range.end) continue;
          if (before < 0) from = unit + kKdaDim * kKdaDim + (part * kTail + kTail + before) * kKdaDim + at.channel;
        }
        qkv[part][i] = kInner ? load_now(from) : load_earlier(from);
      }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float* const from = gates + i * c.call.a.row_stride;
      a[i] = {0, 0};
      if (kInner) a[i] = load_now(from);
      if (!kInner && begin + i < c.range.end) a[i] = load_earlier(from);
    }
  }
};

// The thread's outputs of the convolution of q, k or v; zeros for tokens that are not there.
template <bool kInner>
__device__ void convolve(const Chunk& c, int part, Place at, const float2 (&x)[kTail + kTokens],
                         float2 (&out)[kTokens]) {
  const int64_t width = static_cast<int64_t>(c.call.heads) * kKdaDim;
  const float* const column = c.call.conv + part * width + c.head * kKdaDim + at.channel;
  float2 taps[kKdaTaps];
#pragma unroll
  for (int j = 0; j < kKdaTaps; ++j) taps[j] = load_pair(column + j * 3 * width);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float2 sum = times(x[i], taps[0]);
#pragma unroll
    for (int j = 1; j < kKdaTaps; ++j) sum = {fmaf(taps[j].x, x[i + j].x, sum.x), fmaf(taps[j].y, x[i + j].y, sum.y)};
    out[i] = kInner || c.range.begin + at.token + i < c.range.end ? silu(sum) : make_float2(0, 0);
  }
}

// A thread's tokens and channels.
struct Part {
  float2 q[kTokens], k[kTokens];
  float2 decay[kTokens];                    // of each token by itself; 1 for those that are not there
  float2 through[kTokens], after[kTokens];  // decays from the block's begin through the token, after it to the end

  template <bool kInner>
  __device__ void decays(const Chunk& c, Place at, const float2 (&a)[kTokens]) {
    const float rate = 1.4426950409f * c.call.rate[c.head];
    const float2 bias = load_pair(c.call.dt_bias + c.head * kKdaDim + at.channel);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      decay[i] = {1, 1};
      if (kInner || c.range.begin + at.token + i < c.range.end)
        decay[i] = {exp2_fast(kda_log_decay(rate, a[i].x + bias.x)), exp2_fast(kda_log_decay(rate, a[i].y + bias.y))};
    }
    through[0] = decay[0];
    after[kTokens - 1] = {1, 1};
#pragma unroll
    for (int i = 1; i < kTokens; ++i) {
      through[i] = times(through[i - 1], decay[i]);
      after[kTokens - 1 - i] = times(after[kTokens - i], decay[kTokens - i]);
    }
  }
};

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

// q and k to length 128^-1/2 and 1; q_i . k_i goes to shared.diagonal. The barrier within shows what was written
// before.
__device__ void normalise(Shared& shared, Place at, Part& part) {
  const int lane = threadIdx.x % 32, half = at.channel / 64;
  float x[kTokens][3], total[3];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float2 q = part.q[i], k = part.k[i];
    x[i][0] = fmaf(q.x, q.x, q.y * q.y);
    x[i][1] = fmaf(k.x, k.x, k.y * k.y);
    x[i][2] = fmaf(q.x, k.x, q.y * k.y);
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
    part.q[i] = times(q, part.q[i]);
    part.k[i] = times(k, part.k[i]);
    if (at.channel == 0) shared.diagonal[at.token + i] = (a.z + b.z) * q * k;
  }
}

__device__ void write_later(Later& to, int i, Place at, const Part& part, float2 factor) {
  const float2 q = times(factor, part.q[i]), k = times(factor, part.k[i]);
  *reinterpret_cast<uint32_t*>(&to.high[i][at.channel]) = pack_pair(Bf16(), q.x, q.y);
  store_split(to.high[kTokens + i], to.k_low[i], at.channel, k.x, k.y);
}
__device__ void write_earlier(Earlier& to, int i, Place at, const Part& part, float2 factor) {
  const float2 k = times(factor, part.k[i]);
  store_split(to.high[i], to.low[i], at.channel, k.x, k.y);
}

// The thread's rows with the decay from the block's begin, or to its end, and across another block.
__device__ void write_block(Later& to, Place at, const Part& part, float2 across) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) write_later(to, i, at, part, times(across, part.through[i]));
}
__device__ void write_block(Earlier& to, Place at, const Part& part, float2 across) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) write_earlier(to, i, at, part, times(across, part.after[i]));
}

// The thread's rows of all products; decays of other blocks are in shared.of_block.
__device__ void write_factors(Shared& shared, Place at, const Part& part) {
  Factors& f = shared.factors;
  constexpr int kMiddle = kTokens / 2;
  float2 from_middle = {1, 1}, to_middle = {1, 1};
#pragma unroll
  for (int n = 0; n < kMiddle; ++n) {
    const int second = kMiddle + n, first = kMiddle - 1 - n;
    const float2 x = part.decay[second], y = part.decay[first];
    from_middle = times(from_middle, {fmaxf(x.x, kSmallestDecay), fmaxf(x.y, kSmallestDecay)});
    write_later(f.later[at.block], second, at, part, from_middle);
    write_earlier(f.earlier[at.block], second, at, part, reciprocal(from_middle));
    write_later(f.later[at.block], first, at, part, reciprocal(to_middle));
    write_earlier(f.earlier[at.block], first, at, part, to_middle);
    to_middle = times(to_middle, {fmaxf(y.x, kSmallestDecay), fmaxf(y.y, kSmallestDecay)});
  }
  // 8 apart: blocks 1 and 3 after 0 and 2; 16 apart: 2 and 3 after 0 and 1. Blocks 0 and 3 reach across another.
  if (at.block == 0) {
    write_block(f.earlier[4], at, part, {1, 1});
    write_block(f.earlier[6], at, part, load_pair(&shared.of_block[1][at.channel]));
  } else if (at.block == 1) {
    write_block(f.later[4], at, part, {1, 1});
    write_block(f.earlier[7], at, part, {1, 1});
  } else if (at.block == 2) {
    write_block(f.earlier[5], at, part, {1, 1});
    write_block(f.later[6], at, part, {1, 1});
  } else {
    write_block(f.later[5], at, part, {1, 1});
    write_block(f.later[7], at, part, load_pair(&shared.of_block[2][at.channel]));
  }
}

// A warp's products, of half of the channels: which of later and earlier rows meet is in kProducts' order.
struct Products {
  static constexpr int kEach = 3;
  float sums[kEach][4];
  int first = static_cast<int>(threadIdx.x) / 64, half = static_cast<int>(threadIdx.x) / 32 % 2;

  __device__ int index(int n) const { return first + 4 * n; }

  __device__ void multiply(const Factors& f) {
    const int lane = threadIdx.x % 32, column = half * 64;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int p = index(n);
      if (p >= kProducts) continue;
      const Later& later = f.later[p < 6 ? p : 6 + (p - 6) / 2];
      const Earlier& earlier = f.earlier[p < 6 ? p : 6 + p % 2];
      const uint32_t a = shared_address(&later.high[lane % 16][column + lane / 16 * 8]);
      const uint32_t a_low = shared_address(&later.k_low[lane % 8][column + lane / 8 % 2 * 8]);
      const uint32_t b = shared_address(&earlier.high[lane / 16 * 8 + lane % 8][column + lane / 8 % 2 * 8]);
      float sum[4] = {}, rest[4] = {}, last[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t high[4], low[2], keys[4];
        load_matrix_x4(high, a + 32 * k);
        load_matrix_x2(low, a_low + 32 * k);
        load_matrix_x4(keys, b + 32 * k);
        mma_16x8x16(Bf16(), sum, high, keys[0], keys[1]);
        mma_16x8x16(Bf16(), rest, high, keys[2], keys[3]);
        mma_16x8x16(Bf16(), last, {0, low[0], 0, low[1]}, keys[0], keys[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = sum[i] + (rest[i] + last[i]);
    }
  }
  __device__ void store(Relations& to) const {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      if (index(n) >= kProducts) continue;
      auto& rows = to.sums[half][index(n)];
      *reinterpret_cast<float2*>(&rows[row][column]) = {sums[n][0], sums[n][1]};
      *reinterpret_cast<float2*>(&rows[row + kTokens][column]) = {sums[n][2], sums[n][3]};
    }
  }
};

// qk and L from the sums of both halves of the channels.
__device__ void write_relations(Shared& shared, KdaChunkData& data) {
  const int i = threadIdx.x / 8, first = threadIdx.x % 8 * 4, later = i / kTokens, earlier = first / kTokens;
  float4 qk = {0, 0, 0, 0}, kk = {0, 0, 0, 0};
  if (earlier <= later) {
    const int product = later == earlier         ? later
                        : (later ^ earlier) == 1 ? 4 + later / 2
                                                 : 6 + (later - 2) * 2 + earlier;
    const auto sum = [&](int row) {
      const float4 a = *reinterpret_cast<const float4*>(&shared.relations.sums[0][product][row][first % kTokens]);
      const float4 b = *reinterpret_cast<const float4*>(&shared.relations.sums[1][product][row][first % kTokens]);
      return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    };
    qk = sum(i % kTokens);
    kk = sum(kTokens + i % kTokens);
  }
  const float beta = shared.beta[i], diagonal = shared.diagonal[i];
  const auto of_qk = [&](int j, float x) { return j < i ? x : j == i ? diagonal : 0.0f; };
  const auto of_kk = [&](int j, float x) { return j < i ? beta * x : 0.0f; };
  *reinterpret_cast<float4*>(&shared.relations.relation[i][first]) = {of_kk(first, kk.x), of_kk(first + 1, kk.y),
                                                                      of_kk(first + 2, kk.z), of_kk(first + 3, kk.w)};
  *reinterpret_cast<uint2*>(data.qk + kda_at32(i, first)) = {
      pack_pair(Bf16(), of_qk(first, qk.x), of_qk(first + 1, qk.y)),
      pack_pair(Bf16(), of_qk(first + 2, qk.z), of_qk(first + 3, qk.w))};
}

// (I + L)^-1 of the two diagonal blocks of 16, by one warp: a column a lane, row by row.
__device__ void invert_blocks(Relations& shared) {
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
__device__ void finish_inverse(Relations& shared, KdaChunkData& data) {
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

// The thread's rows of what the carry kernel reads.
__device__ void write_rows(const Shared& shared, Place at, const Part& part, KdaChunkData& data) {
  float2 before = {1, 1}, later = {1, 1};  // decays of the blocks before and after the thread's
#pragma unroll
  for (int block = 0; block < kKdaChunk / kTokens; ++block) {
    const float2 x = load_pair(&shared.of_block[block][at.channel]);
    if (block < at.block) before = times(before, x);
    if (block > at.block) later = times(later, x);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int row = at.token + i;
    const float2 through = times(before, part.through[i]), after = times(later, part.after[i]);
    const float2 q = times(part.q[i], through), k = times(-shared.beta[row], times(part.k[i], through));
    const float2 end = times(part.k[i], after);
    *reinterpret_cast<uint32_t*>(data.kq_high + kda_at<2 * kKdaChunk>(kKdaChunk + row, at.channel)) =
        pack_pair(Bf16(), q.x, q.y);
    const SplitPair key = split_pair(k.x, k.y);
    *reinterpret_cast<uint32_t*>(data.kq_high + kda_at<2 * kKdaChunk>(row, at.channel)) = key.high;
    *reinterpret_cast<uint32_t*>(data.k_low + kda_at<kKdaChunk>(row, at.channel)) = key.low;
    store_split(data.end_high, data.end_low, kda_at<kKdaChunk>(row, at.channel), end.x, end.y);
  }
  if (at.token + kTokens == kKdaChunk)
    *reinterpret_cast<float2*>(data.decay + at.channel) = times(before, part.through[kTokens - 1]);
}

__device__ void write_values(const Shared& shared, Place at, const float2 (&v)[kTokens], KdaChunkData& data) {
  float* const to = data.v[at.channel / kKdaSlice];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
    *reinterpret_cast<float2*>(to + kda_value_at(at.token + i, at.channel % kKdaSlice)) =
        times(shared.beta[at.token + i], v[i]);
}

template <bool kInner>
__device__ void relate_tokens(const Chunk& c, const float* unit, Shared& shared, KdaChunkData& data) {
  const Place at;
  Part part;
  float2 v[kTokens];
  const int position = c.range.begin + static_cast<int>(threadIdx.x);  // of the token whose beta the thread brings
  const bool brings = threadIdx.x < kKdaChunk && position < c.range.end;
  __nv_bfloat16 b;
  if (brings) b = __ldcg(c.call.b.row<__nv_bfloat16>(c.row(position)) + c.head);
  {
    Inputs in;
    in.load<kInner>(c, unit, at);
    convolve<kInner>(c, 0, at, in.qkv[0], part.q);
    convolve<kInner>(c, 1, at, in.qkv[1], part.k);
    convolve<kInner>(c, 2, at, in.qkv[2], v);
    part.decays<kInner>(c, at, in.a);
  }
  if (threadIdx.x < kKdaChunk) shared.beta[threadIdx.x] = brings ? kda_sigmoid(__bfloat162float(b)) : 0.0f;
  *reinterpret_cast<float2*>(&shared.of_block[at.block][at.channel]) = part.through[kTokens - 1];
  normalise(shared, at, part);
  write_values(shared, at, v, data);
  write_factors(shared, at, part);
  __syncthreads();
  Products products;
  products.multiply(shared.factors);
  __syncthreads();
  products.store(shared.relations);
  __syncthreads();
  write_relations(shared, data);
  __syncthreads();
  if (threadIdx.x / 32 == 0) invert_blocks(shared.relations);
  write_rows(shared, at, part, data);
  __syncthreads();
  finish_inverse(shared.relations, data);
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
    z[i] = __ldcg(reinterpret_cast<const float4*>(c.call.z.row<float>(row) + c.head * kKdaDim) + lane);
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
  if (!pieces.beside_carry) dependency_wait();
  dependency_trigger();
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
  // Complete no earlier than the kernel before, as all others: by the last block, so that none keeps others waiting.
  const bool last = blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y;
  if (pieces.beside_carry && last) dependency_wait();
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

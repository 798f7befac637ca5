#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/kda/kda_chunk.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 512;                // a warp 32 keys of 32 values of the state, a lane eight of four
constexpr int kResident = 2;                 // blocks of a multiprocessor
constexpr int kMaxTokens = 2 * kKdaMaxRing;  // replayed and new
constexpr int kTail = kKdaTaps - 1;
constexpr int kState = kKdaDim * kKdaDim;

struct Shared {
  // Of each token q, k, v, decay: first the convolution's inputs and the log decay (of new tokens `a`), as in a ring;
  // then, each in its place, what they become. q is at last decayed_q.
  float tokens[kMaxTokens][4][kKdaDim];
  float decayed_k[kMaxTokens][kKdaDim];
  float out[kKdaMaxRing][kKdaDim];
  // Of two tokens in turn, what each quarter of the keys reads of the state with decayed_k and with decayed_q.
  float read[2][4][2][kKdaDim];
  float qk[kMaxTokens], beta[kMaxTokens], o_norm[kKdaDim];
};

// One head of one sequence: `count` tokens from the committed one on, of which `replayed` lie in the ring and the rest
// are rows of the batch.
struct Step {
  const KdaCall& call;
  int32_t head;
  KdaRun run;
  int32_t count, replayed, ring_begin;
  int32_t checkpoint = -1;  // after how many tokens run.first_checkpoint is due; never: -1
  uint8_t* ring_base;

  __device__ Step(const KdaCall& c, int32_t sequence, int32_t head_)
      : call(c), head(head_), run(c.sequences, sequence) {
    ring_base = kda_ring(c.state, c.sequences.slots[sequence], head);
    replayed = run.position - run.committed;
    count = replayed + (run.prefill ? 0 : run.rows);
    ring_begin = run.committed - kda_quotient(run.committed, c.state.ring_tokens) * c.state.ring_tokens;
    if (run.first_checkpoint == run.end_checkpoint) return;
    const int at = c.sequences.checkpoint_position[run.first_checkpoint] - run.committed;
    if (at > 0 && at <= replayed) checkpoint = at;
  }
  // Of token i <= 2 ring_tokens.
  __device__ float* ring(int i) const {
    int at = ring_begin + i;
    at -= at >= call.state.ring_tokens ? call.state.ring_tokens : 0;
    at -= at >= call.state.ring_tokens ? call.state.ring_tokens : 0;
    return reinterpret_cast<float*>(ring_base + at * static_cast<int>(call.state.ring_token_bytes));
  }
  __device__ int row(int i) const { return run.first_row + i - replayed; }
};

// A thread's weights: the taps of a channel of q, k or v, or the decay's rate and bias of one.
struct Weights {
  float taps[kKdaTaps];

  __device__ Weights(const KdaCall& call, int part, int column) {
    const int width = call.heads * kKdaDim;
#pragma unroll
    for (int j = 0; j < kKdaTaps; ++j) {
      const int tap = (3 * j + part) * width + column;
      taps[j] = part < 3 ? call.conv[tap] : j == 0 ? call.rate[column / kKdaDim] : call.dt_bias[column];
    }
  }
};

// Brings all tokens into shared memory, four in one go; four floats a thread.
__device__ void fetch_tokens(const Step& s, Shared& shared) {
  const int four = threadIdx.x % kKdaDim, part = four / 32, column = s.head * kKdaDim + four % 32 * 4;
#pragma unroll 1
  for (int t = threadIdx.x / kKdaDim; t < s.count; t += kThreads / kKdaDim) {
    const float* from = s.ring(t) + 4 * four;
    if (t >= s.replayed)
      from = part < 3 ? kda_row(s.call.qkv, s.row(t)) + part * s.call.heads * kKdaDim + column
                      : kda_row(s.call.a, s.row(t)) + column;
    reinterpret_cast<float4*>(shared.tokens[t])[four] = *reinterpret_cast<const float4*>(from);
  }
}

// A channel's last inputs before the committed position, and where they and the checkpoint's lie.
struct Tail {
  float (&window)[kKdaTaps];
  float *at, *checkpoint;
};

// Channel `channel` of part 0, 1, 2 (q, k, v): the convolution of all tokens, in place. The inputs of new tokens go
// into the ring, and the last ones before the committed position into the tail.
__device__ void convolve(const Step& s, const Weights& w, int part, int channel, const Tail& tail, Shared& shared) {
  auto& window = tail.window;
#pragma unroll 1
  for (int t = 0; t < s.count; ++t) {
    float& x = shared.tokens[t][part][channel];
    window[kTail] = x;
    if (t >= s.replayed) s.ring(t)[part * kKdaDim + channel] = x;
    float sum = w.taps[0] * window[0];
#pragma unroll
    for (int j = 1; j < kKdaTaps; ++j) sum = fmaf(w.taps[j], window[j], sum);
    x = sum * kda_sigmoid(sum);
#pragma unroll
    for (int j = 0; j < kTail; ++j) window[j] = window[j + 1];
    if (t + 1 != s.checkpoint && t + 1 != s.replayed) continue;
#pragma unroll
    for (int j = 0; j < kTail; ++j) {
      if (t + 1 == s.checkpoint) tail.checkpoint[j * kKdaDim] = window[j];
      if (t + 1 == s.replayed) tail.at[j * kKdaDim] = window[j];
    }
  }
}

// Decays of a channel, in place of their logarithms, which go into the ring.
__device__ void decays(const Step& s, const Weights& w, int channel, Shared& shared) {
#pragma unroll 1
  for (int t = 0; t < s.count; ++t) {
    float& x = shared.tokens[t][3][channel];
    float g = x;
    if (t >= s.replayed) s.ring(t)[3 * kKdaDim + channel] = g = kda_log_decay(w.taps[0], x + w.taps[1]);
    x = expf(g);
  }
}

// beta of all tokens, by one warp; those of new tokens go into the ring with the rest.
__device__ void betas(const Step& s, Shared& shared) {
  const int t = threadIdx.x % 32;
  if (t < s.replayed)
    shared.beta[t] = s.ring(t)[4 * kKdaDim];
  else if (t < s.count)
    shared.beta[t] = kda_sigmoid(__bfloat162float(s.call.b.row<__nv_bfloat16>(s.row(t))[s.head]));
}

// q and k of token t to length 128^-1/2 and 1, times the token's decay where the state is read with them.
__device__ void normalise(Shared& shared, int t) {
  const int lane = threadIdx.x % 32;
  auto* const token = reinterpret_cast<float4*>(shared.tokens[t]) + lane;
  const float4 q = token[0], k = token[32], decay = token[96];
  const float qq = warp_total(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w);
  const float kk = warp_total(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
  const float qk = warp_total(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
  const float q_scale = 0.08838834764831845f * kda_inverse_root(qq + 1e-6f), k_scale = kda_inverse_root(kk + 1e-6f);
  const float4 key = {k.x * k_scale, k.y * k_scale, k.z * k_scale, k.w * k_scale};
  token[0] = {q.x * q_scale * decay.x, q.y * q_scale * decay.y, q.z * q_scale * decay.z, q.w * q_scale * decay.w};
  token[32] = key;
  reinterpret_cast<float4*>(shared.decayed_k[t])[lane] = {key.x * decay.x, key.y * decay.y, key.z * decay.z,
                                                          key.w * decay.w};
  if (lane == 0) shared.qk[t] = qk * q_scale * k_scale;
}

__device__ void accumulate(float4& sum, float x, const float4& s) {
  sum.x = fmaf(x, s.x, sum.x);
  sum.y = fmaf(x, s.y, sum.y);
  sum.z = fmaf(x, s.z, sum.z);
  sum.w = fmaf(x, s.w, sum.w);
}
__device__ void decay_and_add(float4& s, float decay, float k, const float4& correction) {
  s.x = fmaf(k, correction.x, decay * s.x);
  s.y = fmaf(k, correction.y, decay * s.y);
  s.z = fmaf(k, correction.z, decay * s.z);
  s.w = fmaf(k, correction.w, decay * s.w);
}
__device__ float4 plus(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ float4 shuffle_xor(const float4& x, int mask) {
  return {__shfl_xor_sync(~0u, x.x, mask), __shfl_xor_sync(~0u, x.y, mask), __shfl_xor_sync(~0u, x.z, mask),
          __shfl_xor_sync(~0u, x.w, mask)};
}
__device__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// A lane's part of S [128 keys][128 values]: eight keys from `key` on, four values from `value` on. The four warps of
// the same values hold a quarter of the keys each.
struct StatePart {
  float4 at[8];
  int quarter, key, value;

  __device__ StatePart() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    quarter = warp / 4;
    key = 32 * quarter + lane / 8 * 8;
    value = warp % 4 * 32 + lane % 8 * 4;
  }
  __device__ void load(const float* unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = __ldcs(reinterpret_cast<const float4*>(unit + (key + i) * kKdaDim + value));
  }
  __device__ void store(float* unit) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) __stcs(reinterpret_cast<float4*>(unit + (key + i) * kKdaDim + value), at[i]);
  }

  // What S, decayed, holds at k and, where `out` is not null, at q; the same of the latter whatever is with it. -> the
  // correction of the lane's values: beta (v - k^T decay S). q^T S goes to `out`: it is q^T decay S + (q . k)
  // correction, so that S is passed once.
  __device__ float4 read(Shared& shared, int t, float* out) const {
    const int lane = threadIdx.x % 32;
    float4 held = {}, seen = {};
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 k = load_four(&shared.decayed_k[t][key + i]);
      accumulate(held, k.x, at[i]), accumulate(held, k.y, at[i + 1]);
      accumulate(held, k.z, at[i + 2]), accumulate(held, k.w, at[i + 3]);
    }
    held = plus(held, shuffle_xor(held, 16));
    held = plus(held, shuffle_xor(held, 8));
    auto& sums = shared.read[t % 2];
    if (lane < 8) *reinterpret_cast<float4*>(&sums[quarter][0][value]) = held;
    if (out != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 q = load_four(&shared.tokens[t][0][key + i]);
        accumulate(seen, q.x, at[i]), accumulate(seen, q.y, at[i + 1]);
        accumulate(seen, q.z, at[i + 2]), accumulate(seen, q.w, at[i + 3]);
      }
      seen = plus(seen, shuffle_xor(seen, 16));
      seen = plus(seen, shuffle_xor(seen, 8));
      if (lane < 8) *reinterpret_cast<float4*>(&sums[quarter][1][value]) = seen;
    }
    named_barrier(1 + value / 32, kThreads / 4);
    const auto total = [&](int which) {
      return plus(plus(load_four(&sums[0][which][value]), load_four(&sums[1][which][value])),
                  plus(load_four(&sums[2][which][value]), load_four(&sums[3][which][value])));
    };
    held = total(0);
    const float4 v = load_four(&shared.tokens[t][2][value]);
    const float beta = shared.beta[t];
    const float4 correction = {beta * (v.x - held.x), beta * (v.y - held.y), beta * (v.z - held.z),
                               beta * (v.w - held.w)};
    if (out != nullptr && quarter == 0 && lane < 8) {
      const float qk = shared.qk[t];
      seen = total(1);
      *reinterpret_cast<float4*>(out + value) = {fmaf(qk, correction.x, seen.x), fmaf(qk, correction.y, seen.y),
                                                 fmaf(qk, correction.z, seen.z), fmaf(qk, correction.w, seen.w)};
    }
    return correction;
  }
  // S = decay S + k correction^T
  __device__ void move(const Shared& shared, int t, const float4& correction) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 k = load_four(&shared.tokens[t][1][key + i]), decay = load_four(&shared.tokens[t][3][key + i]);
      decay_and_add(at[i], decay.x, k.x, correction);
      decay_and_add(at[i + 1], decay.y, k.y, correction);
      decay_and_add(at[i + 2], decay.z, k.z, correction);
      decay_and_add(at[i + 3], decay.w, k.w, correction);
    }
  }
};

// All tokens on the state, once they are in shared memory.
__device__ void move_state(const Step& s, StatePart& state, float* unit, float* checkpoint_unit, Shared& shared) {
#pragma unroll 1
  for (int t = 0; t < s.count; ++t) {
    const float4 correction = state.read(shared, t, t >= s.replayed ? shared.out[t - s.replayed] : nullptr);
    if (t + 1 == s.count && t >= s.replayed) break;  // nobody asks for the state after the last
    state.move(shared, t, correction);
    if (t + 1 == s.checkpoint) state.store(checkpoint_unit);
    if (t + 1 == s.replayed) state.store(unit);
  }
}

__global__ __launch_bounds__(kThreads, kResident) void step_kernel(const __grid_constant__ KdaCall call) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int head = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = threadIdx.x / kKdaDim, channel = threadIdx.x % kKdaDim;
  const Weights weights(call, part, head * kKdaDim + channel);
  if (part == 3) shared.o_norm[channel] = call.o_norm[channel];
  dependency_wait();
  dependency_trigger();
  const Step s(call, sequence, head);
  float* unit = kda_unit(call.state, call.sequences, sequence, head);
  if (s.run.length == 0) {  // padding
#pragma unroll 1
    for (int i = warp; i < s.run.rows; i += kThreads / 32)
      reinterpret_cast<uint2*>(call.y.row<uint16_t>(s.run.first_row + i) + head * kKdaDim)[lane] = {0, 0};
    return;
  }
  if (s.count == 0) return;
  StatePart state;
  state.load(unit);
  float window[kKdaTaps] = {};
  float* const tail = unit + kState + part * kTail * kKdaDim + channel;
#pragma unroll
  for (int j = 0; j < kTail; ++j)
    if (part < 3) window[j] = tail[j * kKdaDim];
  fetch_tokens(s, shared);
  if (part == 3 && channel < 32) betas(s, shared);
  float* checkpoint = unit;
  if (s.checkpoint > 0) checkpoint = kda_checkpoint_unit(call.state, call.sequences, s.run.first_checkpoint, head);
  __syncthreads();
  if (part < 3)
    convolve(s, weights, part, channel, {window, tail, checkpoint + (tail - unit)}, shared);
  else
    decays(s, weights, channel, shared);
  const int new_rows = s.count - s.replayed;
  if (static_cast<int>(threadIdx.x) < new_rows)
    s.ring(s.replayed + threadIdx.x)[4 * kKdaDim] = shared.beta[s.replayed + threadIdx.x];
  float4 z = {};
  if (warp < new_rows)
    z = reinterpret_cast<const float4*>(kda_row(call.z, s.run.first_row + warp) + head * kKdaDim)[lane];
  __syncthreads();
  if (warp < s.count) normalise(shared, warp);
  __syncthreads();
  move_state(s, state, unit, checkpoint, shared);
  __syncthreads();
  if (warp >= new_rows) return;
  kda_gated_norm(load_four(&shared.out[warp][4 * lane]), load_four(&shared.o_norm[4 * lane]), call.eps, z,
                 call.y.row<uint16_t>(s.run.first_row + warp) + head * kKdaDim);
}

}  // namespace

cudaError_t kda_load_step() {
  return allow_shared(step_kernel, sizeof(Shared));
}

cudaError_t kda_step(const KdaCall& call, cudaStream_t stream) {
  if (call.num_sequences == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.num_sequences));
  return launch(step_kernel, {grid, dim3(kThreads), sizeof(Shared), stream}, call);
}

}  // namespace perigee

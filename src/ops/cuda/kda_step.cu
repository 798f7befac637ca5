#include "ops/cuda/kda.cuh"
#include "ops/cuda/launch.h"

namespace perigee {
namespace {

constexpr int kThreads = 512;                // a warp eight values of the state, a lane eight keys by four values
constexpr int kMaxTokens = 2 * kKdaMaxRing;  // replayed and new
constexpr int kTail = kKdaTaps - 1;
constexpr int kFetched = 4;  // tokens whose inputs are under way at a time

struct Shared {
  float decay[kMaxTokens][kKdaDim], k[kMaxTokens][kKdaDim], v[kMaxTokens][kKdaDim];
  float decayed_q[kMaxTokens][kKdaDim];  // q until it is normalised
  float decayed_k[kMaxTokens][kKdaDim];
  float out[kKdaMaxRing][kKdaDim];
  float qk[kMaxTokens], beta[kMaxTokens];
};

// One head of one sequence: its tokens [committed, end), of which those before `position` lie in the ring.
struct Step {
  const KdaCall& call;
  int32_t sequence, head;
  KdaRun run;
  int32_t end, count;

  __device__ Step(const KdaCall& c, int32_t sequence_, int32_t head_)
      : call(c), sequence(sequence_), head(head_), run(c.sequences, sequence_) {
    end = run.prefill ? run.position : run.length;
    count = end - run.committed;
  }
  __device__ float* ring(int32_t position) const {
    return reinterpret_cast<float*>(call.state.ring_token(call.sequences.slots[sequence], head, position));
  }
  __device__ int64_t row(int32_t position) const { return run.first_row + position - run.position; }
};

// Channel `channel` of part 0, 1, 2 (q, k, v): the convolution of all tokens, into `out` [tokens][128]. The inputs of
// new tokens go into the ring, and the last ones before the committed position into the tail; only this thread reads
// what it overwrites there.
__device__ void convolve(const Step& s, int part, int channel, float* tail, float* checkpoint_tail,
                         float (*out)[kKdaDim]) {
  const int64_t width = static_cast<int64_t>(s.call.heads) * kKdaDim;
  const int64_t column = part * width + s.head * kKdaDim + channel;
  float taps[kKdaTaps], window[kKdaTaps];
#pragma unroll
  for (int j = 0; j < kKdaTaps; ++j) taps[j] = s.call.conv[j * 3 * width + column];
#pragma unroll
  for (int j = 0; j < kTail; ++j) window[j] = tail[(part * kTail + j) * kKdaDim + channel];
  const auto keep = [&](float* to) {
#pragma unroll
    for (int j = 0; j < kTail; ++j) to[(part * kTail + j) * kKdaDim + channel] = window[j];
  };
  for (int first = 0; first < s.count; first += kFetched) {
    float x[kFetched];
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int32_t position = s.run.committed + first + i;
      if (position >= s.end) continue;
      x[i] = position < s.run.position ? s.ring(position)[part * kKdaDim + channel]
                                       : s.call.qkv.row<float>(s.row(position))[column];
    }
#pragma unroll
    for (int i = 0; i < kFetched; ++i) {
      const int32_t position = s.run.committed + first + i;
      if (position >= s.end) continue;
      if (first + i > 0 && position == s.run.checkpoint && checkpoint_tail != nullptr) keep(checkpoint_tail);
      if (first + i > 0 && position == s.run.position) keep(tail);
      window[kTail] = x[i];
      float sum = taps[0] * window[0];
#pragma unroll
      for (int j = 1; j < kKdaTaps; ++j) sum = fmaf(taps[j], window[j], sum);
      out[first + i][channel] = sum * kda_sigmoid(sum);
#pragma unroll
      for (int j = 0; j < kTail; ++j) window[j] = window[j + 1];
      if (position >= s.run.position) s.ring(position)[part * kKdaDim + channel] = x[i];
    }
  }
  if (s.end != s.run.position) return;  // of a prefill: all tokens count
  if (s.end == s.run.checkpoint && checkpoint_tail != nullptr) keep(checkpoint_tail);
  keep(tail);
}

// Decays of a channel and, by the first thread, beta.
__device__ void gates(const Step& s, int channel, Shared& shared) {
  const int column = s.head * kKdaDim + channel;
  const float rate = s.call.rate[s.head], bias = s.call.dt_bias[column];
  for (int i = 0; i < s.count; ++i) {
    const int32_t position = s.run.committed + i;
    float* ring = s.ring(position);
    float g, beta = 0;
    if (position < s.run.position) {
      g = ring[3 * kKdaDim + channel];
      if (channel == 0) beta = ring[4 * kKdaDim];
    } else {
      const int64_t row = s.row(position);
      g = kda_log_decay(rate, s.call.a.row<float>(row)[column] + bias);
      ring[3 * kKdaDim + channel] = g;
      if (channel == 0) {
        beta = kda_sigmoid(__bfloat162float(s.call.b.row<__nv_bfloat16>(row)[s.head]));
        ring[4 * kKdaDim] = beta;
      }
    }
    shared.decay[i][channel] = expf(g);
    if (channel == 0) shared.beta[i] = beta;
  }
}

// q and k of token t to length 128^-1/2 and 1, times the token's decay where the state is read with them.
__device__ void normalise(Shared& shared, int t) {
  const int lane = threadIdx.x % 32;
  const float4 q = reinterpret_cast<const float4*>(shared.decayed_q[t])[lane];
  const float4 k = reinterpret_cast<const float4*>(shared.k[t])[lane];
  const float4 decay = reinterpret_cast<const float4*>(shared.decay[t])[lane];
  const float qq = warp_total(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w);
  const float kk = warp_total(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
  const float qk = warp_total(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
  const float q_scale = 0.08838834764831845f / sqrtf(qq + 1e-6f), k_scale = 1.0f / sqrtf(kk + 1e-6f);
  const float4 key = {k.x * k_scale, k.y * k_scale, k.z * k_scale, k.w * k_scale};
  reinterpret_cast<float4*>(shared.k[t])[lane] = key;
  reinterpret_cast<float4*>(shared.decayed_k[t])[lane] = {key.x * decay.x, key.y * decay.y, key.z * decay.z,
                                                          key.w * decay.w};
  reinterpret_cast<float4*>(shared.decayed_q[t])[lane] = {q.x * q_scale * decay.x, q.y * q_scale * decay.y,
                                                          q.z * q_scale * decay.z, q.w * q_scale * decay.w};
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
__device__ float4 shuffle_xor(const float4& x, int mask) {
  return {__shfl_xor_sync(~0u, x.x, mask), __shfl_xor_sync(~0u, x.y, mask), __shfl_xor_sync(~0u, x.z, mask),
          __shfl_xor_sync(~0u, x.w, mask)};
}

// A lane's part of S [128 keys][128 values]: keys 4 (lane / 2) + j and those 64 later, values 8 warp + 4 (lane % 2)
// ....
struct StatePart {
  float4 at[8];

  static __device__ int offset(int i) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (64 * (i / 4) + 4 * (lane / 2) + i % 4) * kKdaDim + 8 * warp + 4 * (lane % 2);
  }
  __device__ void load(const float* unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = __ldcg(reinterpret_cast<const float4*>(unit + offset(i)));
  }
  __device__ void store(float* unit) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) __stcg(reinterpret_cast<float4*>(unit + offset(i)), at[i]);
  }

  // S = decay S + k correction^T, correction = beta (v - k^T decay S). q^T S goes to `out` where it is not null: it is
  // q^T decay S + (q . k) correction, so that S is passed once.
  __device__ void move(const Shared& shared, int t, float* out) {
    const int lane = threadIdx.x % 32, group = lane / 2, column = 8 * (threadIdx.x / 32) + 4 * (lane % 2);
    float4 held = {}, seen = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 k = reinterpret_cast<const float4*>(shared.decayed_k[t])[16 * half + group];
      const float4 q = reinterpret_cast<const float4*>(shared.decayed_q[t])[16 * half + group];
      accumulate(held, k.x, at[4 * half]), accumulate(seen, q.x, at[4 * half]);
      accumulate(held, k.y, at[4 * half + 1]), accumulate(seen, q.y, at[4 * half + 1]);
      accumulate(held, k.z, at[4 * half + 2]), accumulate(seen, q.z, at[4 * half + 2]);
      accumulate(held, k.w, at[4 * half + 3]), accumulate(seen, q.w, at[4 * half + 3]);
    }
    // The lower half of the warp sums `held` over the keys, the upper half `seen`.
    const bool upper = lane >= 16;
    float4 sum = upper ? seen : held;
    const float4 given = upper ? held : seen;
    for (int mask = 16; mask >= 2; mask /= 2) {
      const float4 other = shuffle_xor(mask == 16 ? given : sum, mask);
      sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
    }
    const float4 v = *reinterpret_cast<const float4*>(&shared.v[t][column]);
    const float beta = shared.beta[t];
    const float4 own = {beta * (v.x - sum.x), beta * (v.y - sum.y), beta * (v.z - sum.z), beta * (v.w - sum.w)};
    const int from = lane % 16;
    const float4 correction = {__shfl_sync(~0u, own.x, from), __shfl_sync(~0u, own.y, from),
                               __shfl_sync(~0u, own.z, from), __shfl_sync(~0u, own.w, from)};
    if (out != nullptr && (lane == 16 || lane == 17)) {
      const float qk = shared.qk[t];
      *reinterpret_cast<float4*>(out + column) = {fmaf(qk, correction.x, sum.x), fmaf(qk, correction.y, sum.y),
                                                  fmaf(qk, correction.z, sum.z), fmaf(qk, correction.w, sum.w)};
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 k = reinterpret_cast<const float4*>(shared.k[t])[16 * half + group];
      const float4 decay = reinterpret_cast<const float4*>(shared.decay[t])[16 * half + group];
      decay_and_add(at[4 * half], decay.x, k.x, correction);
      decay_and_add(at[4 * half + 1], decay.y, k.y, correction);
      decay_and_add(at[4 * half + 2], decay.z, k.z, correction);
      decay_and_add(at[4 * half + 3], decay.w, k.w, correction);
    }
  }
};

__global__ __launch_bounds__(kThreads, 2) void step_kernel(const __grid_constant__ KdaCall call) {
  __shared__ Shared shared;
  dependency_wait();
  dependency_trigger();
  const int head = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Step s(call, sequence, head);
  if (s.run.length == 0) {  // padding
    for (int i = warp; i < s.run.rows; i += kThreads / 32)
      reinterpret_cast<uint2*>(call.y.row<uint16_t>(s.run.first_row + i) + head * kKdaDim)[lane] = {0, 0};
    return;
  }
  if (s.count == 0) return;
  float* unit = kda_unit(call.state, call.sequences, sequence, head);
  float* checkpoint = nullptr;
  if (s.run.checkpoint > s.run.committed && s.run.checkpoint <= s.run.position)
    checkpoint = kda_checkpoint_unit(call.state, call.sequences, sequence, head);
  StatePart state;
  state.load(unit);
  const int part = threadIdx.x / kKdaDim, channel = threadIdx.x % kKdaDim;
  constexpr int kState = kKdaDim * kKdaDim;
  if (part < 3)
    convolve(s, part, channel, unit + kState, checkpoint != nullptr ? checkpoint + kState : nullptr,
             part == 0   ? shared.decayed_q
             : part == 1 ? shared.k
                         : shared.v);
  else
    gates(s, channel, shared);
  const int replayed = s.run.position - s.run.committed, new_rows = s.end - s.run.position;
  float4 z = {};
  if (warp < new_rows)
    z = reinterpret_cast<const float4*>(call.z.row<float>(s.run.first_row + warp) + head * kKdaDim)[lane];
  __syncthreads();
  if (warp < s.count) normalise(shared, warp);
  __syncthreads();
  for (int t = 0; t < s.count; ++t) {
    state.move(shared, t, t >= replayed ? shared.out[t - replayed] : nullptr);
    if (checkpoint != nullptr && s.run.committed + t + 1 == s.run.checkpoint) state.store(checkpoint);
    if (t + 1 == replayed) state.store(unit);
  }
  __syncthreads();
  if (warp >= new_rows) return;
  kda_gated_norm(call, reinterpret_cast<const float4*>(shared.out[warp])[lane], z,
                 call.y.row<uint16_t>(s.run.first_row + warp) + head * kKdaDim);
}

}  // namespace

cudaError_t kda_load_step() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, step_kernel);
}

cudaError_t kda_step(const KdaCall& call, cudaStream_t stream) {
  if (call.num_sequences == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.num_sequences));
  return launch(step_kernel, {grid, dim3(kThreads), 0, stream}, call);
}

}  // namespace perigee

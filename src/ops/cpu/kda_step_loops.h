// The recurrence of kda_kernels.h, a part of kda_loops.h.
#pragma once

#include <cstring>

#include "ops/cpu/kda_math.h"

namespace perigee::cpu {
namespace {

#ifdef __AVX512F__
constexpr int64_t kStepVectors = 8;  // of a slab: its sums and corrections stay in registers
#else
constexpr int64_t kStepVectors = 2;
#endif

// A pass over one slab of S: with kUpdate S becomes decay S + k correction^T and goes to `to`; with kNext `held` gets
// what the decayed S of the next token holds at its k, and `seen` at its q. Since out = q^T (S + k correction^T) of
// that token is seen + (q . k) correction, one pass a token is enough.
struct KdaPass {
  const float* from = nullptr;
  float* to = nullptr;
  const float* decay = nullptr;
  const float* k = nullptr;
  const float* next_decay = nullptr;
  const float* next_q = nullptr;
  const float* next_k = nullptr;
};

struct KdaSlab {
  V16 correction[kStepVectors], held[kStepVectors], seen[kStepVectors];
};

template <bool kUpdate, bool kNext>
inline void pass(const KdaPass& p, KdaSlab& slab) {
  V16 correction[kStepVectors], held[kStepVectors], seen[kStepVectors];
  for (int64_t n = 0; n < kStepVectors; ++n) {
    correction[n] = slab.correction[n];
    held[n] = seen[n] = all16(0.0f);
  }
  for (int64_t d = 0; d < kKdaDim; ++d) {
    const V16 decay = kUpdate ? all16(p.decay[d]) : all16(0.0f);
    const V16 k = kUpdate ? all16(p.k[d]) : all16(0.0f);
    const V16 next_k = kNext ? all16(p.next_k[d] * p.next_decay[d]) : all16(0.0f);
    const V16 next_q = kNext ? all16(p.next_q[d] * p.next_decay[d]) : all16(0.0f);
#pragma GCC unroll 8
    for (int64_t n = 0; n < kStepVectors; ++n) {
      V16 s = load16(p.from + d * kKdaDim + n * kLanes);
      if (kUpdate) {
        s = fma16(k, correction[n], mul16(decay, s));
        store16(p.to + d * kKdaDim + n * kLanes, s);
      }
      if (kNext) {
        held[n] = fma16(next_k, s, held[n]);
        seen[n] = fma16(next_q, s, seen[n]);
      }
    }
  }
  for (int64_t n = 0; n < kStepVectors; ++n) {
    slab.held[n] = held[n];
    slab.seen[n] = seen[n];
  }
}

void copy_columns(const float* from, int64_t columns, float* to) {
  for (int64_t d = 0; d < kKdaDim; ++d) {
    std::memcpy(to + d * kKdaDim, from + d * kKdaDim, static_cast<size_t>(columns) * sizeof(float));
  }
}

void run_slab(const KdaSteps& s, int64_t column) {
  KdaSlab slab;
  KdaPass p{.from = s.state + column, .next_decay = s.decay, .next_q = s.q, .next_k = s.k};
  for (V16& c : slab.correction) c = all16(0.0f);
  pass<false, true>(p, slab);
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const int64_t row = t * kKdaDim;
    const V16 beta = all16(s.beta[t]);
    for (int64_t n = 0; n < kStepVectors; ++n) {
      slab.correction[n] = mul16(beta, sub16(load16(s.v + row + column + n * kLanes), slab.held[n]));
    }
    if (t >= s.first_output) {
      const V16 qk = all16(dot(s.q + row, s.k + row));
      for (int64_t n = 0; n < kStepVectors; ++n) {
        store16(s.out + row + column + n * kLanes, fma16(qk, slab.correction[n], slab.seen[n]));
      }
    }
    const bool last = t + 1 == s.num_tokens;
    if (last && t >= s.num_commit) return;  // nobody asks for the state after it
    p.to = (t < s.num_commit ? s.state : s.work) + column;
    p.decay = s.decay + row;
    p.k = s.k + row;
    p.next_decay = s.decay + row + kKdaDim;
    p.next_q = s.q + row + kKdaDim;
    p.next_k = s.k + row + kKdaDim;
    last ? pass<true, false>(p, slab) : pass<true, true>(p, slab);
    p.from = p.to;
    if (t + 1 == s.checkpoint) copy_columns(p.from, kStepVectors * kLanes, s.checkpoint_state + column);
  }
}

void steps(const KdaSteps& s) {
  for (int64_t column = 0; column < kKdaDim; column += kStepVectors * kLanes) run_slab(s, column);
}

}  // namespace
}  // namespace perigee::cpu

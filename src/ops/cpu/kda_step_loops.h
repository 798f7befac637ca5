// The recurrence of kda_kernels.h, a part of kda_loops.h.
#pragma once

#include <cstring>

#include "ops/cpu/kda_math.h"

namespace perigee::cpu {
namespace {

#ifdef __AVX512F__
constexpr int64_t kStepVectors = 4;
#else
constexpr int64_t kStepVectors = 2;
#endif
// Columns of a slab: sums and corrections stay in registers, the slab in the first-level cache.
constexpr int64_t kStepColumns = kStepVectors * kLanes;

// A slab of S, in a state (stride kKdaDim) or on its own (stride kStepColumns).
struct KdaSlab {
  float* data = nullptr;
  int64_t stride = 0;
};

// A pass over one slab: with kUpdate S becomes decay S + k correction^T and goes to `to`; with kNext `held` gets what
// the decayed S of the next token holds at its k, and `seen` at its q. Since out = q^T (S + k correction^T) of that
// token is seen + (q . k) correction, one pass a token is enough.
struct KdaPass {
  KdaSlab from, to;
  const float* decay = nullptr;
  const float* k = nullptr;
  const float* next_k = nullptr;  // times the next token's decay, as next_q
  const float* next_q = nullptr;
  const float* ahead = nullptr;  // rows of a state: every ahead_step-th from ahead_first on is brought near
  int64_t ahead_first = 0, ahead_step = kKdaDim;
};

struct KdaSums {
  V16 correction[kStepVectors], held[kStepVectors], seen[kStepVectors];
};

template <bool kUpdate, bool kNext>
void pass(const KdaPass& p, KdaSums& sums) {
  V16 correction[kStepVectors], held[kStepVectors], seen[kStepVectors];
  for (int64_t n = 0; n < kStepVectors; ++n) {
    correction[n] = sums.correction[n];
    held[n] = seen[n] = all16(0.0f);
  }
  for (int64_t d = 0, ahead = p.ahead_first; d < kKdaDim; ++d) {
    const V16 decay = all16(kUpdate ? p.decay[d] : 0.0f), k = all16(kUpdate ? p.k[d] : 0.0f);
    const V16 next_k = all16(kNext ? p.next_k[d] : 0.0f), next_q = all16(kNext ? p.next_q[d] : 0.0f);
    if (kUpdate && d == ahead) {
      for (int64_t n = 0; n < kStepVectors; ++n) __builtin_prefetch(p.ahead + d * kKdaDim + n * kLanes, 0, 2);
      ahead += p.ahead_step;
    }
#pragma GCC unroll 4
    for (int64_t n = 0; n < kStepVectors; ++n) {
      V16 s = load16(p.from.data + d * p.from.stride + n * kLanes);
      if (kUpdate) {
        s = fma16(k, correction[n], mul16(decay, s));
        store16(p.to.data + d * p.to.stride + n * kLanes, s);
      }
      if (kNext) {
        held[n] = fma16(next_k, s, held[n]);
        seen[n] = fma16(next_q, s, seen[n]);
      }
    }
  }
  for (int64_t n = 0; n < kStepVectors; ++n) {
    sums.held[n] = held[n];
    sums.seen[n] = seen[n];
  }
}

void copy_slab(const KdaSlab& from, float* to) {
  for (int64_t d = 0; d < kKdaDim; ++d) {
    std::memcpy(to + d * kKdaDim, from.data + d * from.stride, kStepColumns * sizeof(float));
  }
}

// All tokens on the slab that begins at `column`.
void run_slab(const KdaSteps& s, int64_t column) {
  KdaSums sums;
  for (V16& c : sums.correction) c = all16(0.0f);
  const KdaSlab state{.data = s.state + column, .stride = kKdaDim}, work{.data = s.work, .stride = kStepColumns};
  KdaPass p{.from = state, .next_k = s.decayed_k, .next_q = s.decayed_q};
  pass<false, true>(p, sums);
  p.ahead = column + kStepColumns < kKdaDim ? state.data + kStepColumns : s.ahead;
  p.ahead_step = p.ahead != nullptr ? s.num_tokens : kKdaDim;
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const int64_t row = t * kKdaDim, next = t + 1;
    for (int64_t n = 0; n < kStepVectors; ++n) {
      const V16 error = sub16(load16(s.v + row + column + n * kLanes), sums.held[n]);
      sums.correction[n] = mul16(all16(s.beta[t]), error);
    }
    if (t >= s.first_output) {
      const V16 qk = all16(dot(s.q + row, s.k + row));
      for (int64_t n = 0; n < kStepVectors; ++n) {
        store16(s.out + row + column + n * kLanes, fma16(qk, sums.correction[n], sums.seen[n]));
      }
    }
    const bool last = next == s.num_tokens;
    if (last && t >= s.num_commit) return;  // nobody asks for the state after it
    p.to = next == s.num_commit ? state : work;
    p.decay = s.decay + row;
    p.k = s.k + row;
    p.next_k = s.decayed_k + row + kKdaDim;
    p.next_q = s.decayed_q + row + kKdaDim;
    p.ahead_first = p.ahead != nullptr ? t : kKdaDim;
    last ? pass<true, false>(p, sums) : pass<true, true>(p, sums);
    p.from = p.to;
    if (next == s.checkpoint) copy_slab(p.from, s.checkpoint_state + column);
  }
}

void steps(const KdaSteps& s) {
  for (int64_t i = 0; i < s.num_tokens * kKdaDim; i += kLanes) {
    const V16 decay = load16(s.decay + i);
    store16(s.decayed_q + i, mul16(decay, load16(s.q + i)));
    store16(s.decayed_k + i, mul16(decay, load16(s.k + i)));
  }
  for (int64_t column = 0; column < kKdaDim; column += kStepColumns) run_slab(s, column);
}

}  // namespace
}  // namespace perigee::cpu

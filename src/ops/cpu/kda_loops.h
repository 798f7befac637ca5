// Bodies of kda_kernels.h, included by kda_avx2.cc and kda_avx512.cc.
#pragma once

#include <cmath>
#include <cstring>

#include "ops/cpu/kda_kernels.h"
#include "ops/cpu/vector16.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kDimVectors = kKdaDim / kLanes;
#ifdef __AVX512F__
constexpr int64_t kStepVectors = 8;  // of a slab in the recurrence: its sums and corrections stay in registers
constexpr int64_t kSlabVectors = 4;  // of a slab in the chunk form: S of a slab stays in the first-level cache
constexpr int64_t kProductRows = 4;
#else
constexpr int64_t kStepVectors = 2;
constexpr int64_t kSlabVectors = 1;
constexpr int64_t kProductRows = 4;
#endif
constexpr int64_t kSlab = kSlabVectors * kLanes;

// --- Functions of sixteen numbers, relative error about 2e-7 ---

// e^x, clamped to [2^-126, 2^127]. x = n ln 2 + r, ln 2 in two parts (Cody, Waite 1980); series of e^r.
inline V16 exp16(V16 x) {
  x = max16(all16(-87.33f), x);
  x = min16(all16(88.02f), x);
  const V16 n = nearest16(mul16(x, all16(1.44269504f)));
  V16 r = fma16(n, all16(-0.693359375f), x);
  r = fma16(n, all16(2.12194440e-4f), r);
  V16 p = fma16(all16(1.0f / 5040), r, all16(1.0f / 720));
  p = fma16(p, r, all16(1.0f / 120));
  p = fma16(p, r, all16(1.0f / 24));
  p = fma16(p, r, all16(1.0f / 6));
  p = fma16(p, r, all16(0.5f));
  p = fma16(p, r, all16(1.0f));
  p = fma16(p, r, all16(1.0f));
  return scale16(p, n);
}

inline V16 sigmoid16(V16 x) {
  return reciprocal16(add16(all16(1.0f), exp16(sub16(all16(0.0f), x))));
}

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) = 2 artanh(u / (2 + u)), whose argument is <= 1/3.
inline V16 softplus16(V16 x) {
  const V16 positive = max16(all16(0.0f), x);
  const V16 u = exp16(sub16(x, add16(positive, positive)));  // -|x|
  const V16 s = mul16(u, reciprocal16(add16(all16(2.0f), u)));
  const V16 s2 = mul16(s, s);
  V16 p = fma16(all16(1.0f / 17), s2, all16(1.0f / 15));
  p = fma16(p, s2, all16(1.0f / 13));
  p = fma16(p, s2, all16(1.0f / 11));
  p = fma16(p, s2, all16(1.0f / 9));
  p = fma16(p, s2, all16(1.0f / 7));
  p = fma16(p, s2, all16(1.0f / 5));
  p = fma16(p, s2, all16(1.0f / 3));
  p = fma16(p, s2, all16(1.0f));
  return fma16(add16(s, s), p, positive);
}

inline float dot(const float* a, const float* b) {
  V16 sum = mul16(load16(a), load16(b));
  for (int64_t i = kLanes; i < kKdaDim; i += kLanes) sum = fma16(load16(a + i), load16(b + i), sum);
  return sum16(sum);
}

// --- What comes before and after the recurrence ---

void convolve(const KdaConvolution& c) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    V16 weight[kKdaTaps], window[kKdaTaps];
    for (int64_t j = 0; j < kKdaTaps; ++j) weight[j] = load16(c.weights + j * c.stride + i);
    for (int64_t j = 0; j + 1 < kKdaTaps; ++j) window[j] = load16(c.rows[j] + i);
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      window[kKdaTaps - 1] = load16(c.rows[t + kKdaTaps - 1] + i);
      V16 sum = mul16(weight[0], window[0]);
      for (int64_t j = 1; j < kKdaTaps; ++j) sum = fma16(weight[j], window[j], sum);
      for (int64_t j = 0; j + 1 < kKdaTaps; ++j) window[j] = window[j + 1];
      store16(c.out + t * kKdaDim + i, mul16(sum, sigmoid16(sum)));
    }
  }
}

void normalise(float* rows, int64_t num_rows, float gain) {
  for (float* x = rows; x < rows + num_rows * kKdaDim; x += kKdaDim) {
    const V16 scale = all16(gain / std::sqrt(dot(x, x) + 1e-6f));
    for (int64_t i = 0; i < kKdaDim; i += kLanes) store16(x + i, mul16(load16(x + i), scale));
  }
}

void log_decay(const float* a, const float* bias, float rate, float* g) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    store16(g + i, mul16(all16(-rate), softplus16(add16(load16(a + i), load16(bias + i)))));
  }
}

void exponential(const float* x, float* y) {
  for (int64_t i = 0; i < kKdaDim; i += kLanes) store16(y + i, exp16(load16(x + i)));
}

void gated_norm(const float* o, const float* weight, const float* z, float eps, float* out) {
  const V16 scale = all16(1.0f / std::sqrt(dot(o, o) * (1.0f / kKdaDim) + eps));
  for (int64_t i = 0; i < kKdaDim; i += kLanes) {
    const V16 y = mul16(mul16(load16(o + i), scale), load16(weight + i));
    store16(out + i, mul16(y, sigmoid16(load16(z + i))));
  }
}

// --- The recurrence ---

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

// --- The chunk form ---

void to_slabs(const float* state, float* slabs) {
  for (int64_t column = 0; column < kKdaDim; column += kSlab) {
    for (int64_t d = 0; d < kKdaDim; ++d, slabs += kSlab) {
      std::memcpy(slabs, state + d * kKdaDim + column, kSlab * sizeof(float));
    }
  }
}

void from_slabs(const float* slabs, float* state) {
  for (int64_t column = 0; column < kKdaDim; column += kSlab) {
    for (int64_t d = 0; d < kKdaDim; ++d, slabs += kSlab) {
      std::memcpy(state + d * kKdaDim + column, slabs, kSlab * sizeof(float));
    }
  }
}

// Row i of qk and kk. Lane j of left[d] is k_j decayed through token i: earlier lanes decay once more with each i, lane
// i begins with k_i, and the lanes after it hold what is overwritten when their turn comes.
void relate_row(const float* q, const float* k, const float* decay, int64_t i, KdaChunk& chunk) {
  constexpr int64_t kChains = 4;  // sums that do not wait for each other
  V16 qk[kChains], kk[kChains];
  for (int64_t c = 0; c < kChains; ++c) qk[c] = kk[c] = all16(0.0f);
  for (int64_t d = 0; d < kKdaDim; d += kChains) {
    for (int64_t c = 0; c < kChains; ++c) {
      const V16 new_k = all16(k[d + c]);
      const V16 left = multiply_first16(i, load16(chunk.left[d + c]), all16(decay[d + c]), new_k);
      store16(chunk.left[d + c], left);
      qk[c] = fma16(all16(q[d + c]), left, qk[c]);
      kk[c] = fma16(new_k, left, kk[c]);
    }
  }
  store16(chunk.qk[i], add16(add16(qk[0], qk[1]), add16(qk[2], qk[3])));
  store16(chunk.kk[i], add16(add16(kk[0], kk[1]), add16(kk[2], kk[3])));
}

void relate(const float* q, const float* k, const float* decay, KdaChunk& chunk) {
  std::memset(chunk.left, 0, sizeof(chunk.left));
  for (int64_t i = 0; i < kKdaChunk; ++i) {
    relate_row(q + i * kKdaDim, k + i * kKdaDim, decay + i * kKdaDim, i, chunk);
  }
  for (int64_t d = 0; d < kKdaDim; d += kLanes) {
    V16 total = all16(1.0f);
    for (int64_t i = 0; i < kKdaChunk; ++i) {
      total = mul16(total, load16(decay + i * kKdaDim + d));
      store16(chunk.q[i] + d, mul16(total, load16(q + i * kKdaDim + d)));
      store16(chunk.k[i] + d, mul16(total, load16(k + i * kKdaDim + d)));
    }
    store16(chunk.decay + d, total);
  }
}

// out [rows][kSlab] = a [rows][kKdaDim] slab [kKdaDim][kSlab]
void read_state(const float* a, int64_t rows, const float* slab, float* out) {
  for (int64_t i = 0; i < rows; i += kProductRows) {
    V16 acc[kProductRows][kSlabVectors];
    for (auto& row : acc) {
      for (V16& x : row) x = all16(0.0f);
    }
    for (int64_t d = 0; d < kKdaDim; ++d) {
      V16 s[kSlabVectors];
      for (int64_t n = 0; n < kSlabVectors; ++n) s[n] = load16(slab + d * kSlab + n * kLanes);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kProductRows; ++r) {
        const V16 x = all16(a[(i + r) * kKdaDim + d]);
#pragma GCC unroll 8
        for (int64_t n = 0; n < kSlabVectors; ++n) acc[r][n] = fma16(x, s[n], acc[r][n]);
      }
    }
    for (int64_t r = 0; r < kProductRows; ++r) {
      for (int64_t n = 0; n < kSlabVectors; ++n) store16(out + (i + r) * kSlab + n * kLanes, acc[r][n]);
    }
  }
}

// slab = decay slab + left corrections [kKdaChunk][kSlab]
void move_state(const KdaChunk& chunk, const float* corrections, float* slab) {
  for (int64_t d = 0; d < kKdaDim; d += kProductRows) {
    V16 acc[kProductRows][kSlabVectors];
    for (int64_t r = 0; r < kProductRows; ++r) {
      const V16 decay = all16(chunk.decay[d + r]);
      for (int64_t n = 0; n < kSlabVectors; ++n) acc[r][n] = mul16(decay, load16(slab + (d + r) * kSlab + n * kLanes));
    }
    for (int64_t j = 0; j < kKdaChunk; ++j) {
      V16 c[kSlabVectors];
      for (int64_t n = 0; n < kSlabVectors; ++n) c[n] = load16(corrections + j * kSlab + n * kLanes);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kProductRows; ++r) {
        const V16 x = all16(chunk.left[d + r][j]);
#pragma GCC unroll 8
        for (int64_t n = 0; n < kSlabVectors; ++n) acc[r][n] = fma16(x, c[n], acc[r][n]);
      }
    }
    for (int64_t r = 0; r < kProductRows; ++r) {
      for (int64_t n = 0; n < kSlabVectors; ++n) store16(slab + (d + r) * kSlab + n * kLanes, acc[r][n]);
    }
  }
}

// One chunk on one slab, whose first column is `column`: corrections_i = beta_i (v_i - k_i^T S - sum over j < i of
// kk_ij corrections_j), row by row; out_i = q_i^T S + sum over j <= i of qk_ij corrections_j.
void apply_chunk(const KdaChunk& chunk, const float* v, const float* beta, float* slab, float* out) {
  alignas(64) float held[kKdaChunk * kSlab], seen[kKdaChunk * kSlab], corrections[kKdaChunk * kSlab];
  read_state(chunk.k[0], kKdaChunk, slab, held);
  read_state(chunk.q[0], kKdaChunk, slab, seen);
  for (int64_t i = 0; i < kKdaChunk; ++i) {
    V16 c[kSlabVectors], o[kSlabVectors];
    for (int64_t n = 0; n < kSlabVectors; ++n) {
      c[n] = sub16(load16(v + i * kKdaDim + n * kLanes), load16(held + i * kSlab + n * kLanes));
      o[n] = load16(seen + i * kSlab + n * kLanes);
    }
    for (int64_t j = 0; j < i; ++j) {
      const V16 kk = all16(-chunk.kk[i][j]), qk = all16(chunk.qk[i][j]);
      for (int64_t n = 0; n < kSlabVectors; ++n) {
        const V16 earlier = load16(corrections + j * kSlab + n * kLanes);
        c[n] = fma16(kk, earlier, c[n]);
        o[n] = fma16(qk, earlier, o[n]);
      }
    }
    const V16 scale = all16(beta[i]), qk = all16(chunk.qk[i][i]);
    for (int64_t n = 0; n < kSlabVectors; ++n) {
      c[n] = mul16(scale, c[n]);
      store16(corrections + i * kSlab + n * kLanes, c[n]);
      store16(out + i * kKdaDim + n * kLanes, fma16(qk, c[n], o[n]));
    }
  }
  move_state(chunk, corrections, slab);
}

void apply(const KdaPiece& p) {
  float* slab = p.slabs;
  for (int64_t column = 0; column < kKdaDim; column += kSlab, slab += kKdaDim * kSlab) {
    for (int64_t c = 0; c < p.num_chunks; ++c) {
      const int64_t first = c * kKdaChunk;
      apply_chunk(p.chunks[c], p.v + first * kKdaDim + column, p.beta + first, slab, p.out + first * kKdaDim + column);
    }
  }
}

constexpr KdaKernels kKdaLoops = {
    .convolve = convolve,
    .normalise = normalise,
    .log_decay = log_decay,
    .exponential = exponential,
    .steps = steps,
    .to_slabs = to_slabs,
    .from_slabs = from_slabs,
    .relate = relate,
    .apply = apply,
    .gated_norm = gated_norm,
};

}  // namespace
}  // namespace perigee::cpu

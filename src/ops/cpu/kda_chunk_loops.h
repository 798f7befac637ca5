// The chunk form of kda_kernels.h, a part of kda_loops.h.
#pragma once

#include <cstring>

#include "ops/cpu/kda_math.h"

namespace perigee::cpu {
namespace {

#ifdef __AVX512F__
constexpr int64_t kSlabVectors = 4;  // S of a slab stays in the first-level cache
#else
constexpr int64_t kSlabVectors = 1;
#endif
constexpr int64_t kSlab = kSlabVectors * kLanes;
constexpr int64_t kProductRows = 4;  // rows times kSlabVectors sums stay in registers

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

// Rows [first, first + kProductRows) of qk and kk. Lane j of left[d] is k_j decayed through the last row: with each row
// i earlier lanes decay once more, lane i begins with k_i, and later lanes hold what is overwritten in their turn.
void relate_rows(const float* q, const float* k, const float* decay, int64_t first, KdaRelations& out) {
  V16 qk[kProductRows], kk[kProductRows];
  for (int64_t r = 0; r < kProductRows; ++r) qk[r] = kk[r] = all16(0.0f);
  for (int64_t d = 0; d < kKdaDim; ++d) {
    V16 left = load16(out.left[d]);
#pragma GCC unroll 4
    for (int64_t r = 0; r < kProductRows; ++r) {
      const int64_t at = (first + r) * kKdaDim + d;
      const V16 new_k = all16(k[at]);
      left = multiply_first16(first + r, left, all16(decay[at]), new_k);
      qk[r] = fma16(all16(q[at]), left, qk[r]);
      kk[r] = fma16(new_k, left, kk[r]);
    }
    store16(out.left[d], left);
  }
  for (int64_t r = 0; r < kProductRows; ++r) {
    store16(out.qk[first + r], qk[r]);
    store16(out.kk[first + r], kk[r]);
  }
}

void relate(const float* q, const float* k, const float* decay, KdaRelations& out) {
  std::memset(out.left, 0, sizeof(out.left));
  for (int64_t first = 0; first < kKdaChunk; first += kProductRows) relate_rows(q, k, decay, first, out);
  for (int64_t d = 0; d < kKdaDim; d += kLanes) {
    V16 total = all16(1.0f);
    for (int64_t i = 0; i < kKdaChunk; ++i) {
      total = mul16(total, load16(decay + i * kKdaDim + d));
      store16(out.q[i] + d, mul16(total, load16(q + i * kKdaDim + d)));
      store16(out.k[i] + d, mul16(total, load16(k + i * kKdaDim + d)));
    }
    store16(out.decay + d, total);
  }
}

// Walks through the tokens of a KdaAhead.
struct KdaFetch {
  const KdaAhead& ahead;
  int64_t next = 0;
};

// out [kKdaChunk][kSlab] = a [kKdaChunk][kKdaDim] slab [kKdaDim][kSlab]; meanwhile some tokens are fetched.
void read_state(const float* a, const float* slab, KdaFetch& fetch, float* out) {
  for (int64_t i = 0; i < kKdaChunk; i += kProductRows) {
    const float* fetched[KdaAhead::kStreams] = {};
    const bool fetches = fetch.next < fetch.ahead.num_tokens;
    for (int64_t f = 0; fetches && f < KdaAhead::kStreams; ++f) {
      fetched[f] = fetch.ahead.begin[f] + fetch.next * fetch.ahead.stride[f];
    }
    ++fetch.next;
    V16 acc[kProductRows][kSlabVectors];
    for (auto& row : acc) {
      for (V16& x : row) x = all16(0.0f);
    }
    for (int64_t d = 0; d < kKdaDim; ++d) {
      if (fetches && d % kLanes == 0) {
        for (const float* row : fetched) __builtin_prefetch(row + d, 0, 2);
      }
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
void move_state(const KdaRelations& chunk, const float* corrections, float* slab) {
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

// One slab, whose first column is `column`: corrections_i = beta_i (v_i - k_i^T S - sum over j < i of kk_ij
// corrections_j), row by row; out_i = q_i^T S + sum over j <= i of qk_ij corrections_j.
void apply_slab(const KdaChunk& chunk, int64_t column, KdaFetch& fetch, float* slab) {
  alignas(64) float held[kKdaChunk * kSlab], seen[kKdaChunk * kSlab], corrections[kKdaChunk * kSlab];
  const KdaRelations& relations = *chunk.relations;
  read_state(relations.k[0], slab, fetch, held);
  read_state(relations.q[0], slab, fetch, seen);
  for (int64_t i = 0; i < kKdaChunk; ++i) {
    V16 c[kSlabVectors], o[kSlabVectors];
    for (int64_t n = 0; n < kSlabVectors; ++n) {
      c[n] = sub16(load16(chunk.v + i * kKdaDim + column + n * kLanes), load16(held + i * kSlab + n * kLanes));
      o[n] = load16(seen + i * kSlab + n * kLanes);
    }
    for (int64_t j = 0; j < i; ++j) {
      const V16 kk = all16(-relations.kk[i][j]), qk = all16(relations.qk[i][j]);
      for (int64_t n = 0; n < kSlabVectors; ++n) {
        const V16 earlier = load16(corrections + j * kSlab + n * kLanes);
        c[n] = fma16(kk, earlier, c[n]);
        o[n] = fma16(qk, earlier, o[n]);
      }
    }
    const V16 scale = all16(chunk.beta[i]), qk = all16(relations.qk[i][i]);
    for (int64_t n = 0; n < kSlabVectors; ++n) {
      c[n] = mul16(scale, c[n]);
      store16(corrections + i * kSlab + n * kLanes, c[n]);
      store16(chunk.out + i * kKdaDim + column + n * kLanes, fma16(qk, c[n], o[n]));
    }
  }
  move_state(relations, corrections, slab);
}

void apply(const KdaChunk& chunk) {
  KdaFetch fetch{.ahead = chunk.ahead};
  for (int64_t column = 0; column < kKdaDim; column += kSlab) {
    apply_slab(chunk, column, fetch, chunk.slabs + column * kKdaDim);
  }
}

}  // namespace
}  // namespace perigee::cpu

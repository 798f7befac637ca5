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

}  // namespace
}  // namespace perigee::cpu

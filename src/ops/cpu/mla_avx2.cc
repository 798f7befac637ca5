#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLanes = 8;  // columns of a vector: half a panel

constexpr int64_t kPackedK = 128, kPackedColumns = 2 * kPanel, kPackedRows = 16;

__m256 even(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

__m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u))));
}

__m256i pair_at(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return _mm256_set1_epi32(pair);
}

__m256 widened(const uint16_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

__m256i words_at(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Few rows: kRows by kVectors vectors of columns, from vector `first` on, both operands widened as they are read. The
// sum of the terms of A is exact: each has 8 bits.
template <int kRows, int kVectors, bool kTerms>
void block(const Product& p, int64_t row, int64_t first) {
  const auto column = [&](int v) { return (first + v) * kLanes; };
  const uint16_t *a = p.a + row * p.a_stride, *a_low = kTerms ? p.a_low + row * p.a_stride : nullptr;
  float* c = p.c + row * p.c_stride;
  const uint32_t* b[kVectors];
  __m256 sum[kRows][kVectors];
  for (int v = 0; v < kVectors; ++v) {
    b[v] = p.b + column(v) / kPanel * p.panel_stride + column(v) % kPanel;
    for (int r = 0; r < kRows; ++r)
      sum[r][v] = p.accumulate ? _mm256_loadu_ps(c + r * p.c_stride + column(v)) : _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < p.k; k += 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i both = pair_at(a + r * p.a_stride + k);
      __m256 x0 = even(both), x1 = odd(both);
      if constexpr (kTerms) {
        const __m256i low = pair_at(a_low + r * p.a_stride + k);
        x0 = _mm256_add_ps(x0, even(low));
        x1 = _mm256_add_ps(x1, odd(low));
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256i w = words_at(b[v] + k / 2 * kPanel);
        sum[r][v] = _mm256_fmadd_ps(x0, even(w), sum[r][v]);
        sum[r][v] = _mm256_fmadd_ps(x1, odd(w), sum[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(c + r * p.c_stride + column(v), sum[r][v]);
}

// kRows rows by all vectors of columns from `first` on.
template <int kRows, int kVectors, bool kTerms>
void strip(const Product& p, int64_t row, int64_t first, int64_t vectors) {
  for (; first + kVectors <= vectors; first += kVectors) block<kRows, kVectors, kTerms>(p, row, first);
  if constexpr (kVectors > 1) strip<kRows, kVectors / 2, kTerms>(p, row, first, vectors);
}

template <bool kTerms>
void multiply_few(const Product& p) {
  const int64_t vectors = (p.columns + kLanes - 1) / kLanes, fours = p.m / 4 * 4;
  for (int64_t row = 0; row < fours; row += 4) strip<4, 2, kTerms>(p, row, 0, vectors);
  if ((p.m & 2) != 0) strip<2, 4, kTerms>(p, fours, 0, vectors);
  if ((p.m & 1) != 0) strip<1, 8, kTerms>(p, p.m - 1, 0, vectors);
}

// 16 rows of A and two panels of B, for up to 128 k, widened once and met by many.
struct Packed {
  alignas(32) float a[kPackedRows][kPackedK];
  alignas(32) float b[kPackedK][kPackedColumns];
};

void widen_rows(const Product& p, int64_t row, int64_t k, int64_t depth, Packed& to) {
  for (int64_t r = 0; r < kPackedRows; ++r) {
    const int64_t at = (row + r) * p.a_stride + k;
    for (int64_t i = 0; i < depth; i += kLanes) {
      __m256 x = widened(p.a + at + i);
      if (p.a_low != nullptr) x = _mm256_add_ps(x, widened(p.a_low + at + i));
      _mm256_store_ps(&to.a[r][i], x);
    }
  }
}

void widen_panels(const Product& p, int64_t panel, int64_t panels, int64_t k, int64_t depth, Packed& to) {
  for (int64_t v = 0; v < panels * kPanel; v += kLanes) {
    const int64_t from = (panel + v / kPanel) * p.panel_stride + k / 2 * kPanel + v % kPanel;
    for (int64_t i = 0; i < depth; i += 2) {
      const __m256i w = words_at(p.b + from + i / 2 * kPanel);
      __m256 w0 = even(w), w1 = odd(w);
      if (p.b_low != nullptr) {
        const __m256i low = words_at(p.b_low + from + i / 2 * kPanel);
        w0 = _mm256_add_ps(w0, even(low));
        w1 = _mm256_add_ps(w1, odd(low));
      }
      _mm256_store_ps(&to.b[i][v], w0);
      _mm256_store_ps(&to.b[i + 1][v], w1);
    }
  }
}

// Twelve sums (six rows) hide how long each takes.
template <int kRows>
void packed_block(const Packed& from, int64_t row, int64_t column, int64_t depth, float* c, int64_t stride, bool add) {
  __m256 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) sum[r][v] = add ? _mm256_loadu_ps(c + r * stride + v * kLanes) : _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    const __m256 w0 = _mm256_load_ps(&from.b[k][column]), w1 = _mm256_load_ps(&from.b[k][column + kLanes]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 x = _mm256_broadcast_ss(&from.a[row + r][k]);
      sum[r][0] = _mm256_fmadd_ps(x, w0, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(x, w1, sum[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(c + r * stride + v * kLanes, sum[r][v]);
  }
}

void multiply_packed(const Product& p) {
  static thread_local Packed packed;
  for (int64_t panel = 0; panel < p.panels(); panel += 2) {
    const int64_t panels = p.panels() - panel < 2 ? 1 : 2;
    for (int64_t k = 0; k < p.k; k += kPackedK) {
      const int64_t depth = p.k - k < kPackedK ? p.k - k : kPackedK;
      const bool add = p.accumulate || k > 0;
      widen_panels(p, panel, panels, k, depth, packed);
      for (int64_t row = 0; row < p.m; row += kPackedRows) {
        widen_rows(p, row, k, depth, packed);
        for (int64_t v = 0; v < panels * kPanel; v += kPanel) {
          float* c = p.c + row * p.c_stride + panel * kPanel + v;
          packed_block<6>(packed, 0, v, depth, c, p.c_stride, add);
          packed_block<6>(packed, 6, v, depth, c + 6 * p.c_stride, p.c_stride, add);
          packed_block<4>(packed, 12, v, depth, c + 12 * p.c_stride, p.c_stride, add);
        }
      }
    }
  }
}

// An element is one chain of fused products over k either way.
void multiply(const Product& p) {
  if (p.m >= kPackedRows || p.b_low != nullptr) return multiply_packed(p);
  p.a_low != nullptr ? multiply_few<true>(p) : multiply_few<false>(p);
}

// Queries stay rows: a score is a dot product along the key's row. Of sixteen numbers the even ones come first, then
// the odd ones, both widened.
int64_t query_words(int64_t depth) {
  return depth * kPanel;
}

void pack_queries(const uint16_t* const* rows, int64_t k, int64_t depth, uint32_t* queries) {
  for (int64_t r = 0; r < kPanel; ++r) {
    for (int64_t i = 0; i < depth; ++i) {
      const uint32_t bits = rows[r] == nullptr || i >= k ? 0 : static_cast<uint32_t>(rows[r][i]) << 16;
      queries[r * depth + i / 16 * 16 + i % 2 * kLanes + i % 16 / 2] = bits;
    }
  }
}

// The sums of eight vectors, each over its lanes in the same order.
__m256 sums_of(const __m256* of) {
  __m256 by_two[4], by_four[2];
  for (int i = 0; i < 4; ++i)
    by_two[i] =
        _mm256_add_ps(_mm256_unpacklo_ps(of[2 * i], of[2 * i + 1]), _mm256_unpackhi_ps(of[2 * i], of[2 * i + 1]));
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(by_two[2 * i]), b = _mm256_castps_pd(by_two[2 * i + 1]);
    by_four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(by_four[0], by_four[1], 0x20),
                       _mm256_permute2f128_ps(by_four[0], by_four[1], 0x31));
}

// Two keys by four queries.
void score_block(const Scores& p, int64_t key, int64_t query) {
  const uint16_t* keys = p.keys.rows + key * p.keys.stride;
  const auto* queries = reinterpret_cast<const float*>(p.queries) + query * p.depth;
  __m256 sum[8];
  for (__m256& one : sum) one = _mm256_setzero_ps();
  for (int64_t k = 0; k < p.depth; k += 2 * kLanes) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + j * p.keys.stride + k));
      const __m256 x0 = even(x), x1 = odd(x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sum[4 * j + i] = _mm256_fmadd_ps(x0, _mm256_loadu_ps(queries + i * p.depth + k), sum[4 * j + i]);
        sum[4 * j + i] = _mm256_fmadd_ps(x1, _mm256_loadu_ps(queries + i * p.depth + k + kLanes), sum[4 * j + i]);
      }
    }
  }
  const __m256 all = sums_of(sum);
  float* out = p.out + key * p.out_stride + query;
  _mm_storeu_ps(out, _mm256_castps256_ps128(all));
  _mm_storeu_ps(out + p.out_stride, _mm256_extractf128_ps(all, 1));
}

void scores(const Scores& p) {
  for (int64_t query = 0; query < p.num_queries; query += 4)
    for (int64_t key = 0; key < p.num_keys; key += 2) score_block(p, key, query);
}

// kQueries queries by sixteen columns, over the keys of one block. `weights` [kQueries, kBlockKeys].
template <int kQueries>
void value_block(const Values& p, int64_t key, int64_t query, int64_t column, const float* weights, bool accumulate) {
  const BlockRows& block = p.blocks[key / kBlockKeys];
  const int64_t num_keys = p.num_keys - key < kBlockKeys ? p.num_keys - key : kBlockKeys;
  float* out = p.out + query * p.out_stride + column;
  __m256 sum[kQueries][2];
  for (int q = 0; q < kQueries; ++q) {
    for (int v = 0; v < 2; ++v)
      sum[q][v] = accumulate ? _mm256_loadu_ps(out + q * p.out_stride + v * kLanes) : _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < num_keys; ++k) {
    const uint16_t* row = block.rows + k * block.stride + column;
    const __m256 x0 = widened(row), x1 = widened(row + kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const __m256 w = _mm256_broadcast_ss(weights + q * kBlockKeys + k);
      sum[q][0] = _mm256_fmadd_ps(w, x0, sum[q][0]);
      sum[q][1] = _mm256_fmadd_ps(w, x1, sum[q][1]);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(out + q * p.out_stride + v * kLanes, sum[q][v]);
}

// Six queries at a time: twelve sums hide how long each takes.
template <int kQueries>
void values_of_queries(const Values& p, int64_t key, int64_t query) {
  alignas(32) float weights[kQueries * kBlockKeys];
  for (; query + kQueries <= p.num_queries; query += kQueries) {
    for (int64_t q = 0; q < kQueries; ++q) {
      for (int64_t k = 0; k < kBlockKeys && key + k < p.num_keys; ++k)
        weights[q * kBlockKeys + k] = exact_float(p.weights[(query + q) * p.weight_stride + key + k]);
    }
    for (int64_t column = 0; column < p.columns; column += kPanel)
      value_block<kQueries>(p, key, query, column, weights, p.accumulate || key > 0);
  }
  if constexpr (kQueries > 1) values_of_queries<kQueries / 2>(p, key, query);
}

void values(const Values& p) {
  for (int64_t key = 0; key < p.num_keys; key += kBlockKeys) values_of_queries<6>(p, key, 0);
}

}  // namespace

const MlaKernels kMlaAvx2 = mla_loops({.multiply = multiply,
                                       .query_words = query_words,
                                       .pack_queries = pack_queries,
                                       .scores = scores,
                                       .values = values});

}  // namespace perigee::cpu

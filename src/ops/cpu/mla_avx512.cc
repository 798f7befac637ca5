#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

__m512bh pair_at(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// kRows rows by kPanels panels in registers.
template <int kRows, int kPanels>
void block(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a = p.a + row * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  __m512 sum[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int n = 0; n < kPanels; ++n) {
      sum[r][n] = p.accumulate ? _mm512_loadu_ps(c + r * p.c_stride + n * kPanel) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < p.k; k += 2, b += kPanel) {
    __m512bh w[kPanels];
    for (int n = 0; n < kPanels; ++n) w[n] = (__m512bh)_mm512_loadu_si512(b + n * p.panel_stride);
    for (int r = 0; r < kRows; ++r) {
      const __m512bh both = pair_at(a + r * p.a_stride + k);
      for (int n = 0; n < kPanels; ++n) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], both, w[n]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int n = 0; n < kPanels; ++n) _mm512_storeu_ps(c + r * p.c_stride + n * kPanel, sum[r][n]);
  }
}

void multiply_one(const Product& p) {
  int64_t panel = 0;
  if (p.m <= 4)  // a batch of few tokens
    for (; panel + 4 <= p.panels(); panel += 4) block<4, 4>(p, 0, panel);
  for (; panel + 2 <= p.panels(); panel += 2) {
    for (int64_t row = 0; row < p.m; row += 8) block<8, 2>(p, row, panel);
  }
  for (; panel < p.panels(); ++panel) {
    for (int64_t row = 0; row < p.m; row += 16) block<16, 1>(p, row, panel);
  }
}

// Both terms of A in one pass over a panel of B, each summed by itself. One panel at a time: for few rows B comes from
// memory, which is read fastest in the order of its addresses.
template <int kRows>
void block_of_terms(const Product& p, int64_t row, int64_t panel) {
  const uint16_t *a = p.a + row * p.a_stride, *a_low = p.a_low + row * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  __m512 high[kRows], low[kRows];
  for (int r = 0; r < kRows; ++r) {
    high[r] = p.accumulate ? _mm512_loadu_ps(c + r * p.c_stride) : _mm512_setzero_ps();
    low[r] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < p.k; k += 2, b += kPanel) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(b);
    for (int r = 0; r < kRows; ++r) {
      high[r] = _mm512_dpbf16_ps(high[r], pair_at(a + r * p.a_stride + k), w);
      low[r] = _mm512_dpbf16_ps(low[r], pair_at(a_low + r * p.a_stride + k), w);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(c + r * p.c_stride, _mm512_add_ps(high[r], low[r]));
}

template <int kRows>
void rows_of_terms(const Product& p, int64_t row, int64_t panel) {
  for (; row + kRows <= p.m; row += kRows) block_of_terms<kRows>(p, row, panel);
  if constexpr (kRows > 1) rows_of_terms<kRows / 2>(p, row, panel);
}

void multiply(const Product& p) {
  if (p.a_low != nullptr) {
    for (int64_t panel = 0; panel < p.panels(); ++panel) rows_of_terms<8>(p, 0, panel);
    return;
  }
  multiply_one(p);
  if (p.b_low == nullptr) return;
  Product low = p;
  low.b = p.b_low;
  low.accumulate = true;
  multiply_one(low);
}

// Queries stay rows: a score is a dot product along the key's row.
int64_t query_words(int64_t depth) {
  return depth / 2 * kPanel;
}

void pack_queries(const uint16_t* const* rows, int64_t k, int64_t depth, uint32_t* queries) {
  auto* out = reinterpret_cast<uint16_t*>(queries);
  for (int64_t r = 0; r < kPanel; ++r, out += depth) {
    const int64_t count = rows[r] == nullptr ? 0 : k;
    if (count > 0) std::memcpy(out, rows[r], static_cast<size_t>(count) * sizeof(uint16_t));
    std::memset(out + count, 0, static_cast<size_t>(depth - count) * sizeof(uint16_t));
  }
}

__m512bh load_bf16(const uint16_t* from) {
  return (__m512bh)_mm512_loadu_si512(from);
}

// The sums of sixteen vectors, each over its lanes in the same order.
__m512 sums_of(const __m512* of) {
  __m512 by_two[8], by_four[4];
  for (int i = 0; i < 8; ++i)
    by_two[i] =
        _mm512_add_ps(_mm512_unpacklo_ps(of[2 * i], of[2 * i + 1]), _mm512_unpackhi_ps(of[2 * i], of[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(by_two[2 * i]), b = _mm512_castps_pd(by_two[2 * i + 1]);
    by_four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halved = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return halved(halved(by_four[0], by_four[1]), halved(by_four[2], by_four[3]));
}

// Four keys by four queries.
void score_block(const Scores& p, int64_t key, int64_t query) {
  const uint16_t* keys = p.keys.rows + key * p.keys.stride;
  const uint16_t* queries = reinterpret_cast<const uint16_t*>(p.queries) + query * p.depth;
  __m512 sum[16];
  for (__m512& one : sum) one = _mm512_setzero_ps();
  for (int64_t k = 0; k < p.depth; k += kDepth) {
    __m512bh q[4];
    for (int i = 0; i < 4; ++i) q[i] = load_bf16(queries + i * p.depth + k);
    for (int j = 0; j < 4; ++j) {
      const __m512bh x = load_bf16(keys + j * p.keys.stride + k);
      for (int i = 0; i < 4; ++i) sum[4 * j + i] = _mm512_dpbf16_ps(sum[4 * j + i], x, q[i]);
    }
  }
  const __m512 all = sums_of(sum);
  float* out = p.out + key * p.out_stride + query;
  _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  _mm_storeu_ps(out + p.out_stride, _mm512_extractf32x4_ps(all, 1));
  _mm_storeu_ps(out + 2 * p.out_stride, _mm512_extractf32x4_ps(all, 2));
  _mm_storeu_ps(out + 3 * p.out_stride, _mm512_extractf32x4_ps(all, 3));
}

void scores(const Scores& p) {
  for (int64_t key = 0; key < p.num_keys; key += 4)
    for (int64_t query = 0; query < p.num_queries; query += 4) score_block(p, key, query);
}

// kQueries queries by 32 columns, over the keys of one block; two keys become one vector of pairs as they are read.
template <int kQueries>
void value_block(const Values& p, int64_t key, int64_t query, int64_t column) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const BlockRows& block = p.blocks[key / kBlockKeys];
  const int64_t num_keys = p.num_keys - key < kBlockKeys ? p.num_keys - key : kBlockKeys;
  const bool accumulate = p.accumulate || key > 0;
  const uint16_t* weights = p.weights + query * p.weight_stride + key;
  float* out = p.out + query * p.out_stride + column;
  __m512 sum[kQueries][2];
  for (int q = 0; q < kQueries; ++q) {
    for (int n = 0; n < 2; ++n)
      sum[q][n] = accumulate ? _mm512_loadu_ps(out + q * p.out_stride + n * kPanel) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < num_keys; k += 2) {
    const uint16_t* row = block.rows + k * block.stride + column;
    const __m512i even = _mm512_loadu_si512(row);
    const __m512i odd = k + 1 < num_keys ? _mm512_loadu_si512(row + block.stride) : _mm512_setzero_si512();
    const auto low = (__m512bh)_mm512_permutex2var_epi16(even, first, odd);
    const auto high = (__m512bh)_mm512_permutex2var_epi16(even, second, odd);
    for (int q = 0; q < kQueries; ++q) {
      const __m512bh w = pair_at(weights + q * p.weight_stride + k);
      sum[q][0] = _mm512_dpbf16_ps(sum[q][0], w, low);
      sum[q][1] = _mm512_dpbf16_ps(sum[q][1], w, high);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int n = 0; n < 2; ++n) _mm512_storeu_ps(out + q * p.out_stride + n * kPanel, sum[q][n]);
}

template <int kQueries>
void values_of_queries(const Values& p, int64_t key, int64_t query) {
  for (; query + kQueries <= p.num_queries; query += kQueries) {
    for (int64_t column = 0; column < p.columns; column += kDepth) value_block<kQueries>(p, key, query, column);
  }
  if constexpr (kQueries > 1) values_of_queries<kQueries / 2>(p, key, query);
}

void values(const Values& p) {
  for (int64_t key = 0; key < p.num_keys; key += kBlockKeys) values_of_queries<8>(p, key, 0);
}

}  // namespace

const MlaKernels kMlaAvx512 = mla_loops({.multiply = multiply,
                                         .query_words = query_words,
                                         .pack_queries = pack_queries,
                                         .scores = scores,
                                         .values = values});

}  // namespace perigee::cpu

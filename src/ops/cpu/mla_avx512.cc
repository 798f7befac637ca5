#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

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
      int32_t pair;
      std::memcpy(&pair, a + r * p.a_stride + k, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
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
  const auto pair = [](const uint16_t* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof(both));
    return (__m512bh)_mm512_set1_epi32(both);
  };
  for (int64_t k = 0; k < p.k; k += 2, b += kPanel) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(b);
    for (int r = 0; r < kRows; ++r) {
      high[r] = _mm512_dpbf16_ps(high[r], pair(a + r * p.a_stride + k), w);
      low[r] = _mm512_dpbf16_ps(low[r], pair(a_low + r * p.a_stride + k), w);
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

}  // namespace

const MlaKernels kMlaAvx512 = mla_loops(multiply);

}  // namespace perigee::cpu

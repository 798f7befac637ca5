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

void multiply(const Product& p) {
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

}  // namespace

const MlaKernels kMlaAvx512 = mla_loops(multiply);

}  // namespace perigee::cpu

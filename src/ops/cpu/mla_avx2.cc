#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

// kRows rows by one panel (two vectors). bf16 halves are widened by shift and mask.
template <int kRows>
void block(const Product& p, int64_t row, int64_t panel) {
  const uint16_t* a = p.a + row * p.a_stride;
  const uint32_t* b = p.b + panel * p.panel_stride;
  float* c = p.c + row * p.c_stride + panel * kPanel;
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
  __m256 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < 2; ++h) {
      sum[r][h] = p.accumulate ? _mm256_loadu_ps(c + r * p.c_stride + 8 * h) : _mm256_setzero_ps();
    }
  }
  for (int64_t k = 0; k < p.k; k += 2, b += kPanel) {
    const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 8));
    const __m256 even[2] = {_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)),
                            _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16))};
    const __m256 odd[2] = {_mm256_castsi256_ps(_mm256_and_si256(w0, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(w1, high))};
    for (int r = 0; r < kRows; ++r) {
      const __m256 a0 = _mm256_set1_ps(exact_float(a[r * p.a_stride + k]));
      const __m256 a1 = _mm256_set1_ps(exact_float(a[r * p.a_stride + k + 1]));
      for (int h = 0; h < 2; ++h) {
        sum[r][h] = _mm256_fmadd_ps(a0, even[h], sum[r][h]);
        sum[r][h] = _mm256_fmadd_ps(a1, odd[h], sum[r][h]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(c + r * p.c_stride + 8 * h, sum[r][h]);
  }
}

void multiply(const Product& p) {
  for (int64_t panel = 0; panel < p.panels; ++panel) {
    for (int64_t row = 0; row < p.m; row += 4) block<4>(p, row, panel);
  }
}

}  // namespace

const MlaKernels kMlaAvx2 = mla_loops(multiply);

}  // namespace perigee::cpu

#include "ops/cpu/mla_loops.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kLanes = 8;  // columns of a vector: half a panel

// kRows rows by kVectors vectors of columns, from vector `first` on; eight sums hide how long each takes. bf16 halves
// are widened by shift and mask.
template <int kRows, int kVectors>
void block(const Product& p, int64_t row, int64_t first) {
  const auto column = [&](int v) { return (first + v) * kLanes; };
  const uint16_t* a = p.a + row * p.a_stride;
  float* c = p.c + row * p.c_stride;
  const uint32_t* b[kVectors];
  __m256 sum[kRows][kVectors];
  for (int v = 0; v < kVectors; ++v) {
    b[v] = p.b + column(v) / kPanel * p.panel_stride + column(v) % kPanel;
    for (int r = 0; r < kRows; ++r)
      sum[r][v] = p.accumulate ? _mm256_loadu_ps(c + r * p.c_stride + column(v)) : _mm256_setzero_ps();
  }
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
  const auto even = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
  const auto odd = [&](__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, high)); };
  for (int64_t k = 0; k < p.k; k += 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * p.a_stride + k, sizeof(pair));
      const __m256i both = _mm256_set1_epi32(pair);
      const __m256 x0 = even(both), x1 = odd(both);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b[v] + k / 2 * kPanel));
        sum[r][v] = _mm256_fmadd_ps(x0, even(w), sum[r][v]);
        sum[r][v] = _mm256_fmadd_ps(x1, odd(w), sum[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(c + r * p.c_stride + column(v), sum[r][v]);
}

// kRows rows by all vectors of columns from `first` on.
template <int kRows, int kVectors>
void strip(const Product& p, int64_t row, int64_t first, int64_t vectors) {
  for (; first + kVectors <= vectors; first += kVectors) block<kRows, kVectors>(p, row, first);
  if constexpr (kVectors > 1) strip<kRows, kVectors / 2>(p, row, first, vectors);
}

void multiply(const Product& p) {
  const int64_t vectors = (p.columns + kLanes - 1) / kLanes, fours = p.m / 4 * 4;
  int64_t first = 0;
  for (; first + 2 <= vectors; first += 2)
    for (int64_t row = 0; row < fours; row += 4) block<4, 2>(p, row, first);
  if (first < vectors) {
    int64_t row = 0;
    for (; row + 8 <= fours; row += 8) block<8, 1>(p, row, first);
    if (row < fours) block<4, 1>(p, row, first);
  }
  if ((p.m & 2) != 0) strip<2, 4>(p, fours, 0, vectors);
  if ((p.m & 1) != 0) strip<1, 8>(p, p.m - 1, 0, vectors);
}

}  // namespace

const MlaKernels kMlaAvx2 = mla_loops(multiply);

}  // namespace perigee::cpu

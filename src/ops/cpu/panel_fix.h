// bf16 inputs of INT4 weights to whole numbers and a step (ADR 0028). Included only by files compiled for one
// instruction set, each of which compiles its own copy.
#pragma once

#include <immintrin.h>

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {
namespace {

// 32 whole numbers of 16 bits, in order.
struct FixedNumbers {
  __m256i first, second;
};

inline int32_t sum_of_lanes(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_srli_si128(two, 4)));
}

// The exponent, as bf16 stores it, of the largest of 32 magnitudes.
inline int largest_exponent(__m256i a, __m256i b) {
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  const __m256i both = _mm256_max_epu16(_mm256_and_si256(a, magnitude), _mm256_and_si256(b, magnitude));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return (0xFFFF - _mm_extract_epi16(least, 0)) >> 7;
}

inline FixedNumbers fix_group(const uint16_t* a, FixedGroup& group) {
  constexpr int kBits = 14;   // of a number whose exponent is the largest one, beside the topmost
  constexpr int kLeast = 27;  // exponent below which a group is rounded as if it were so large: 2^-100. No step of
                              // it is subnormal, which AMX would take for zero
  constexpr int kMost = 246;  // above it, f32 sums of a group could overflow: 2^119
  const auto load = [](const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  const __m256i low = load(a), high = load(a + 16);
  const int found = largest_exponent(low, high), exponent = found < kLeast ? kLeast : found;
  const auto power = [](int stored) { return _mm256_castsi256_ps(_mm256_set1_epi32(stored << 23)); };
  const __m256 factor = power(2 * 127 + kBits - exponent);
  const auto whole = [&](__m128i bits) {
    const __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    return _mm256_cvtps_epi32(_mm256_mul_ps(values, factor));
  };
  const auto sixteen = [&](__m256i bits) {
    const __m256i packed =
        _mm256_packs_epi32(whole(_mm256_castsi256_si128(bits)), whole(_mm256_extracti128_si256(bits, 1)));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  };
  const FixedNumbers out{sixteen(low), sixteen(high)};
  const __m256i ones = _mm256_set1_epi16(1);
  group.sum = sum_of_lanes(_mm256_add_epi32(_mm256_madd_epi16(out.first, ones), _mm256_madd_epi16(out.second, ones)));
  group.step = found > kMost ? __builtin_nanf("") : _mm256_cvtss_f32(power(exponent - kBits));
  return out;
}

}  // namespace
}  // namespace perigee::cpu

// Tensor: a view of numbers somewhere in memory (dtype, shape, pointer). It owns nothing; Arena and Buffer do.
//
// The last dimension is contiguous; rows may be further apart than their length (row_stride), so that a column range
// of a matrix is a view too.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "base/check.h"

namespace perigee {

enum class DType : uint8_t { kF32, kBF16, kF16, kF8E4M3, kI32, kI64, kU8, kBool };

int64_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements, >= cols

  template <typename T>
  constexpr T* row(int64_t r) const {  // constexpr: for device code too
    return static_cast<T*>(data) + r * row_stride;
  }
  // Columns [begin, begin + count) of every row.
  Tensor columns(int64_t begin, int64_t count) const;
  // Rows [begin, begin + count).
  Tensor row_range(int64_t begin, int64_t count) const;
  bool contiguous() const { return row_stride == cols; }
};

inline float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return __builtin_bit_cast(float, wide);
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t bits);
float f8e4m3_to_f32(uint8_t bits);
uint8_t f32_to_f8e4m3(float value);  // nearest even, saturating at 448; NaN stays NaN

}  // namespace perigee

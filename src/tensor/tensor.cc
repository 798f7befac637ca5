#include "tensor/tensor.h"

#include <cmath>

namespace perigee {

int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kI64: return 8;
    case DType::kF8E4M3:
    case DType::kU8:
    case DType::kBool: return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF8E4M3: return "f8_e4m3";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kBool: return "bool";
  }
  return "?";
}

Tensor Tensor::columns(int64_t begin, int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= cols, "columns ", begin, "+", count, " of ", cols);
  Tensor view = *this;
  view.data = static_cast<uint8_t*>(data) + begin * dtype_bytes(dtype);
  view.cols = count;
  return view;
}

Tensor Tensor::row_range(int64_t begin, int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= rows, "rows ", begin, "+", count, " of ", rows);
  Tensor view = *this;
  view.data = static_cast<uint8_t*>(data) + begin * row_stride * dtype_bytes(dtype);
  view.rows = count;
  return view;
}

float f16_to_f32(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

float f8e4m3_to_f32(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
}

uint8_t f32_to_f8e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  if (magnitude < 0x1p-10f) return sign;  // under half of the smallest subnormal (a tie rounds to even: zero)
  int exponent = 0;
  std::frexp(magnitude, &exponent);                        // magnitude = m * 2^exponent, m in [0.5, 1)
  const int step = exponent - 4 < -9 ? -9 : exponent - 4;  // spacing of e4m3 numbers around magnitude is 2^step
  const float units = std::nearbyint(std::ldexp(magnitude, -step));
  const float rounded = std::fmin(std::ldexp(units, step), 448.0f);
  if (rounded < 0x1p-6f) return sign | static_cast<uint8_t>(std::ldexp(rounded, 9));
  std::frexp(rounded, &exponent);
  const int mantissa = static_cast<int>(std::ldexp(rounded, 4 - exponent)) - 8;
  return sign | static_cast<uint8_t>((exponent + 6) << 3 | mantissa);
}

}  // namespace perigee

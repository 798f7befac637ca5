#include "ops/raw_matrix.h"

#include <algorithm>
#include <cstring>

#include "tensor/tensor.h"

namespace perigee {
namespace {

int64_t element_bits(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32: return 32;
    case WeightFormat::kBF16:
    case WeightFormat::kF16: return 16;
    case WeightFormat::kF8Block128: return 8;
    case WeightFormat::kInt4Group32: return 4;
  }
  return 0;
}

int64_t scale_element_bytes(WeightFormat format) {
  return format == WeightFormat::kF8Block128 ? 4 : 2;
}

const uint8_t* moved(const void* from, int64_t bytes) {
  return from == nullptr ? nullptr : static_cast<const uint8_t*>(from) + bytes;
}

float int4_element(const RawMatrix& m, int64_t r, int64_t c) {
  const uint32_t word = static_cast<const uint32_t*>(m.data)[m.index(r, c) / 8];
  const int nibble = static_cast<int>((word >> (4 * (c % 8))) & 15u) - 8;
  const uint16_t scale = static_cast<const uint16_t*>(m.scale)[m.scale_index(r, c)];
  return bf16_to_f32(f32_to_bf16(static_cast<float>(nibble) * bf16_to_f32(scale)));
}

float fp8_element(const RawMatrix& m, int64_t r, int64_t c) {
  const float scale = static_cast<const float*>(m.scale)[m.scale_index(r, c)];
  return f8e4m3_to_f32(static_cast<const uint8_t*>(m.data)[m.index(r, c)]) * scale;
}

// Calls run(first, end, scale) for each run of a row's columns under one scale.
template <typename Run>
void for_each_scale(const RawMatrix& m, int64_t r, const Run& run) {
  const int64_t columns = m.columns_per_scale();
  int64_t scale = m.scale_index(r, 0);
  for (int64_t first = 0, end = 0; first < m.in; first = end) {
    end = std::min(m.in, first + columns - (m.first_column + first) % columns);
    run(first, end, scale++);
  }
}

void fp8_row(const RawMatrix& m, int64_t r, float* out) {
  const std::array<float, 256>& values = f8e4m3_values();
  const auto* bits = static_cast<const uint8_t*>(m.data) + m.index(r, 0);
  for_each_scale(m, r, [&](int64_t first, int64_t end, int64_t at) {
    const float scale = static_cast<const float*>(m.scale)[at];
    for (int64_t c = first; c < end; ++c) out[c] = values[bits[c]] * scale;
  });
}

void int4_row(const RawMatrix& m, int64_t r, float* out) {
  const auto* words = static_cast<const uint32_t*>(m.data) + m.index(r, 0) / 8;
  for_each_scale(m, r, [&](int64_t first, int64_t end, int64_t at) {
    const float scale = bf16_to_f32(static_cast<const uint16_t*>(m.scale)[at]);
    float values[16];
    for (int i = 0; i < 16; ++i) values[i] = bf16_to_f32(f32_to_bf16(static_cast<float>(i - 8) * scale));
    for (int64_t c = first; c < end; ++c) out[c] = values[words[c / 8] >> (4 * (c % 8)) & 15u];
  });
}

}  // namespace

RawMatrix window(const RawMatrix& m, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns) {
  CHECK(first_row >= 0 && rows >= 0 && first_row + rows <= m.out && first_column >= 0 && columns >= 0 &&
            first_column + columns <= m.in,
        rows, " rows from ", first_row, ", ", columns, " columns from ", first_column, " of ", m.out, "x", m.in);
  CHECK(m.format != WeightFormat::kInt4Group32 || (first_column % 8 == 0 && columns % 8 == 0), columns,
        " INT4 columns from ", first_column);
  RawMatrix w = m;
  w.out = rows;
  w.in = columns;
  w.stored_in = m.stride();
  w.first_row += first_row;
  w.first_column += first_column;
  w.data = moved(m.data, m.index(first_row, first_column) * element_bits(m.format) / 8);
  w.scale = moved(m.scale, (w.scale_origin() - m.scale_origin()) * scale_element_bytes(m.format));
  return w;
}

ByteRows data_bytes(const RawMatrix& m) {
  const int64_t bits = element_bits(m.format);
  return {.data = m.data, .rows = m.out, .row_bytes = m.in * bits / 8, .stride = m.stride() * bits / 8};
}

ByteRows scale_bytes(const RawMatrix& m) {
  if (!m.has_scales() || m.out == 0 || m.in == 0) return {};
  const int64_t rows = (m.first_row % m.rows_per_scale() + m.out - 1) / m.rows_per_scale() + 1;
  const int64_t columns = (m.first_column % m.columns_per_scale() + m.in - 1) / m.columns_per_scale() + 1;
  const int64_t bytes = scale_element_bytes(m.format);
  return {.data = m.scale, .rows = rows, .row_bytes = columns * bytes, .stride = m.scale_stride() * bytes};
}

int64_t raw_bytes(const RawMatrix& m) {
  return data_bytes(m).bytes() + scale_bytes(m).bytes();
}

const std::array<float, 256>& f8e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all{};
    for (int bits = 0; bits < 256; ++bits) all[static_cast<size_t>(bits)] = f8e4m3_to_f32(static_cast<uint8_t>(bits));
    return all;
  }();
  return values;
}

float raw_element(const RawMatrix& m, int64_t r, int64_t c) {
  const int64_t at = m.index(r, c);
  switch (m.format) {
    case WeightFormat::kF32: return static_cast<const float*>(m.data)[at];
    case WeightFormat::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
    case WeightFormat::kF16: return f16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
    case WeightFormat::kF8Block128: return fp8_element(m, r, c);
    case WeightFormat::kInt4Group32: return int4_element(m, r, c);
  }
  return 0;
}

void raw_row(const RawMatrix& m, int64_t r, float* out) {
  const int64_t at = m.index(r, 0);
  switch (m.format) {
    case WeightFormat::kF32:
      std::memcpy(out, static_cast<const float*>(m.data) + at, static_cast<size_t>(m.in) * 4);
      return;
    case WeightFormat::kBF16:
      for (int64_t c = 0; c < m.in; ++c) out[c] = bf16_to_f32(static_cast<const uint16_t*>(m.data)[at + c]);
      return;
    case WeightFormat::kF16:
      for (int64_t c = 0; c < m.in; ++c) out[c] = f16_to_f32(static_cast<const uint16_t*>(m.data)[at + c]);
      return;
    case WeightFormat::kF8Block128: return fp8_row(m, r, out);
    case WeightFormat::kInt4Group32: return int4_row(m, r, out);
  }
}

}  // namespace perigee

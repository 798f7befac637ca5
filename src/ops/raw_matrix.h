// RawMatrix: a matrix as files store it, or a window of one, in any storage format.
#pragma once

#include <array>
#include <cstdint>

#include "tensor/byte_rows.h"

namespace perigee {

enum class WeightFormat : uint8_t {
  kF32,
  kBF16,
  kF16,
  kF8Block128,   // e4m3 [out, in], scale f32 [ceil(out/128), ceil(in/128)]: a multiplier
  kInt4Group32,  // int32 words [out, in/8], nibble c%8 of word c/8 low first, offset 8; scale bf16 [out, in/32]
};

// A [out, in] matrix in the stored layout, borrowed from a mapped file: all of a stored matrix, or a window of one,
// which is read where it lies. Columns of a row are contiguous.
struct RawMatrix {
  WeightFormat format = WeightFormat::kBF16;
  int64_t out = 0;
  int64_t in = 0;
  const void* data = nullptr;   // element (0, 0); null: computed by the backend from the keys, see model/dummy.h
  const void* scale = nullptr;  // the scale of element (0, 0)
  uint64_t data_key = 0, scale_key = 0;
  // Where a window begins in the stored matrix, and how many columns that has (0: `in`).
  int64_t first_row = 0, first_column = 0, stored_in = 0;

  // constexpr: for device code too
  constexpr int64_t stride() const { return stored_in > 0 ? stored_in : in; }  // elements from row to row
  constexpr int64_t index(int64_t r, int64_t c) const { return r * stride() + c; }
  constexpr int64_t origin() const { return index(first_row, first_column); }  // of element (0, 0) in the stored matrix
  // One scale stands for so many rows and columns of the stored matrix.
  constexpr int64_t rows_per_scale() const { return format == WeightFormat::kF8Block128 ? 128 : 1; }
  constexpr int64_t columns_per_scale() const { return format == WeightFormat::kF8Block128 ? 128 : 32; }
  // Of scales, as stride(), index() and origin() of elements.
  constexpr int64_t scale_stride() const { return (stride() + columns_per_scale() - 1) / columns_per_scale(); }
  constexpr int64_t scale_index(int64_t r, int64_t c) const {
    return (first_row % rows_per_scale() + r) / rows_per_scale() * scale_stride() +
           (first_column % columns_per_scale() + c) / columns_per_scale();
  }
  constexpr int64_t scale_origin() const {
    return first_row / rows_per_scale() * scale_stride() + first_column / columns_per_scale();
  }
  bool has_scales() const { return format == WeightFormat::kF8Block128 || format == WeightFormat::kInt4Group32; }
  // Whether the first column is the first under its scale, and in INT4 the last the last: where it is not, a packed
  // layout with one scale for each 128 or 32 columns cannot hold the window.
  bool starts_at_scale() const {
    if (!has_scales()) return true;
    return first_column % columns_per_scale() == 0 &&
           (format == WeightFormat::kF8Block128 || in % columns_per_scale() == 0);
  }
};

// Rows [first_row, first_row + rows) and columns [first_column, first_column + columns) of `m`. A cut inside a block or
// group of scales leaves its scale on both sides. INT4: columns are cut at multiples of 8, the numbers in one word.
RawMatrix window(const RawMatrix& m, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns);
// The bytes that a matrix reads.
ByteRows data_bytes(const RawMatrix& m);
ByteRows scale_bytes(const RawMatrix& m);
int64_t raw_bytes(const RawMatrix& m);  // both

const std::array<float, 256>& f8e4m3_values();  // of all bits

// Element (r, c) as f32: the definition of every format. INT4 and FP8: q * scale in f32, INT4 then rounded to bf16.
float raw_element(const RawMatrix& m, int64_t r, int64_t c);
// Row r as f32 into out[in].
void raw_row(const RawMatrix& m, int64_t r, float* out);

}  // namespace perigee

// ByteRows: rows of bytes at a constant distance, such as a range of columns of a row-major matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace perigee {

struct ByteRows {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride = 0;  // bytes from row to row

  int64_t bytes() const { return rows * row_bytes; }
  // From the first byte to the last, those between the rows included.
  int64_t extent() const { return rows == 0 ? 0 : (rows - 1) * stride + row_bytes; }
  // The same bytes in fewer rows: one, where nothing lies between them.
  ByteRows joined() const {
    return row_bytes == stride ? ByteRows{.data = data, .rows = 1, .row_bytes = bytes(), .stride = bytes()} : *this;
  }
  // Cut into pieces of at most `most` bytes: part of the one row, or whole rows, one at least.
  int64_t piece_bytes(int64_t most) const {
    return rows == 1 ? most : std::max<int64_t>(most / row_bytes, 1) * row_bytes;
  }
  int64_t num_pieces(int64_t most) const { return (bytes() + piece_bytes(most) - 1) / piece_bytes(most); }
  ByteRows piece(int64_t most, int64_t i) const {
    const int64_t first = i * piece_bytes(most), count = std::min(piece_bytes(most), bytes() - first);
    if (rows == 1) return {.data = row(0) + first, .rows = 1, .row_bytes = count, .stride = count};
    return {.data = row(first / row_bytes), .rows = count / row_bytes, .row_bytes = row_bytes, .stride = stride};
  }
  const uint8_t* row(int64_t r) const { return static_cast<const uint8_t*>(data) + r * stride; }
  // Into rows that are `to_stride` bytes apart.
  void copy_to(uint8_t* to, int64_t to_stride) const {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, row(r), static_cast<size_t>(row_bytes));
  }
};

}  // namespace perigee

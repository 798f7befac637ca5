#include "tensor/byte_rows.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace perigee {
namespace {

// The pieces, one after another, are the rows without what lies between them.
TEST(ByteRows, PiecesCoverEachByteOnce) {
  std::vector<uint8_t> memory(240);
  std::iota(memory.begin(), memory.end(), uint8_t{0});
  for (const int64_t row_bytes : {7, 24})  // 24: nothing between the rows
    for (const int64_t most : {1, 5, 7, 16, 1000}) {
      const ByteRows all{.data = memory.data(), .rows = 10, .row_bytes = row_bytes, .stride = 24};
      const ByteRows rows = all.joined();
      EXPECT_EQ(rows.rows, row_bytes == 24 ? 1 : 10);
      std::vector<uint8_t> copy(static_cast<size_t>(rows.bytes()), 255), wanted;
      for (int64_t i = 0; i < rows.num_pieces(most); ++i) {
        const ByteRows piece = rows.piece(most, i);
        EXPECT_LE(piece.bytes(), std::max(most, rows.rows == 1 ? most : row_bytes));
        piece.copy_to(copy.data() + i * rows.piece_bytes(most), piece.row_bytes);
      }
      for (int64_t r = 0; r < 10; ++r) wanted.insert(wanted.end(), all.row(r), all.row(r) + row_bytes);
      EXPECT_EQ(copy, wanted) << row_bytes << " " << most;
      EXPECT_EQ(all.extent(), 9 * 24 + row_bytes);
    }
}

}  // namespace
}  // namespace perigee

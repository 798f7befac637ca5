#include "ops/raw_matrix.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "tensor/tensor.h"

namespace perigee {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kF16,
                                     WeightFormat::kF8Block128, WeightFormat::kInt4Group32};

// A matrix of random bits whose scales are powers of two, all of them different from their neighbours.
struct Stored {
  Stored(WeightFormat format, int64_t out, int64_t in) {
    matrix = {.format = format, .out = out, .in = in};
    data.resize(static_cast<size_t>(data_bytes(matrix).bytes()));
    Rng rng(11);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(rng.below(0x70));  // no NaN in any format
    const int64_t bytes = scale_bytes(matrix).bytes();
    f32_scales.resize(static_cast<size_t>(bytes / 4 + 1));
    bf16_scales.resize(static_cast<size_t>(bytes / 2 + 1));
    for (size_t i = 0; i < bf16_scales.size(); ++i)
      bf16_scales[i] = f32_to_bf16(std::ldexp(1.0f, static_cast<int>(i % 23)));
    for (size_t i = 0; i < f32_scales.size(); ++i) f32_scales[i] = std::ldexp(1.0f, static_cast<int>(i % 23));
    matrix.data = data.data();
    matrix.scale = format == WeightFormat::kF8Block128 ? static_cast<void*>(f32_scales.data()) : bf16_scales.data();
  }
  RawMatrix matrix;
  std::vector<uint8_t> data;
  std::vector<float> f32_scales;
  std::vector<uint16_t> bf16_scales;
};

void expect_elements(const RawMatrix& part, const RawMatrix& whole, int64_t first_row, int64_t first_column) {
  std::vector<float> row(static_cast<size_t>(part.in));
  for (int64_t r = 0; r < part.out; ++r) {
    raw_row(part, r, row.data());
    for (int64_t c = 0; c < part.in; ++c) {
      ASSERT_EQ(raw_element(part, r, c), raw_element(whole, first_row + r, first_column + c)) << r << ", " << c;
      ASSERT_EQ(row[static_cast<size_t>(c)], raw_element(part, r, c)) << r << ", " << c;
    }
  }
}

// Cuts at block borders and inside of blocks, and a window of a window.
TEST(Window, HasTheElementsOfTheMatrix) {
  for (const WeightFormat format : kFormats) {
    SCOPED_TRACE(static_cast<int>(format));
    const Stored stored(format, 300, 320);
    const RawMatrix& m = stored.matrix;
    expect_elements(window(m, 0, 300, 0, 320), m, 0, 0);
    expect_elements(window(m, 128, 128, 256, 64), m, 128, 256);
    expect_elements(window(m, 77, 200, 40, 232), m, 77, 40);
    expect_elements(window(m, 299, 1, 312, 8), m, 299, 312);
    expect_elements(window(window(m, 77, 200, 40, 232), 60, 100, 96, 128), m, 137, 136);
  }
}

TEST(Window, BytesAreItsOwnAndTheScalesAroundIt) {
  const auto bytes = [](WeightFormat format, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    return raw_bytes(window({.format = format, .out = 300, .in = 320}, row, rows, column, columns));
  };
  EXPECT_EQ(bytes(WeightFormat::kF32, 7, 10, 3, 5), 200);
  EXPECT_EQ(bytes(WeightFormat::kBF16, 7, 10, 3, 5), 100);
  EXPECT_EQ(bytes(WeightFormat::kF8Block128, 0, 300, 0, 320), 300 * 320 + 9 * 4);
  EXPECT_EQ(bytes(WeightFormat::kF8Block128, 0, 128, 128, 128), 128 * 128 + 4);
  EXPECT_EQ(bytes(WeightFormat::kF8Block128, 127, 2, 127, 2), 4 + 4 * 4);  // around a corner of four blocks
  EXPECT_EQ(bytes(WeightFormat::kInt4Group32, 0, 300, 0, 320), 300 * 160 + 300 * 10 * 2);
  EXPECT_EQ(bytes(WeightFormat::kInt4Group32, 5, 2, 24, 16), 2 * 8 + 2 * 2 * 2);
}

TEST(Window, StartsAtAScaleOrNot) {
  const auto starts = [](WeightFormat format, int64_t column, int64_t columns) {
    return window({.format = format, .out = 300, .in = 320}, 3, 9, column, columns).starts_at_scale();
  };
  EXPECT_TRUE(starts(WeightFormat::kBF16, 3, 5));
  EXPECT_TRUE(starts(WeightFormat::kF8Block128, 128, 5));
  EXPECT_FALSE(starts(WeightFormat::kF8Block128, 64, 64));
  EXPECT_TRUE(starts(WeightFormat::kInt4Group32, 64, 96));
  EXPECT_FALSE(starts(WeightFormat::kInt4Group32, 64, 72));
  EXPECT_FALSE(starts(WeightFormat::kInt4Group32, 8, 32));
}

}  // namespace
}  // namespace perigee

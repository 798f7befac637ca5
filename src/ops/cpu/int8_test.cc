// OnlineQuantization::kInt8PerChannel: matrices that become whole numbers with a scale for each output.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/matrix_test_util.h"

namespace perigee::cpu {
namespace {

constexpr auto kInt8 = OnlineQuantization::kInt8PerChannel;

// The rule, once more: whole parts of the row's largest magnitude / 127, as they are multiplied.
std::vector<double> rounded_row(const RawMatrix& m, int64_t r) {
  std::vector<float> row(static_cast<size_t>(m.in));
  raw_row(m, r, row.data());
  float largest = 0;
  for (const float x : row) largest = std::fmax(largest, std::fabs(x));
  const float scale = largest / 127;
  std::vector<double> out;
  for (const float x : row)
    out.push_back(scale > 0 ? static_cast<double>(std::nearbyint(x / scale)) * static_cast<double>(scale) : 0.0);
  return out;
}

class Int8OnEveryIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_on(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
  Tensor linear(CpuOps& ops, const Tensor& x, const RawMatrix& m) {
    return ops.linear(x, ops.pack_linear(std::span(&m, 1)), DType::kF32);
  }
};

Tensor widened(Arena& arena, const Tensor& x) {
  const Tensor out = arena.tensor(DType::kF32, x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t c = 0; c < x.cols; ++c) out.row<float>(r)[c] = bf16_to_f32(x.row<uint16_t>(r)[c]);
  return out;
}

// Few rows read the bytes, many share their expansion; windows begin at any column.
TEST_P(Int8OnEveryIsa, LinearIsTheProductOfTheRoundedWeights) {
  struct Case {
    int64_t out, in, rows, first_column = 0;
  };
  CpuOps ops(GetParam(), 2, Comm::alone(), Comm::alone(), kInt8);
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kF32, WeightFormat::kF16})
    for (const Case& c :
         {Case{1, 32, 1}, {33, 91, 2}, {70, 571, 9}, {64, 2112, 16}, {100, 2107, 40, 24}, {48, 80, 300, 5}}) {
      const auto whole = test_matrix(format, c.out, c.in + c.first_column, 7);
      const RawMatrix m = window(whole->raw, 0, c.out, c.first_column, c.in);
      const TestRows x(c.rows, c.in, c.in + 3, 3);
      ops.begin_step();
      const Tensor y = linear(ops, x.tensor, m), of_wide = linear(ops, widened(ops.arena(), x.tensor), m);
      for (int64_t o = 0; o < c.out; ++o) {
        const std::vector<double> w = rounded_row(m, o);
        for (int64_t i = 0; i < c.rows; ++i) {
          double sum = 0, size = 0;
          for (int64_t k = 0; k < c.in; ++k) {
            const double term =
                static_cast<double>(bf16_to_f32(x.tensor.row<uint16_t>(i)[k])) * w[static_cast<size_t>(k)];
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(y.row<float>(i)[o], sum, 1e-6 * size) << c.rows << " rows of " << c.in << ": " << i << "," << o;
          ASSERT_NEAR(of_wide.row<float>(i)[o], sum, 1e-6 * size)
              << c.rows << " rows of " << c.in << ": " << i << "," << o;
        }
      }
    }
}

TEST_P(Int8OnEveryIsa, RowsDoNotDependOnTheirBatchOrThreads) {
  constexpr int64_t kRows = 300, kIn = 2400, kOut = 330;
  const auto m = test_matrix(WeightFormat::kBF16, kOut, kIn, 11);
  const TestRows x(kRows, kIn, kIn, 5);
  CpuOps one(GetParam(), 1, Comm::alone(), Comm::alone(), kInt8),
      three(GetParam(), 3, Comm::alone(), Comm::alone(), kInt8);
  const Tensor all = linear(one, x.tensor, m->raw);
  const LinearWeight w = three.pack_linear(std::span(&m->raw, 1));
  for (const int64_t rows : {1, 2, 3, 8, 9, 16, 17, 33, 257, 300}) {
    three.begin_step();
    const Tensor y = three.linear(x.tensor.row_range(kRows - rows, rows), w, DType::kF32);
    const size_t bytes = static_cast<size_t>(rows * kOut) * sizeof(float);
    ASSERT_EQ(std::memcmp(y.data, all.row<float>(kRows - rows), bytes), 0) << rows << " rows";
  }
}

// The largest number of a row is 127 or -127 of its parts; a row of zeros stays one; an infinity or a NaN shows.
TEST_P(Int8OnEveryIsa, RowsOfEveryMagnitude) {
  constexpr int64_t kOut = 40, kIn = 64;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> weights(kOut * kIn, 0.0f);
  const auto row = [&](size_t r) { return weights.data() + r * kIn; };
  row(1)[5] = 3e38f;
  row(2)[6] = -3e38f;
  row(3)[7] = 1e-30f;
  row(4)[8] = kInf;
  row(5)[9] = -kInf;
  row(6)[10] = NAN;
  row(7)[11] = 1.0f;
  row(7)[12] = -1.0f / 254 * 1.01f;  // rounds to one part
  row(7)[13] = 1.0f / 254 * 0.99f;   // to none
  const RawMatrix m{.format = WeightFormat::kF32, .out = kOut, .in = kIn, .data = weights.data()};
  CpuOps ops(GetParam(), 1, Comm::alone(), Comm::alone(), kInt8);
  for (const int64_t rows : {kIn, int64_t{14}}) {  // of the identity
    TestRows x(rows, kIn, kIn, 1);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < kIn; ++c) x.tensor.row<uint16_t>(r)[c] = r == c ? 0x3F80 : 0;
    ops.begin_step();
    const Tensor y = linear(ops, x.tensor, m);
    for (int64_t c = 0; c < rows; ++c) {
      ASSERT_EQ(y.row<float>(c)[0], 0);
      for (const int64_t r : {4, 5, 6}) ASSERT_TRUE(std::isnan(y.row<float>(c)[r])) << r << "," << c;
    }
    EXPECT_FLOAT_EQ(y.row<float>(5)[1], 3e38f);
    EXPECT_FLOAT_EQ(y.row<float>(6)[2], -3e38f);
    EXPECT_FLOAT_EQ(y.row<float>(7)[3], 1e-30f);
    EXPECT_FLOAT_EQ(y.row<float>(11)[7], 1.0f);
    EXPECT_FLOAT_EQ(y.row<float>(12)[7], -1.0f / 127);
    EXPECT_EQ(y.row<float>(13)[7], 0.0f);
  }
}

// Matrices that are stored in fewer bits stay as they are.
TEST_P(Int8OnEveryIsa, QuantisedMatricesStayAsTheyAre) {
  CpuOps plain(GetParam(), 1), int8(GetParam(), 1, Comm::alone(), Comm::alone(), kInt8);
  const TestRows x(3, 256, 256, 5);
  for (const WeightFormat format : {WeightFormat::kInt4Group32, WeightFormat::kF8Block128}) {
    const auto m = test_matrix(format, 96, 256, 3);
    const Tensor a = linear(plain, x.tensor, m->raw), b = linear(int8, x.tensor, m->raw);
    ASSERT_EQ(std::memcmp(a.data, b.data, 3 * 96 * sizeof(float)), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Int8OnEveryIsa, ::testing::ValuesIn(kAllIsas),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace perigee::cpu

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ops/cpu/experts.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/matrix_test_util.h"

namespace perigee::cpu {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kF16,
                                     WeightFormat::kF8Block128, WeightFormat::kInt4Group32};

struct Packed {
  PanelMatrix matrix;
  Buffer buffer;
};

Packed pack(TestCpu& cpu, std::span<const RawMatrix> stacked) {
  int64_t out = 0;
  for (const RawMatrix& raw : stacked) out += raw.out;
  Packed packed{
      .matrix = panel_matrix(out, stacked[0].in, panel_format(stacked, PanelFormat::kBF16), stacked[0].first_column),
      .buffer = {}};
  packed.buffer = Buffer(static_cast<size_t>(packed.matrix.bytes()));
  packed.matrix.data = packed.buffer.data();
  pack_panels(cpu.pool(), packed.matrix, stacked_rows(stacked));
  return packed;
}

// Element (r, c) as the backend multiplies by it: FP8 and INT4 exactly, all others as bf16.
float weight(const RawMatrix& m, int64_t r, int64_t c) {
  if (m.format == WeightFormat::kInt4Group32) {
    const int64_t at = m.index(r, c);
    const uint32_t nibble = static_cast<const uint32_t*>(m.data)[at / 8] >> at % 8 * 4 & 15u;
    const uint16_t scale = static_cast<const uint16_t*>(m.scale)[m.scale_index(r, c)];
    return (static_cast<float>(nibble) - 8.0f) * bf16_to_f32(scale);
  }
  if (m.format == WeightFormat::kF8Block128) return raw_element(m, r, c);
  return bf16_to_f32(f32_to_bf16(raw_element(m, r, c)));
}

// Elements c of groups of 32, the first of which lacks `front`, as INT4 weights are multiplied by them: as whole parts
// of the group's largest power of two / 2^14.
void round_to_groups(std::vector<float>& x, int64_t front) {
  const auto n = static_cast<int64_t>(x.size());
  for (int64_t begin = 0; begin < n; begin += kTileK - (begin == 0 ? front : 0)) {
    const int64_t end = std::min(n, begin + kTileK - (begin == 0 ? front : 0));
    float largest = 0;
    for (int64_t c = begin; c < end; ++c) largest = std::max(largest, std::fabs(x[static_cast<size_t>(c)]));
    if (largest == 0) continue;
    const float step = std::ldexp(1.0f, std::ilogb(largest) - 14);
    for (int64_t c = begin; c < end; ++c) {
      float& value = x[static_cast<size_t>(c)];
      value = std::nearbyint(value / step) * step;
    }
  }
}

// Row i of x as m's weights meet it.
std::vector<float> inputs(const Tensor& x, int64_t i, const RawMatrix& m) {
  std::vector<float> row(static_cast<size_t>(m.in));
  for (size_t c = 0; c < row.size(); ++c)
    row[c] = x.dtype == DType::kF32 ? x.row<float>(i)[c] : bf16_to_f32(x.row<uint16_t>(i)[c]);
  if (m.format == WeightFormat::kInt4Group32 && x.dtype == DType::kBF16) round_to_groups(row, m.first_column % kTileK);
  return row;
}

// dot(row i of x, row o of m) and the sum of the magnitudes, in double.
std::pair<double, double> exact(const Tensor& x, int64_t i, const RawMatrix& m, int64_t o) {
  double sum = 0, size = 0;
  const std::vector<float> row = inputs(x, i, m);
  for (int64_t c = 0; c < m.in; ++c) {
    const float input = row[static_cast<size_t>(c)];
    const double term = static_cast<double>(input) * weight(m, o, c);
    sum += term;
    size += std::fabs(term);
  }
  return {sum, size};
}

class EveryIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_on(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(EveryIsa, LinearIsTheMatrixProductInAllFormatsAndOddShapes) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 32}, {16, 64}, {33, 96}, {70, 576}, {100, 2112}};
  for (const WeightFormat format : kFormats) {
    for (const auto& [out, whole] : shapes) {
      const int64_t in = format == WeightFormat::kInt4Group32 ? whole : whole - 5;
      TestCpu cpu(GetParam(), 2);
      const auto m = test_matrix(format, out, in, 7);
      const Packed packed = pack(cpu, std::span(&m->raw, 1));
      const TestRows x(19, in, in + 3, 3);
      const Tensor y = linear(cpu.context(), x.tensor, packed.matrix, DType::kF32);
      const Tensor half = linear(cpu.context(), x.tensor, packed.matrix, DType::kBF16);
      for (int64_t i = 0; i < 19; ++i) {
        for (int64_t o = 0; o < out; ++o) {
          const auto [sum, size] = exact(x.tensor, i, m->raw, o);
          ASSERT_NEAR(y.row<float>(i)[o], sum, 1e-6 * size + 1e-12) << static_cast<int>(format) << " " << i << "," << o;
          ASSERT_EQ(half.row<uint16_t>(i)[o], f32_to_bf16(y.row<float>(i)[o])) << i << "," << o;
        }
      }
    }
  }
}

// Two bf16 terms of an input leave at most 2^-17 of it out.
TEST_P(EveryIsa, F32InputsCountWithBothTermsInAnyBatch) {
  constexpr int64_t kRows = 262, kOut = 70, kIn = 2144;  // more than a block of rows, and of k tiles
  for (const WeightFormat format : kFormats) {
    TestCpu cpu(GetParam(), 2);
    const auto m = test_matrix(format, kOut, kIn, 7);
    const Packed packed = pack(cpu, std::span(&m->raw, 1));
    const Tensor x{.data = cpu.context().arena.array<float>(kRows * kIn).data(),
                   .dtype = DType::kF32,
                   .rows = kRows,
                   .cols = kIn,
                   .row_stride = kIn};
    std::mt19937 random(3);
    for (int64_t i = 0; i < kRows * kIn; ++i) x.row<float>(0)[i] = std::normal_distribution<float>()(random);
    const Tensor all = linear(cpu.context(), x, packed.matrix, DType::kF32);
    for (int64_t i = 0; i < kRows; i += 37) {
      for (int64_t o = 0; o < kOut; ++o) {
        const auto [sum, size] = exact(x, i, m->raw, o);
        ASSERT_NEAR(all.row<float>(i)[o], sum, 9e-6 * size) << static_cast<int>(format) << " " << i << "," << o;
      }
    }
    for (const int64_t rows : {1, 2, 3, 6, 7, 9, 16, 17, 33}) {
      const Tensor some = linear(cpu.context(), x.row_range(kRows - rows, rows), packed.matrix, DType::kF32);
      const size_t bytes = static_cast<size_t>(rows * kOut) * sizeof(float);
      ASSERT_EQ(std::memcmp(some.data, all.row<float>(kRows - rows), bytes), 0)
          << static_cast<int>(format) << ": " << rows << " rows";
    }
  }
}

// Columns that begin and end between scales, rows that do.
TEST_P(EveryIsa, WindowsBetweenScalesStayQuantised) {
  for (const WeightFormat format : {WeightFormat::kF8Block128, WeightFormat::kInt4Group32}) {
    const auto whole = test_matrix(format, 300, 1408, 7);
    for (const int64_t first : {0, 8, 16, 32, 48, 64, 88, 96, 112, 120, 176, 352, 704, 1056, 1232}) {
      for (const int64_t in : {8, 24, 176}) {
        TestCpu cpu(GetParam(), 2);
        const RawMatrix m = window(whole->raw, 100, 70, first, in);
        const Packed packed = pack(cpu, std::span(&m, 1));
        ASSERT_NE(packed.matrix.format, PanelFormat::kBF16);
        const TestRows x(19, in, in + 3, 3);
        const Tensor y = linear(cpu.context(), x.tensor, packed.matrix, DType::kF32);
        const Tensor wide{
            .data = cpu.context().arena.array<float>(19 * in).data(), .rows = 19, .cols = in, .row_stride = in};
        for (int64_t i = 0; i < 19; ++i)
          for (int64_t c = 0; c < in; ++c) wide.row<float>(i)[c] = bf16_to_f32(x.tensor.row<uint16_t>(i)[c]);
        const Tensor of_wide = linear(cpu.context(), wide, packed.matrix, DType::kF32);
        for (int64_t i = 0; i < 19; ++i)
          for (int64_t o = 0; o < m.out; ++o) {
            const auto [sum, size] = exact(x.tensor, i, m, o);
            ASSERT_NEAR(y.row<float>(i)[o], sum, 1e-6 * size + 1e-12) << first << " " << in << " at " << i << "," << o;
            ASSERT_NEAR(of_wide.row<float>(i)[o], sum, 1e-6 * size + 1e-12) << first << " " << in;
          }
      }
    }
  }
}

TEST_P(EveryIsa, RowsDoNotDependOnTheirBatchOrThreads) {
  constexpr int64_t kRows = 600, kIn = 2400, kOut = 330;
  for (const auto& [format, first_column] : {std::pair<WeightFormat, int64_t>{WeightFormat::kBF16, 0},
                                             {WeightFormat::kInt4Group32, 0},
                                             {WeightFormat::kInt4Group32, 24},
                                             {WeightFormat::kF8Block128, 0},
                                             {WeightFormat::kF8Block128, 88}}) {
    TestCpu one(GetParam(), 1), two(GetParam(), 2), five(GetParam(), 5);
    const auto whole = test_matrix(format, kOut, kIn + first_column + 8, 11);
    const RawMatrix m = window(whole->raw, 0, kOut, first_column, kIn);
    const Packed packed = pack(two, std::span(&m, 1));
    const TestRows x(kRows, kIn, kIn, 5);
    const Tensor all = linear(one.context(), x.tensor, packed.matrix, DType::kF32);
    for (TestCpu* cpu : {&one, &two, &five}) {
      for (const int64_t rows : {1, 2, 3, 4, 6, 7, 8, 9, 16, 17, 31, 33, 100, 257, 600}) {
        for (const int64_t first : {int64_t{0}, kRows - rows}) {
          const Tensor y = linear(cpu->context(), x.tensor.row_range(first, rows), packed.matrix, DType::kF32);
          const size_t bytes = static_cast<size_t>(rows * kOut) * sizeof(float);
          ASSERT_EQ(std::memcmp(y.data, all.row<float>(first), bytes), 0) << rows << " rows from " << first;
        }
      }
    }
  }
}

// Sums of a k tile are exact, and joined in the same order everywhere.
TEST_P(EveryIsa, Int4ResultsAreThoseOfEveryInstructionSet) {
  constexpr int64_t kRows = 300, kOut = 70, kIn = 2144;
  TestCpu cpu(GetParam(), 2), other(Isa::kAvx2, 2);
  const auto m = test_matrix(WeightFormat::kInt4Group32, kOut, kIn, 11);
  const Packed packed = pack(cpu, std::span(&m->raw, 1));
  const TestRows x(kRows, kIn, kIn, 5);
  for (const int64_t rows : {int64_t{1}, int64_t{7}, int64_t{17}, kRows}) {
    const Tensor y = linear(cpu.context(), x.tensor.row_range(0, rows), packed.matrix, DType::kF32);
    const Tensor avx2 = linear(other.context(), x.tensor.row_range(0, rows), packed.matrix, DType::kF32);
    ASSERT_EQ(std::memcmp(y.data, avx2.data, static_cast<size_t>(rows * kOut) * sizeof(float)), 0) << rows << " rows";
  }
}

TEST_P(EveryIsa, StackedMatricesAreOne) {
  for (const auto& [format_a, format_b] :
       {std::pair{WeightFormat::kBF16, WeightFormat::kF32}, {WeightFormat::kInt4Group32, WeightFormat::kInt4Group32}}) {
    TestCpu cpu(GetParam(), 2);
    const auto a = test_matrix(format_a, 20, 64, 1), b = test_matrix(format_b, 37, 64, 2);
    const RawMatrix both[] = {a->raw, b->raw};
    const Packed ab = pack(cpu, both), only_a = pack(cpu, std::span(both, 1)),
                 only_b = pack(cpu, std::span(both + 1, 1));
    const TestRows x(3, 64, 64, 9);
    const Tensor y = linear(cpu.context(), x.tensor, ab.matrix, DType::kF32);
    const Tensor ya = linear(cpu.context(), x.tensor, only_a.matrix, DType::kF32);
    const Tensor yb = linear(cpu.context(), x.tensor, only_b.matrix, DType::kF32);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::memcmp(y.row<float>(i), ya.row<float>(i), 20 * 4), 0);
      EXPECT_EQ(std::memcmp(y.row<float>(i) + 20, yb.row<float>(i), 37 * 4), 0);
    }
  }
}

// Number c of a fixed group that becomes part of jobs of `rows` rows. AVX-512 keeps the bytes of eight numbers x in the
// order of the inputs of its sums, the low ones of x0 x4 x1 x5, their high ones, and those of x2 x6 x3 x7.
double fixed_number(Isa isa, int64_t rows, const uint16_t* group, int64_t c, float step) {
  if (isa == Isa::kAmx && rows > kVectorRowsAmx) return bf16_to_f32(group[c]) / static_cast<double>(step);
  if (isa == Isa::kAvx2) return static_cast<int16_t>(group[c]);
  constexpr int64_t kPlace[] = {0, 2, 8, 10, 1, 3, 9, 11};
  const auto* set = reinterpret_cast<const uint8_t*>(group) + c / 8 * 16;
  const int64_t low = kPlace[c % 8];
  return static_cast<int16_t>(set[low] | set[low + 4] << 8);
}

// What ADR 0028 says of the numbers that activations become.
TEST_P(EveryIsa, FixedGroupsKeepWhatIsLarge) {
  const PanelKernels& kernels = panel_kernels(GetParam());
  std::mt19937 random(3);
  for (int exponent = -99; exponent <= 127; ++exponent) {
    uint16_t bits[kTileK];
    for (uint16_t& b : bits) {
      const float size = std::ldexp(1.0f + static_cast<float>(random() % 128) / 128, -static_cast<int>(random() % 20));
      b = f32_to_bf16(std::ldexp(random() % 2 == 0 ? size : -size, exponent));
    }
    bits[random() % kTileK] = f32_to_bf16(std::ldexp(-1.9921875f, exponent));
    for (const int64_t rows : {1, 16}) {
      uint16_t fixed[kTileK];
      std::memcpy(fixed, bits, sizeof bits);
      FixedGroup group;
      kernels.fix(fixed, 1, rows, &group);
      if (exponent >= 120) {
        ASSERT_TRUE(std::isnan(group.step));
        continue;
      }
      ASSERT_EQ(group.step, std::ldexp(1.0f, exponent - 14));
      double sum = 0;
      for (int64_t c = 0; c < kTileK; ++c) {
        const double whole = fixed_number(GetParam(), rows, fixed, c, group.step);
        ASSERT_EQ(whole, std::nearbyint(whole));
        const double value = static_cast<double>(bf16_to_f32(bits[c])), got = whole * static_cast<double>(group.step);
        const bool large = std::fabs(value) >= std::ldexp(1.0, exponent - 7);
        ASSERT_LE(std::fabs(got - value), large ? 0.0 : std::ldexp(1.0, exponent - 15)) << exponent;
        sum += whole;
      }
      ASSERT_EQ(group.sum, sum);
    }
  }
}

// Whatever the size of inputs, a row's result is the same bits in any batch, and not finite where they are too large.
TEST_P(EveryIsa, Int4InputsOfAllSizesDoNotDependOnTheirBatch) {
  constexpr int64_t kOut = 40, kIn = 96;
  TestCpu cpu(GetParam(), 1);
  const auto m = test_matrix(WeightFormat::kInt4Group32, kOut, kIn, 1);
  const Packed packed = pack(cpu, std::span(&m->raw, 1));
  for (const int exponent : {-133, -126, -110, -100, -60, 0, 60, 118, 119, 120, 127}) {
    const TestRows x(17, kIn, kIn, 9);
    for (int64_t i = 0; i < 17 * kIn; ++i) {
      uint16_t& bits = x.tensor.row<uint16_t>(0)[i];
      bits = f32_to_bf16(std::ldexp(bf16_to_f32(bits) < 0 ? -1.9921875f : 1.9921875f, exponent));
    }
    const Tensor all = linear(cpu.context(), x.tensor, packed.matrix, DType::kF32);
    for (int64_t o = 0; o < kOut; ++o) ASSERT_EQ(std::isfinite(all.row<float>(0)[o]), exponent < 120) << exponent;
    for (const int64_t rows : {1, 6, 7, 16}) {
      const Tensor some = linear(cpu.context(), x.tensor.row_range(0, rows), packed.matrix, DType::kF32);
      for (int64_t i = 0; i < rows * kOut && exponent < 120; ++i)
        ASSERT_EQ(some.row<float>(0)[i], all.row<float>(0)[i]) << rows << " rows of 2^" << exponent;
    }
  }
}

// Zeros and the smallest numbers add nothing; an infinity or NaN is seen in all outputs of its row, and in no other
// row.
TEST_P(EveryIsa, Int4InputsAtTheEdgesOfTheirRange) {
  TestCpu cpu(GetParam(), 1);
  const auto m = test_matrix(WeightFormat::kInt4Group32, 40, 96, 1);
  const Packed packed = pack(cpu, std::span(&m->raw, 1));
  const TestRows x(5, 96, 96, 9);
  for (int64_t c = 0; c < 96; ++c) {
    x.tensor.row<uint16_t>(0)[c] = c % 2 == 0 ? 0 : 0x8000;
    x.tensor.row<uint16_t>(1)[c] = 1;  // 2^-133
  }
  x.tensor.row<uint16_t>(2)[70] = 0x7F80;
  x.tensor.row<uint16_t>(3)[3] = 0xFFC0;
  const Tensor y = linear(cpu.context(), x.tensor, packed.matrix, DType::kF32);
  for (int64_t o = 0; o < 40; ++o) {
    EXPECT_EQ(y.row<float>(0)[o], 0);
    EXPECT_LT(std::fabs(y.row<float>(1)[o]), 1e-36f);
    EXPECT_TRUE(std::isnan(y.row<float>(3)[o]));
    EXPECT_TRUE(std::isfinite(y.row<float>(4)[o]));
  }
  EXPECT_FALSE(std::isfinite(y.row<float>(2)[0]));
}

// Where inputs are the largest of their group and weights the largest or smallest ones, no sum overflows.
TEST_P(EveryIsa, Int4SumsOfTheLargestNumbersAreExact) {
  constexpr int64_t kOut = 40, kIn = 64, kRows = 7;
  TestCpu cpu(GetParam(), 1);
  const auto m = test_matrix(WeightFormat::kInt4Group32, kOut, kIn, 1);
  constexpr uint32_t kWords[] = {0xFFFFFFFF, 0, 0xF0F0F0F0, 0x00FF00FF};
  for (int64_t i = 0; i < kOut * kIn / 8; ++i) m->data[static_cast<size_t>(i)] = kWords[i / (kIn / 8) % 4];
  std::fill_n(reinterpret_cast<uint16_t*>(m->scale.data()), kOut * kIn / 32, f32_to_bf16(1));
  const Packed packed = pack(cpu, std::span(&m->raw, 1));
  const TestRows x(kRows, kIn, kIn, 9);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < kIn; ++c) x.tensor.row<uint16_t>(r)[c] = f32_to_bf16(r % 2 == 0 ? 1.9921875f : -1.9921875f);
  for (int64_t rows = 1; rows <= kRows; ++rows) {
    const Tensor y = linear(cpu.context(), x.tensor.row_range(0, rows), packed.matrix, DType::kF32);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t o = 0; o < kOut; ++o)
        ASSERT_EQ(y.row<float>(r)[o], exact(x.tensor, r, m->raw, o).first) << rows << " rows: " << o;
  }
}

// INT4 beside another format becomes bf16.
TEST_P(EveryIsa, StackedFormatsAreBf16) {
  TestCpu cpu(GetParam(), 2);
  const auto a = test_matrix(WeightFormat::kInt4Group32, 20, 64, 1), b = test_matrix(WeightFormat::kF32, 37, 64, 2);
  const RawMatrix both[] = {a->raw, b->raw};
  const Packed ab = pack(cpu, both);
  const TestRows x(1, 64, 64, 9);
  const Tensor y = linear(cpu.context(), x.tensor, ab.matrix, DType::kF32);
  for (int64_t o = 0; o < 20; ++o) {
    double sum = 0, size = 0;
    for (int64_t c = 0; c < 64; ++c) {
      const double rounded = bf16_to_f32(f32_to_bf16(raw_element(a->raw, o, c)));
      const double term = static_cast<double>(bf16_to_f32(x.tensor.row<uint16_t>(0)[c])) * rounded;
      sum += term;
      size += std::fabs(term);
    }
    EXPECT_NEAR(y.row<float>(0)[o], sum, 1e-6 * size);
  }
}

// All 16 nibbles times many scales, seen through rows of the identity, few and many.
TEST_P(EveryIsa, Int4ElementsAreThoseOfTheMatrix) {
  constexpr int64_t kOut = 64, kIn = 2048;
  TestCpu cpu(GetParam(), 1);
  const auto m = test_matrix(WeightFormat::kInt4Group32, kOut, kIn, 21);
  auto* scales = reinterpret_cast<uint16_t*>(m->scale.data());
  for (int64_t i = 0; i < 64 * 64; ++i) scales[i] = static_cast<uint16_t>(0x3000 + i);  // sixteen binades, positive
  const Packed packed = pack(cpu, std::span(&m->raw, 1));
  const TestRows x(kIn, kIn, kIn, 1);
  for (int64_t r = 0; r < kIn; ++r)
    for (int64_t c = 0; c < kIn; ++c) x.tensor.row<uint16_t>(r)[c] = r == c ? 0x3F80 : 0;
  for (const int64_t rows : {int64_t{1}, int64_t{7}, kIn}) {
    const Tensor y = linear(cpu.context(), x.tensor.row_range(0, rows), packed.matrix, DType::kF32);
    for (int64_t c = 0; c < rows; ++c)
      for (int64_t o = 0; o < kOut; ++o)
        ASSERT_EQ(y.row<float>(c)[o], weight(m->raw, o, c)) << rows << " rows: " << o << "," << c;
  }
}

// Experts of one format, with routing of n tokens to k of them. Their inner dimension is `inter` from `first` on of a
// stored one.
struct ExpertCase {
  ExpertCase(WeightFormat format, int64_t experts, int64_t hidden, int64_t inter, int64_t tokens, int64_t first = 0)
      : x(tokens, hidden, hidden, 77) {
    const int64_t stored = first > 0 ? (first + inter + 127) / 128 * 128 : inter;
    for (int64_t e = 0; e < experts; ++e) {
      for (const auto& [out, in] : {std::pair{stored, hidden}, {stored, hidden}, {hidden, stored}})
        matrices.push_back(test_matrix(format, out, in, 100 + matrices.size()));
      const size_t at = matrices.size();
      raw.push_back({window(matrices[at - 3]->raw, first, inter, 0, hidden),
                     window(matrices[at - 2]->raw, first, inter, 0, hidden),
                     window(matrices[at - 1]->raw, 0, hidden, first, inter)});
    }
    TestRandom random(5);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<int32_t>(random.bits() % static_cast<uint32_t>(experts));
      for (int32_t k = 0; k < 3; ++k) {
        ids.push_back(static_cast<int32_t>((first + k * (t % 2 + 1)) % experts));
        weights.push_back(random.uniform());
      }
    }
  }
  Routing routing(int64_t first, int64_t n) {
    return {.num_tokens = n, .top_k = 3, .ids = ids.data() + first * 3, .weights = weights.data() + first * 3};
  }
  std::vector<std::unique_ptr<TestMatrix>> matrices;
  std::vector<RawExpert> raw;
  TestRows x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// The formula in double; the product of gate and up is rounded to bf16, as it is stored.
std::vector<double> expert_formula(const ExpertCase& c, int64_t token, const RawExpert& e) {
  std::vector<double> h(static_cast<size_t>(e.gate.out)), y(static_cast<size_t>(e.down.out));
  for (int64_t i = 0; i < e.gate.out; ++i) {
    const double gate = exact(c.x.tensor, token, e.gate, i).first;
    const double up = exact(c.x.tensor, token, e.up, i).first;
    h[static_cast<size_t>(i)] = bf16_to_f32(f32_to_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up)));
  }
  for (int64_t o = 0; o < e.down.out; ++o) {
    for (int64_t i = 0; i < e.down.in; ++i)
      y[static_cast<size_t>(o)] += h[static_cast<size_t>(i)] * static_cast<double>(weight(e.down, o, i));
  }
  return y;
}

void expect_weighted_sums(Isa isa, ExpertCase& c, PanelFormat format) {
  c.ids[4] = -1;  // routed to no expert
  TestCpu cpu(isa, 2);
  const ExpertWeights experts = pack_experts(cpu.pool(), c.raw);
  const auto& packed = static_cast<const PackedExperts&>(*experts.packed);
  EXPECT_EQ(packed.gate_up.format, format);
  EXPECT_EQ(packed.down.format, format);
  const Tensor y = moe_experts(cpu.context(), c.x.tensor, c.routing(0, 9), packed);
  for (int64_t t = 0; t < 9; ++t) {
    std::vector<double> want(static_cast<size_t>(c.raw[0].down.out));
    double largest = 0;
    for (size_t k = 0; k < 3; ++k) {
      const auto slot = static_cast<size_t>(t) * 3 + k;
      if (c.ids[slot] < 0) continue;
      const std::vector<double> part = expert_formula(c, t, c.raw[static_cast<size_t>(c.ids[slot])]);
      for (size_t o = 0; o < want.size(); ++o) want[o] += static_cast<double>(c.weights[slot]) * part[o];
    }
    for (const double v : want) largest = std::fmax(largest, std::fabs(v));
    // A gate * up on the edge between two bf16 numbers may be rounded the other way: 2^-8 of one term.
    for (size_t o = 0; o < want.size(); ++o) ASSERT_NEAR(y.row<float>(t)[o], want[o], 3e-3 * largest) << t << "," << o;
  }
}

TEST_P(EveryIsa, ExpertsAreTheWeightedSum) {
  for (const WeightFormat format : kFormats) {
    const bool int4 = format == WeightFormat::kInt4Group32;
    ExpertCase c(format, 4, int4 ? 96 : 90, int4 ? 64 : 50, 9);
    expect_weighted_sums(GetParam(), c,
                         int4                                  ? PanelFormat::kInt4
                         : format == WeightFormat::kF8Block128 ? PanelFormat::kScaled
                                                               : PanelFormat::kBF16);
  }
}

// As ranks hold them whose cuts lie between scales.
TEST_P(EveryIsa, ExpertsCutBetweenScalesAreTheWeightedSum) {
  for (const auto& [first, inter] : {std::pair<int64_t, int64_t>{16, 48}, {24, 8}, {48, 176}, {96, 352}, {120, 16}})
    for (const auto& [format, kept] : {std::pair{WeightFormat::kInt4Group32, PanelFormat::kInt4},
                                       {WeightFormat::kF8Block128, PanelFormat::kScaled}}) {
      ExpertCase c(format, 4, 96, inter, 9, first);
      expect_weighted_sums(GetParam(), c, kept);
    }
}

TEST_P(EveryIsa, ExpertsOfATokenDoNotDependOnItsBatchOrThreads) {
  constexpr int64_t kTokens = 700;  // over 256 rows an expert
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kInt4Group32}) {
    ExpertCase c(format, 5, 160, 96, kTokens);
    TestCpu one(GetParam(), 1), two(GetParam(), 2), five(GetParam(), 5);
    const ExpertWeights experts = pack_experts(one.pool(), c.raw);
    const auto& packed = static_cast<const PackedExperts&>(*experts.packed);
    const Tensor all = moe_experts(one.context(), c.x.tensor, c.routing(0, kTokens), packed);
    for (TestCpu* cpu : {&one, &two, &five}) {
      for (const int64_t rows : {1, 2, 7, 16, 17, 100, 700}) {
        const int64_t first = kTokens - rows;
        const Tensor y = moe_experts(cpu->context(), c.x.tensor.row_range(first, rows), c.routing(first, rows), packed);
        ASSERT_EQ(std::memcmp(y.data, all.row<float>(first), static_cast<size_t>(rows * 160) * 4), 0) << rows;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, EveryIsa, ::testing::ValuesIn(kAllIsas),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace perigee::cpu

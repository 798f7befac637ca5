#include "ops/cuda/matrix_layout.h"

#include <gtest/gtest.h>

#include "ops/cuda/cuda_ops.h"

namespace perigee {
namespace {

RawMatrix shape(WeightFormat format, int64_t out, int64_t in) {
  return {.format = format, .out = out, .in = in};
}

TEST(MatrixLayout, RowsArePaddedTo128Columns) {
  const MatrixLayout m =
      linear_layout(std::array{shape(WeightFormat::kF32, 10, 200), shape(WeightFormat::kBF16, 6, 200)});
  EXPECT_EQ(m.format, WeightFormat::kBF16);
  EXPECT_EQ(m.out, 16);
  EXPECT_EQ(m.padded_in, 256);
  EXPECT_EQ(m.all_bytes(), 16 * 256 * 2);
}

TEST(MatrixLayout, Fp8StaysWhereTheSeamsLieBetweenScales) {
  const auto fp8 = [](int64_t out) { return shape(WeightFormat::kF8Block128, out, 256); };
  EXPECT_EQ(linear_layout(std::array{fp8(16), fp8(9)}).all_bytes(), 25 * 256 + 4 * 2 * 4);
  EXPECT_EQ(linear_layout(std::array{fp8(9), fp8(16)}).all_bytes(), 25 * 256 * 2);
}

// Kimi-K2: 24.77 MB an expert, 4 bits and a bf16 scale for each 32.
TEST(MatrixLayout, Int4ExpertsKeepTheirScales) {
  const auto int4 = [](int64_t out, int64_t in) { return shape(WeightFormat::kInt4Group32, out, in); };
  const std::vector<RawExpert> experts(3, {.gate = int4(2048, 7168), .up = int4(2048, 7168), .down = int4(7168, 2048)});
  const ExpertLayout layout = expert_layout(experts);
  EXPECT_EQ(layout.gate_up.all_bytes() + layout.down.all_bytes(), int64_t{3} * 3 * 2048 * 7168 * 9 / 16);
  // A quarter of 48 columns does not end with a group.
  const RawExpert cut{.gate = int4(48, 128), .up = int4(48, 128), .down = window(int4(128, 192), 0, 128, 48, 48)};
  EXPECT_EQ(expert_layout(std::span(&cut, 1)).down.format, WeightFormat::kBF16);
}

TEST(MatrixLayout, SizesAreThoseOfTheLayout) {
  const auto sizes = make_cuda_sizes();
  const RawMatrix gate = shape(WeightFormat::kBF16, 24, 128), kv_b = shape(WeightFormat::kBF16, 2 * (32 + 48), 128);
  EXPECT_EQ(sizes->pack_linear(gate).packed->bytes(), 24 * 128 * 2);
  EXPECT_EQ(sizes->pack_gate_up(gate, gate).packed->bytes(), 2 * 24 * 128 * 2);
  EXPECT_EQ(sizes->pack_gate_up(gate, gate).out, 48);
  EXPECT_EQ(sizes->pack_embed(gate).packed->bytes(), 24 * 128 * 2);
  const MlaShape mla{.heads = 2, .nope = 32, .rope = 16, .value = 48, .latent = 128};
  // kv_b, and its keys transposed, whose rows of 32 are padded.
  EXPECT_EQ(sizes->pack_mla_up(kv_b, mla).packed->bytes(), 160 * 128 * 2 + 2 * 128 * 128 * 2);
}

}  // namespace
}  // namespace perigee

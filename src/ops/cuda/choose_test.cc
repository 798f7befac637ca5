#include "ops/cuda/choose.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr WeightFormat kBF16 = WeightFormat::kBF16, kFp8 = WeightFormat::kF8Block128,
                       kInt4 = WeightFormat::kInt4Group32;
constexpr KernelTraits kHopper{.compute_capability = 90, .library = true};
constexpr KernelTraits kAmpere{.compute_capability = 80, .library = true};
constexpr KernelTraits kFixed{.compute_capability = 90, .deterministic = true};

GemmKernel kernel(WeightFormat format, int32_t rows, int32_t out, const KernelTraits& traits) {
  return choose_gemm({.format = format, .rows = rows, .out = out}, traits).kernel;
}

TEST(Choose, FewRowsReadTheWeightsOnce) {
  for (const KernelTraits& traits : {kHopper, kAmpere, kFixed}) {
    EXPECT_EQ(kernel(kBF16, 32, 4096, traits), GemmKernel::kSkinny);
    EXPECT_EQ(choose_gemm({.rows = 8}, traits).item_rows, 8);
    EXPECT_EQ(choose_gemm({.rows = 9}, traits).item_rows, 16);
    EXPECT_EQ(choose_gemm({.rows = 16}, traits).item_rows, 16);
    EXPECT_EQ(choose_gemm({.rows = 17}, traits).item_rows, 32);
  }
}

TEST(Choose, ManyRowsOfBf16GoToTheLibraryWhereThereIsOne) {
  EXPECT_EQ(kernel(kBF16, 33, 4096, kHopper), GemmKernel::kLibrary);
  EXPECT_EQ(kernel(kBF16, 33, 4096, kAmpere), GemmKernel::kLibrary);
  EXPECT_EQ(kernel(kBF16, 33, 4096, {.compute_capability = 90}), GemmKernel::kHopper);
  EXPECT_EQ(kernel(kBF16, 33, 4096, {.compute_capability = 80}), GemmKernel::kTile);
  EXPECT_EQ(kernel(kBF16, 33, 4096, {.compute_capability = 120}), GemmKernel::kTile);
}

TEST(Choose, WhatTheLibraryDeclinesRunsOnOurKernels) {
  EXPECT_EQ(choose_own_gemm({.rows = 33, .out = 4096}, kHopper).kernel, GemmKernel::kHopper);
  EXPECT_EQ(choose_own_gemm({.rows = 33, .out = 4096, .aligned = false}, kHopper).kernel, GemmKernel::kTile);
  EXPECT_EQ(choose_own_gemm({.rows = 33, .out = 4096}, kAmpere).kernel, GemmKernel::kTile);
}

TEST(Choose, GateAndUpInOneProductIsNeverTheLibrarys) {
  const GemmShape shape{.rows = 8192, .out = 8192, .silu_mul = true};
  EXPECT_EQ(choose_gemm(shape, kHopper).kernel, GemmKernel::kHopper);
  EXPECT_EQ(choose_gemm(shape, kAmpere).kernel, GemmKernel::kTile);
  EXPECT_TRUE(choose_separate_silu(kBF16, 33, kHopper));
  EXPECT_FALSE(choose_separate_silu(kBF16, 32, kHopper));
  EXPECT_FALSE(choose_separate_silu(kFp8, 33, kHopper));
  EXPECT_FALSE(choose_separate_silu(kBF16, 33, kFixed));
}

TEST(Choose, Fp8IsReadTwiceThenTiledThenWidened) {
  const auto widens = [](int32_t rows, int32_t out) {
    const GemmChoice choice = choose_gemm({.format = kFp8, .rows = rows, .out = out}, kHopper);
    EXPECT_EQ(choice.widen, choice.kernel == GemmKernel::kLibrary);
    return choice.widen;
  };
  EXPECT_EQ(kernel(kFp8, 64, 6143, kHopper), GemmKernel::kSkinny);
  EXPECT_TRUE(widens(65, 6143));
  EXPECT_EQ(kernel(kFp8, 32, 6144, kHopper), GemmKernel::kSkinny);
  EXPECT_EQ(kernel(kFp8, 33, 6144, kHopper), GemmKernel::kHopper);
  EXPECT_FALSE(widens(512, 6144));
  EXPECT_TRUE(widens(513, 6144));
  EXPECT_EQ(choose_gemm({.format = kFp8, .rows = 33, .out = 2048, .silu_mul = true}, kAmpere).kernel,
            GemmKernel::kTile);
}

TEST(Choose, DeterministicModeHasTwoKernelsOfTheSameBits) {
  EXPECT_EQ(kernel(kBF16, 128, 4096, kFixed), GemmKernel::kSkinny);
  EXPECT_EQ(kernel(kBF16, 129, 4096, kFixed), GemmKernel::kOrdered);
  EXPECT_EQ(kernel(kFp8, 129, 4096, kFixed), GemmKernel::kOrdered);
  EXPECT_EQ(kernel(kInt4, 8192, 4096, kFixed), GemmKernel::kSkinny);
  for (const int64_t pairs : {1, 16, 17, 1000, 100000})
    for (const WeightFormat format : {kBF16, kFp8, kInt4}) {
      const GemmKernel chosen = choose_experts(format, pairs, 64, kFixed).kernel;
      EXPECT_TRUE(chosen == GemmKernel::kSkinny || chosen == GemmKernel::kOrdered) << pairs;
    }
}

TEST(Choose, ExpertsByPairsOfEach) {
  const auto experts = [](int64_t pairs, const KernelTraits& traits) {
    return choose_experts(kInt4, pairs, 8, traits);
  };
  EXPECT_EQ(experts(16, kHopper), (ExpertChoice{.sorted = false}));
  EXPECT_EQ(experts(17, kHopper), (ExpertChoice{.item_rows = 8}));
  EXPECT_EQ(experts(8 * 8 - 1, kHopper), (ExpertChoice{.item_rows = 16}));
  EXPECT_EQ(experts(8 * 8, kHopper), (ExpertChoice{.kernel = GemmKernel::kHopper, .item_rows = 0}));
  EXPECT_EQ(first_hopper_pairs(8, kHopper), 8 * 8);
  EXPECT_EQ(first_hopper_pairs(1, kHopper), 17);
  EXPECT_EQ(first_hopper_pairs(8, kAmpere), INT64_MAX);
  EXPECT_EQ(first_hopper_pairs(8, kFixed), INT64_MAX);
  EXPECT_EQ(experts(8 * 7 - 1, kAmpere), (ExpertChoice{.item_rows = 8}));
  EXPECT_EQ(experts(8 * 7, kAmpere), (ExpertChoice{.item_rows = 16}));
  EXPECT_EQ(experts(8 * 15, kAmpere), (ExpertChoice{.item_rows = 32}));
  EXPECT_EQ(experts(8 * 41 - 1, kAmpere), (ExpertChoice{.item_rows = 32}));
  EXPECT_EQ(experts(8 * 41, kAmpere), (ExpertChoice{.kernel = GemmKernel::kTile, .item_rows = kTileRows}));
  EXPECT_EQ(choose_experts(kBF16, 8 * 32, 8, kFixed), (ExpertChoice{.item_rows = 32}));
  EXPECT_EQ(choose_experts(kBF16, 8 * 33, 8, kFixed),
            (ExpertChoice{.kernel = GemmKernel::kOrdered, .item_rows = kOrderedRows}));
}

TEST(Choose, KdaGatesJoinWhileTheyAreFewRowsOfBf16) {
  EXPECT_TRUE(choose_joined_kda_gates(kBF16, kBF16, 32));
  EXPECT_FALSE(choose_joined_kda_gates(kBF16, kBF16, 33));
  EXPECT_FALSE(choose_joined_kda_gates(kFp8, kBF16, 1));
  EXPECT_FALSE(choose_joined_kda_gates(kBF16, kFp8, 1));
}

TEST(Choose, LatentAttention) {
  const auto decode = [](int heads, int max_query, int capability) {
    return MlaDecodeRows{.heads = heads, .max_query = max_query, .compute_capability = capability};
  };
  EXPECT_EQ(choose_mla_decode(decode(16, 1, 90)), MlaKernel::kMma16);
  EXPECT_EQ(choose_mla_decode(decode(8, 3, 90)), MlaKernel::kWgmma64);
  EXPECT_EQ(choose_mla_decode(decode(17, 1, 80)), MlaKernel::kMma32);
  MlaDecodeRows rows = decode(8, 1, 90);
  rows.fixed = true;
  EXPECT_EQ(choose_mla_decode(rows), MlaKernel::kWgmma64);
  rows = decode(8, 1, 90);
  rows.format = LatentFormat::kF8Tiles;
  EXPECT_EQ(choose_mla_decode(rows), MlaKernel::kWgmma64);
  EXPECT_EQ(choose_mla_prefill(128, 128, 90), PrefillKernel::kWgmma192);
  EXPECT_EQ(choose_mla_prefill(192, 256, 120), PrefillKernel::kMma256);
  EXPECT_EQ(choose_mla_prefill(128, 256, 90), PrefillKernel::kNone);
}

TEST(Choose, TheTableNamesWhatIsChosen) {
  const std::string text = choices_text(kHopper);
  for (const char* line :
       {"compute capability 90, cuBLASLt\n", "bf16, from 1 row: skinny by 8\n", "bf16, from 33 rows: cublaslt\n",
        "FP8, 2048 outputs, from 65 rows: widened, cublaslt\n", "8 of 64 experts, INT4, from 64 rows: hopper\n",
        "MLA decode, 64 heads: wgmma64\n", "MLA prefill, 192 and 256 columns: mla_prefill wgmma 256/256\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  EXPECT_NE(choices_text(kFixed).find("MLA prefill, 128 and 128 columns: absorbed\n"), std::string::npos);
}

}  // namespace
}  // namespace perigee

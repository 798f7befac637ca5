#include "profile/step_table.h"

#include <gtest/gtest.h>

#include <array>

namespace perigee {
namespace {

using Kind = DeviceActivity::Kind;

DeviceActivity activity(const char* name, int64_t begin_ns, int64_t end_ns, Kind kind = Kind::kKernel) {
  return {.kind = kind, .name = name, .begin_ns = begin_ns, .end_ns = end_ns};
}

LaunchPlace place(int32_t op, const char* label, int32_t use = 0) {
  return {.op = op, .label = label, .use = use};
}

double total(const std::vector<StepPiece>& pieces) {
  double sum = 0;
  for (const StepPiece& piece : pieces) sum += piece.us;
  return sum;
}

// Two layers of an op with two products, of 1 and 3 MB, and a norm that no part knows.
std::vector<OpCost> two_layers() {
  const OpCost layer{.op = "in", .parts = {{"qk|linear", "q", 1000000, 4e9}, {"linear", "kv", 3000000, 0}}};
  return {layer, layer};
}

TEST(PlaceStep, OverlapBelongsToTheFirstAndGapsAreTheirOwn) {
  // b begins while a runs, as a dependent launch does, and lies within it; c begins within a and outlasts it; d after a
  // pause.
  const std::vector<DeviceActivity> step = {activity("a", 1000, 5000), activity("b", 2000, 4000),
                                            activity("c", 4500, 7000), activity("d", 9000, 9500)};
  const auto pieces = place_step(step, 500, {}, {});
  ASSERT_EQ(pieces.size(), 6u);
  const std::vector<std::pair<std::string, double>> want = {{"", 0.5}, {"a", 4}, {"b", 0},
                                                            {"c", 2},  {"", 2},  {"d", 0.5}};
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(pieces[i].kernel, want[i].first) << i;
    EXPECT_NEAR(pieces[i].us, want[i].second, 1e-9) << i;
  }
  EXPECT_NEAR(total(pieces), 9.0, 1e-9);  // from 500 to 9500 ns
}

TEST(PlaceStep, AStepThatBeginsBeforeTheOneBeforeEnded) {
  const auto pieces = place_step({activity("a", 900, 2000)}, 1500, {}, {});
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_NEAR(pieces[0].us, 0.5, 1e-9);
}

TEST(PlaceStep, AnActivityHasThePlaceOfItsCounterpart) {
  const std::vector<DeviceActivity> example = {activity("up", 0, 1, Kind::kCopyIn), activity("gemm", 1, 2),
                                               activity("extra", 2, 3), activity("gemm", 3, 4)};
  const std::vector<LaunchPlace> places = {{}, place(0, "linear"), place(0, "sum"), place(1, "linear")};
  // The graph lacks "extra" and has "other".
  const auto pieces = place_step({activity("up", 0, 10, Kind::kCopyIn), activity("gemm", 10, 20),
                                  activity("other", 20, 30), activity("gemm", 30, 40)},
                                 0, example, places);
  ASSERT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].place.op, kOutsideModel);
  EXPECT_EQ(pieces[1].place.op, 0);
  EXPECT_EQ(pieces[2].place.op, kOutsideModel);
  EXPECT_EQ(pieces[3].place.op, 1);
}

constexpr const char* kSum = "_ZN7perigee20one_shot_norm_kernelENS_8PeerViewE";

// Rank 1 comes 3 us late to the first exchange, rank 0 5 us late to the second; both come to the third at once. Rank
// 1's clock is 1,000 us ahead.
TEST(SplitWaits, TheTimeUntilTheLastRankComesIsARowOfItsOwn) {
  std::vector<std::vector<StepPiece>> ranks = {
      place_step({activity(kSum, 0, 5000), activity("gemm", 5000, 15000), activity(kSum, 15000, 17000),
                  activity(kSum, 17000, 20000)},
                 0, {}, {}),
      place_step(
          {activity("gemm", 1000000, 1003000), activity(kSum, 1003000, 1005000), activity("gemm", 1005000, 1010000),
           activity(kSum, 1010000, 1017000), activity(kSum, 1017000, 1020000)},
          1000000, {}, {})};
  split_waits(ranks);
  const std::array<double, 2> waits = {3, 5};
  for (size_t r = 0; r < 2; ++r) {
    const StepTable table = make_step_table({}, ranks[r]);
    EXPECT_NEAR(table.sum_us(), 20, 1e-9);
    ASSERT_EQ(table.groups.size(), 2u);
    EXPECT_EQ(table.groups[1].op, kWaiting);
    EXPECT_NEAR(table.groups[1].total.us, waits[r], 1e-9);
    for (const StepRow& row : table.groups[0].parts)
      if (row.what == "one_shot_norm_kernel") {
        EXPECT_NEAR(row.us, 7, 1e-9);  // of 10 and 12
      }
  }
}

TEST(SplitWaits, RanksWithOtherExchangesAreLeftAsTheyAre) {
  std::vector<std::vector<StepPiece>> ranks = {place_step({activity(kSum, 0, 5)}, 0, {}, {}),
                                               place_step({activity(kSum, 0, 5), activity(kSum, 5, 10)}, 0, {}, {})};
  split_waits(ranks);
  EXPECT_EQ(ranks[0].size(), 1u);
  EXPECT_EQ(ranks[1].size(), 2u);
}

TEST(SplitSteps, ACopyToTheHostEndsAStep) {
  const auto steps =
      split_steps({activity("a", 0, 1), activity("copy", 1, 2, Kind::kCopyOut), activity("b", 2, 3),
                   activity("copy", 3, 4, Kind::kCopyIn), activity("copy", 4, 5, Kind::kCopyOut), activity("c", 6, 7)});
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].size(), 2u);
  EXPECT_EQ(steps[1].size(), 3u);
  EXPECT_TRUE(split_steps({activity("a", 0, 1)}).empty());
}

// Ids and how many of them are kept.
TEST(SplitSteps, SeveralCopiesToTheHostEndOneStep) {
  const auto steps = split_steps({activity("a", 0, 1), activity("copy", 1, 2, Kind::kCopyOut),
                                  activity("copy", 2, 3, Kind::kCopyOut), activity("b", 3, 4),
                                  activity("copy", 4, 5, Kind::kCopyOut), activity("copy", 5, 6, Kind::kCopyOut)});
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].size(), 3u);
  EXPECT_EQ(steps[1].size(), 3u);
}

TEST(StepTable, PartsAreSummedOverLayersAndCountedOnce) {
  const auto ops = two_layers();
  std::vector<StepPiece> pieces;
  for (int32_t op = 0; op < 2; ++op) {
    pieces.push_back({.place = place(op, "linear", 0), .kernel = "gemm", .us = 2});
    pieces.push_back({.place = place(op, "linear", 0), .kernel = "reduce", .us = 1});  // the same product's second
    pieces.push_back({.place = place(op, "linear", 1), .kernel = "gemm", .us = 5});
    pieces.push_back({.place = place(op, "norm"), .kernel = "norm", .us = 0.5});
  }
  pieces.push_back({.place = {}, .us = 4});
  pieces.push_back({.place = {}, .kernel = "sample", .us = 3});
  const StepTable table = make_step_table(ops, pieces);
  ASSERT_EQ(table.groups.size(), 3u);
  const StepGroup& in = table.groups[0];
  EXPECT_EQ(in.total.calls, 2);
  EXPECT_EQ(in.total.bytes, 8000000);
  EXPECT_NEAR(in.total.us, 17, 1e-9);
  ASSERT_EQ(in.parts.size(), 3u);
  EXPECT_EQ(in.parts[0].what, "q");
  EXPECT_EQ(in.parts[0].kernels, "gemm + reduce");
  EXPECT_EQ(in.parts[0].bytes, 2000000);
  EXPECT_EQ(in.parts[0].flops, 8e9);
  EXPECT_NEAR(in.parts[0].us, 6, 1e-9);
  EXPECT_EQ(in.parts[1].what, "kv");
  EXPECT_EQ(in.parts[1].bytes, 6000000);
  EXPECT_EQ(in.parts[2].what, "norm");
  EXPECT_EQ(in.parts[2].bytes, 0);
  EXPECT_EQ(table.groups[1].op, "gaps");
  EXPECT_EQ(table.groups[2].op, "outside the model");
  EXPECT_NEAR(table.sum_us(), 24, 1e-9);
}

TEST(StepTable, TheLimitIsTheSlowerOfBytesAndFlops) {
  const StepLimits limits{.bytes_per_s = 1e12, .flops_per_s = 1e15};
  EXPECT_NEAR(limits.us(4000000, 1e9), 4, 1e-9);
  EXPECT_NEAR(limits.us(4000000, 8e9), 8, 1e-9);
  EXPECT_EQ(StepLimits().us(4000000, 8e9), 0);
  // 2 MB in 6 us are 333 GB/s; 8 GFLOP at the limit would take 8 us.
  const StepTable table = make_step_table(two_layers(), {{.place = place(0, "linear"), .kernel = "gemm", .us = 6}});
  const std::string text = print_step_table(table, {.bytes_per_s = 1e12, .flops_per_s = 1e16});
  EXPECT_NE(text.find("|  | q | gemm | 1 | 6.0 | 100.0 | 1.00 | 4.00 | 167 | 17 |"), std::string::npos) << text;
}

TEST(KernelNames, AreShort) {
  EXPECT_EQ(short_kernel_name("_ZN7perigee12_GLOBAL__N_114combine_kernelEPKf"), "combine_kernel");
  EXPECT_EQ(short_kernel_name("nvjet_tst_64x8_64x16_4x1_v_bz_TNN"), "nvjet_tst_64x8_64x16_4x1_v_bz_TNN");
  EXPECT_EQ(short_kernel_name("copy"), "copy");
}

}  // namespace
}  // namespace perigee

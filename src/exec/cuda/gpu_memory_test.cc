#include "exec/cuda/gpu_memory.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr double kMiB = 1 << 20;

GpuWorkspace workspace_of(const PlanLimits& limits, int64_t size = 1) {
  RankConfig config;
  config.load.path = "bench/models/kimi-linear-48b";
  config.load.format = LoadFormat::kDummy;
  config.load.ranks.size = size;
  config.limits = limits;
  const auto parts = size_gpu_parts(config);
  CHECK(parts.ok(), parts.error().message);
  auto model = read_config(config.load.path);
  CHECK(model.ok(), model.error().message);
  model->ranks = config.load.ranks;
  return estimate_gpu_workspace(*parts, *model, 90);
}

TEST(GpuWorkspace, GrowsWithTokensAndSlots) {
  const GpuWorkspace small = workspace_of({.max_sequences = 64, .max_step_tokens = 2048});
  const GpuWorkspace tokens = workspace_of({.max_sequences = 64, .max_step_tokens = 8192});
  const GpuWorkspace slots = workspace_of({.max_sequences = 1024, .max_step_tokens = 2048});
  EXPECT_GT(tokens.temporaries, 3 * small.temporaries);
  EXPECT_LT(tokens.temporaries, 5 * small.temporaries);
  EXPECT_GT(slots.arrays, 12 * small.arrays);
  EXPECT_EQ(small.context, tokens.context);
  EXPECT_EQ(small.graphs, tokens.graphs);
  EXPECT_GT(slots.graphs, small.graphs);
}

// Of one Kimi-Linear-48B token: 8 experts' outputs in bf16 (36,864 bytes) and inputs (16,384), attention's 160 KB with
// all heads, half of that with 2 ranks.
TEST(GpuWorkspace, AShareOfTheHeadsTakesLess) {
  const PlanLimits limits{.max_sequences = 64, .max_step_tokens = 8192};
  const double one = static_cast<double>(workspace_of(limits).temporaries) / kMiB;
  const double two = static_cast<double>(workspace_of(limits, 2).temporaries) / kMiB;
  EXPECT_GT(one, 1200);
  EXPECT_LT(one, 2600);
  EXPECT_LT(two, 0.75 * one);
  EXPECT_GT(two, 0.45 * one);
}

TEST(GpuPool, IsWhatWasAskedForOrWhatTheShareLeaves) {
  RankConfig config;
  config.cache_bytes = 5;
  EXPECT_EQ(gpu_pool_bytes(config, 1000, 800), 5);
  config.cache_bytes = 0;
  config.memory_share = 0.9;
  EXPECT_EQ(gpu_pool_bytes(config, 1000, 800), 100);
  EXPECT_EQ(gpu_pool_bytes(config, 1000, 950), -50);
}

}  // namespace
}  // namespace perigee

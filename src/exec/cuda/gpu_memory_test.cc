#include "exec/cuda/gpu_memory.h"

#include <gtest/gtest.h>

#include <string>

namespace perigee {
namespace {

constexpr double kMiB = 1 << 20;

GpuWorkspace workspace_of(const PlanLimits& limits, int64_t size = 1, const char* model_name = "kimi-linear-48b",
                          const char* draft_name = nullptr) {
  RankConfig config;
  if (draft_name != nullptr) config.draft_model = std::string("bench/models/") + draft_name;
  config.load.path = std::string("bench/models/") + model_name;
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

// With 102,400 ids a rank of two keeps counts, bits and logits as sampled (627,200 bytes) of half the slots, and gets
// whole rows of logits (409,600 bytes) for these and for 256 scores of prompts. Mailboxes take 16 MiB, boxes of
// numbers 32.
TEST(GpuWorkspace, RanksDivideSlotsAndGetTheirLogitsWhole) {
  const PlanLimits limits{.max_sequences = 1024, .max_step_tokens = 8192};
  const int64_t apart = workspace_of(limits, 2, "v2-lite").arrays - workspace_of(limits, 1, "v2-lite").arrays;
  EXPECT_EQ(apart, 768 * 409'600 - 512 * 627'200 + (48 << 20));
}

// Of 102,400 ids three more places of a slot take three more rows as sampled and 75 KiB to sort them in; prompt lookup
// a history of 163,840 positions.
TEST(GpuWorkspace, DraftsTakeRowsToSampleAndAHistory) {
  const int64_t plain = workspace_of({.max_sequences = 64, .max_step_tokens = 8192}, 1, "v2-lite").arrays;
  const int64_t drafts =
      workspace_of({.max_sequences = 64, .max_step_tokens = 8192, .num_drafts = 3}, 1, "v2-lite").arrays;
  EXPECT_NEAR(static_cast<double>(drafts - plain), 64 * (3 * (409'600 + (25 << 10)) + 4 * 163'841), 64 * 1024);
}

// Of each of 8,192 tokens the draft reads three hidden states of 2,304 numbers; what it takes once the step is done is
// less than a layer of experts does before.
TEST(GpuWorkspace, ADraftModelReadsHiddenStatesOfAllTokens) {
  const PlanLimits limits{.max_sequences = 64, .max_step_tokens = 8192, .num_drafts = 3};
  const GpuWorkspace looked_up = workspace_of(limits);
  const GpuWorkspace drafted = workspace_of(limits, 1, "kimi-linear-48b", "kimi-linear-48b-eagle3-mla");
  EXPECT_EQ(drafted.temporaries - looked_up.temporaries, 8192 * 3 * 2304 * 2);
  EXPECT_GT(drafted.graphs, looked_up.graphs);
  EXPECT_LT(drafted.graphs, looked_up.graphs * 5 / 4);
}

// Three passes of 1,024 sequences have logits of 163,840 ids each, 2 GB in all, beside the step's. The layer's
// temporaries of 4,096 + 2 x 1,024 tokens, 420 KB each at most, come on top.
TEST(GpuWorkspace, PassesOfADraftHaveLogitsOfTheirOwn) {
  const PlanLimits limits{.max_sequences = 1024, .max_step_tokens = 4096, .num_drafts = 3};
  for (const int64_t ranks : {1, 4}) {
    const int64_t more = workspace_of(limits, ranks, "kimi-k2.5-30l", "kimi-k2.5-eagle3-mla").temporaries -
                         workspace_of(limits, ranks, "kimi-k2.5-30l").temporaries;
    EXPECT_GT(more, 3 * 1024 * 4 * 163'840LL / ranks);
    EXPECT_LT(more, 3 * 1024 * 4 * 163'840LL / ranks + (4096 + 2 * 1024) * 420'000LL);
  }
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

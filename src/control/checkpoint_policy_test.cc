#include "control/checkpoint_policy.h"

#include <gtest/gtest.h>

#include <vector>

namespace perigee {
namespace {

std::vector<int32_t> stops(const CheckpointPolicy& policy, int32_t num_tokens, int32_t junction = 0) {
  std::vector<int32_t> kept;
  for (int32_t at = policy.next_in_input(0, num_tokens, junction); at != CheckpointPolicy::kNone;
       at = policy.next_in_input(at, num_tokens, junction))
    kept.push_back(at);
  return kept;
}

using Positions = std::vector<int32_t>;

TEST(CheckpointPolicy, EndOfPromptLeavesATokenToCompute) {
  const CheckpointPolicy policy{.granularity_tokens = 64};
  EXPECT_EQ(stops(policy, 1), Positions{});
  EXPECT_EQ(stops(policy, 64), Positions{});
  EXPECT_EQ(stops(policy, 65), Positions{64});
  EXPECT_EQ(stops(policy, 128), Positions{64});
  EXPECT_EQ(stops(policy, 1000), Positions{960});
}

TEST(CheckpointPolicy, IntervalsCountFromZeroAndIncludeTheLastToken) {
  const CheckpointPolicy policy{.granularity_tokens = 64, .interval_tokens = 128};
  EXPECT_EQ(stops(policy, 300), (Positions{128, 256}));
  EXPECT_EQ(stops(policy, 384), (Positions{128, 256, 320, 384}));
  EXPECT_EQ(stops(policy, 256), (Positions{128, 192, 256}));
}

TEST(CheckpointPolicy, JunctionsFarBehindTheHit) {
  const CheckpointPolicy policy{.granularity_tokens = 64, .rolling_tokens = 256};
  EXPECT_EQ(policy.junction(0, 640), 640);
  EXPECT_EQ(policy.junction(384, 640), 0) << "as far as a next turn falls short anyway";
  EXPECT_EQ(policy.junction(320, 640), 640);
  EXPECT_EQ(policy.junction(640, 640), 0);
  EXPECT_EQ(stops(policy, 1000, 640), (Positions{640, 960}));
  EXPECT_EQ(stops(policy, 1000, 960), Positions{960});
}

TEST(CheckpointPolicy, CoarserHitsKeepCoarserPositions) {
  const CheckpointPolicy policy{.granularity_tokens = 1024};
  EXPECT_EQ(stops(policy, 1024), Positions{});
  EXPECT_EQ(stops(policy, 3000), Positions{2048});
}

TEST(CheckpointPolicy, OutputsKeepIntervalsAndOneTurn) {
  using Keep = CheckpointPolicy::Keep;
  const CheckpointPolicy policy{.granularity_tokens = 64, .interval_tokens = 512, .rolling_tokens = 128};
  EXPECT_EQ(policy.in_decode(512), Keep::kLong);
  EXPECT_EQ(policy.in_decode(128), Keep::kRolling);
  EXPECT_EQ(policy.in_decode(64), Keep::kNo);
  EXPECT_EQ(policy.in_decode(127), Keep::kNo);
  const CheckpointPolicy none{.granularity_tokens = 64};
  EXPECT_EQ(none.in_decode(512), Keep::kNo);
}

}  // namespace
}  // namespace perigee

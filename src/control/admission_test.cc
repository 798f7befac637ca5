// Room at several dcp indices: blocks fit wherever a page is, a state only where every index has its pages.
#include "control/admission.h"

#include <gtest/gtest.h>

#include <numeric>

#include "control/scheduler_testing.h"

namespace perigee {
namespace {

constexpr int32_t kTokens = 4 * kBlockTokens + 1;

SchedulerConfig config_of(int32_t num_pages, int32_t state_pages) {
  SchedulerConfig config = small_config();
  config.dcp_size = 2;
  config.num_pages = num_pages;
  config.state_pages = state_pages;
  return config;
}

class AdmissionTest : public testing::Test {
 protected:
  struct World {
    explicit World(const SchedulerConfig& config)
        : rules(config), cache(rules.config), states(rules, cache), admission(rules, cache, states) {
      auto prompt = std::make_shared<std::vector<int32_t>>(kTokens);
      std::iota(prompt->begin(), prompt->end(), 0);
      sequence.request.sequence = SequenceId(1);
      sequence.request.prompt = sequence.input = prompt;
      sequence.request.sampling = std::make_shared<SamplingParams>();
      sequence.max_outputs = 1;
    }
    // Pages that others hold, all at one index.
    void hold(int32_t dcp_index, int count) {
      CountAtIndex num_blocks = {1000, 1000};
      num_blocks[static_cast<size_t>(dcp_index)] = 0;
      for (int i = 0; i < count; ++i) held.push_back(cache.pools().allocate_block(num_blocks));
      CHECK(held.back().placement().dcp_index == dcp_index);
    }
    bool has_room(bool alone = false) { return admission.find_room(sequence, {}, alone, false).has_value(); }

    SchedulerRules rules;
    PrefixCache cache;
    StateBook states;
    Admission admission;
    Sequence sequence;  // of 5 blocks
    std::vector<PageHandle> held;
  };
};

TEST_F(AdmissionTest, BlocksFitWhereverPagesAre) {
  World world(config_of(8, 0));
  world.hold(0, 8);
  EXPECT_TRUE(world.has_room());
  world.hold(1, 3);
  EXPECT_TRUE(world.has_room()) << "5 pages at index 1";
  world.hold(1, 1);
  EXPECT_FALSE(world.has_room());
  world.held.erase(world.held.begin());
  EXPECT_TRUE(world.has_room()) << "4 pages at index 1, one at index 0";
}

TEST_F(AdmissionTest, AStateNeedsPagesAtEveryIndex) {
  World world(config_of(16, 3));
  world.hold(0, 13);
  EXPECT_TRUE(world.has_room()) << "3 pages at index 0, 16 at index 1";
  world.hold(0, 1);
  EXPECT_FALSE(world.has_room()) << "18 pages, 11 of them wanted, but 2 at index 0";
  world.held.clear();
  world.hold(1, 14);
  EXPECT_FALSE(world.has_room());
}

TEST_F(AdmissionTest, WhatAStateLeavesIsRoomForBlocks) {
  World world(config_of(16, 3));
  world.hold(0, 13);
  world.hold(1, 8);
  EXPECT_TRUE(world.has_room()) << "3 + 8 pages: 6 of the state, 5 of blocks";
  world.hold(1, 1);
  EXPECT_FALSE(world.has_room());
}

// Blocks of a hit stay where they are: there may be no page left beside them for a state. Nothing else runs, so none
// will come free, and the prompt is computed anew.
TEST_F(AdmissionTest, AHitThatFillsAnIndexIsNoHitWhenAlone) {
  for (const int32_t num_pages : {5, 6}) {
    World world(config_of(num_pages, 1));
    world.hold(0, 4);
    Running& run = world.sequence.state.emplace<Running>();
    run.chain = world.cache.index().root("");
    for (PageHandle& page : world.held) run.add_block(std::move(page));
    world.held.clear();
    world.cache.publish_blocks(world.sequence, kTokens);
    world.cache.checkpoints().attach(run.chain.page,
                                     world.cache.pools().allocate_everywhere(PageOwner::kCheckpoint, 1));
    world.sequence.state = Waiting();
    ASSERT_EQ(world.cache.pools().num_cached(), 6);
    const auto hit = world.admission.find_room(world.sequence, {}, true, false);
    ASSERT_TRUE(hit);
    EXPECT_EQ(hit->num_matched, 4);
    EXPECT_EQ(hit->num_blocks, num_pages == 5 ? 0 : 4);
    EXPECT_EQ(world.has_room(), num_pages == 6) << "while others run their pages are waited for";
  }
}

}  // namespace
}  // namespace perigee

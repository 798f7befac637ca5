// Blocks and states at several dcp indices, as plans name them.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "control/place.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

SchedulerConfig config_of(int32_t dcp_size, int32_t state_pages = 0) {
  SchedulerConfig config = small_config();
  config.dcp_size = dcp_size;
  config.num_pages = 16;
  config.state_pages = state_pages;
  return config;
}

// Of the blocks that a plan appends, or of those of one slot.
std::vector<Placement> places_of(const StepPlan& plan, SlotId slot = {}) {
  std::vector<Placement> places;
  for (const BlockAppend& append : plan.appends)
    if (!slot.valid() || append.slot == slot) places.push_back(append.place);
  return places;
}

std::vector<int32_t> indices_of(const std::vector<Placement>& places) {
  std::vector<int32_t> indices;
  for (const Placement& place : places) indices.push_back(place.dcp_index);
  return indices;
}

using Indices = std::vector<int32_t>;

TEST(SchedulerDcp, BlocksAreDealtInTurn) {
  SchedulerHarness h(config_of(4));
  h.submit(6 * kBlockTokens, 200);
  const StepPlan prompt = h.plan();
  EXPECT_EQ(indices_of(places_of(prompt)), (Indices{0, 1, 2, 3, 0, 1}));
  h.apply(prompt);
  Indices more;
  while (!h.scheduler.idle()) {
    const StepPlan plan = h.plan();
    for (const int32_t index : indices_of(places_of(plan))) more.push_back(index);
    h.apply(plan);
  }
  EXPECT_EQ(more, (Indices{2, 3, 0, 1})) << "blocks of outputs go on where those of the prompt ended";
}

TEST(SchedulerDcp, PagesAreCountedAtTheirOwnIndex) {
  SchedulerHarness h(config_of(4));
  h.submit(6 * kBlockTokens, 2);
  h.submit(6 * kBlockTokens, 2);
  const StepPlan plan = h.plan();
  std::set<Placement> places;
  for (const Placement& place : places_of(plan)) {
    EXPECT_TRUE(place.page.valid() && place.page.value < 16) << place.page;
    EXPECT_TRUE(places.insert(place).second) << "page " << place.page << " at " << place.dcp_index << " twice";
  }
  const SchedulerGauges gauges = h.scheduler.gauges();
  EXPECT_EQ(gauges.total_pages, 64);
  EXPECT_EQ(gauges.used_pages, static_cast<int32_t>(places.size()));
  EXPECT_EQ(gauges.free_pages + gauges.used_pages, 64);
  EXPECT_EQ(gauges.latent_pages, gauges.used_pages);
}

TEST(SchedulerDcp, AHitKeepsItsOwners) {
  SchedulerHarness h(config_of(4));
  const std::vector<int32_t> prompt = tokens_from(0, 5 * kBlockTokens);
  h.submit({.prompt = prompt, .sampling = {.max_tokens = 1}});
  const StepPlan first = h.plan();
  h.apply(first);
  // One that takes pages in between, so that other indices are the emptiest.
  h.submit(3 * kBlockTokens, 500);
  h.step();
  std::vector<int32_t> longer = prompt;
  longer.resize(8 * kBlockTokens, 77);
  h.submit({.prompt = longer, .sampling = {.max_tokens = 1}});
  const StepPlan second = h.plan();
  ASSERT_EQ(second.starts.size(), 1u);
  EXPECT_EQ(second.starts[0].num_cached_tokens, 5 * kBlockTokens) << "hits are multiples of 64 at any dcp size";
  const std::vector<Placement> places = places_of(second, second.starts[0].slot), cached = places_of(first);
  ASSERT_EQ(places.size(), 8u);
  EXPECT_TRUE(std::equal(cached.begin(), cached.end(), places.begin()));
  CountAtIndex count = {};
  for (const Placement& place : places) ++count[static_cast<size_t>(place.dcp_index)];
  EXPECT_EQ(count, (CountAtIndex{2, 2, 2, 2})) << "its own blocks go where the hit has fewest";
}

TEST(SchedulerDcp, StatesAndCheckpointsHavePagesAtEveryIndex) {
  SchedulerHarness h(config_of(2, 2));
  const std::vector<int32_t> prompt = tokens_from(0, 3 * kBlockTokens);
  h.submit({.prompt = prompt, .sampling = {.max_tokens = 1}});
  const StepPlan first = h.plan();
  const Indices everywhere = {0, 0, 1, 1};
  EXPECT_EQ(indices_of(first.starts[0].state_pages), everywhere);
  ASSERT_EQ(first.checkpoints.size(), 1u);
  EXPECT_EQ(indices_of(first.checkpoints[0].pages), everywhere);
  EXPECT_EQ(h.scheduler.gauges().state_pages, 4);
  h.apply(first);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 4);
  h.submit({.prompt = prompt, .sampling = {.max_tokens = 1}});
  const StepPlan second = h.plan();
  EXPECT_EQ(second.starts[0].checkpoint, first.checkpoints[0].pages) << "page by page from the same index";
  EXPECT_EQ(indices_of(second.starts[0].state_pages), everywhere);
  h.apply(second);
  h.run_to_end();
  h.scheduler.drop_prefix_cache();
  EXPECT_EQ(h.scheduler.gauges().free_pages, 32);
}

TEST(SchedulerDcp, WhatFitsIsWhatAllIndicesHold) {
  SchedulerConfig config = config_of(4, 3);
  config.max_model_len = 1 << 20;
  const Scheduler scheduler(config);
  const int64_t most = 4 * (16 - 3) * kBlockTokens;
  EXPECT_TRUE(scheduler.fits(most - 9, 10));
  EXPECT_FALSE(scheduler.fits(most - 9, 11));
}

// Nobody gives way while any index has a page.
TEST(SchedulerDcp, PreemptsOnlyWhenEveryIndexIsFull) {
  SchedulerConfig config = config_of(2);
  config.num_pages = 3;
  config.admission_reserve = nullptr;
  config.prefix_caching = false;
  SchedulerHarness h(config);
  h.submit(2 * kBlockTokens - 1, 200);
  h.submit(2 * kBlockTokens - 1, 200);
  h.step();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 4);
  h.steps(2);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 6);
  EXPECT_EQ(h.scheduler.gauges().preemptions, 0);
  h.steps(kBlockTokens);
  EXPECT_EQ(h.scheduler.gauges().preemptions, 1);
  h.run_to_end();
}

// --- Deterministic: block b lies at index b modulo the dcp size, and nowhere else ---

SchedulerConfig deterministic(int32_t dcp_size, int32_t num_pages) {
  SchedulerConfig config = config_of(dcp_size);
  config.num_pages = num_pages;
  config.deterministic = true;
  return config;
}

TEST(SchedulerDcp, DeterministicBlocksLieWhereTheirNumberSays) {
  SchedulerHarness h(deterministic(4, 16));
  const std::vector<int32_t> prompt = tokens_from(0, 3 * kBlockTokens + 9);
  h.submit(2 * kBlockTokens, 200);
  h.submit({.prompt = prompt, .sampling = {.max_tokens = 200}});
  h.step();
  h.submit({.prompt = prompt, .sampling = {.max_tokens = 200}});  // a hit of three blocks
  h.submit(5 * kBlockTokens, 3);
  int num_appends = 0;
  while (!h.scheduler.idle()) {
    const StepPlan plan = h.plan();
    for (const BlockAppend& append : plan.appends) {
      EXPECT_EQ(append.place.dcp_index, append.block_index % 4) << "block " << append.block_index;
      ++num_appends;
    }
    h.apply(plan);
  }
  EXPECT_EQ(num_appends, 4 + 3 + 7 + 6) << "without the 2 and 4 of the first step";
}

TEST(SchedulerDcp, DeterministicAdmissionNeedsRoomAtItsOwnIndex) {
  SchedulerHarness h(deterministic(2, 4));
  for (int i = 0; i < 5; ++i) h.submit(10, 2);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts.size(), 4u) << "index 0 is full, index 1 is empty";
  h.apply(plan);
  h.run_to_end();
}

TEST(SchedulerDcp, DeterministicReservesLieAtEveryIndex) {
  SchedulerHarness h(deterministic(2, 4));
  h.submit(10, 200);
  for (int i = 0; i < 3; ++i) h.submit(10, 2);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts.size(), 3u) << "a page at index 0 is kept for the first one";
  h.apply(plan);
  h.run_to_end();
}

// Four sequences share their first block, and the first of them has three blocks, which fills index 1. A fifth one, the
// bystander, has its only block at index 0. Two steps later, the first sequence needs a page at index 1.
struct CrowdAtIndexOne {
  CrowdAtIndexOne() : h(config()) {
    first = h.submit({.prompt = prompt_of(0, 190), .sampling = {.max_tokens = 60}});
    h.step();
    for (int i = 1; i < 4; ++i) last = h.submit({.prompt = prompt_of(1000 * i, 70), .sampling = {.max_tokens = 40}});
    bystander = h.submit({.prompt = tokens_from(9000, 10), .sampling = {.max_tokens = 40}});
    h.step();
    CHECK(h.scheduler.gauges().running == 5 && h.scheduler.gauges().used_pages == 7);
  }
  static SchedulerConfig config() {
    SchedulerConfig config = deterministic(2, 4);
    config.admission_reserve = nullptr;
    return config;
  }
  static std::vector<int32_t> prompt_of(int32_t after, int32_t count) {
    std::vector<int32_t> prompt = tokens_from(0, kBlockTokens);
    for (int32_t i = kBlockTokens; i < count; ++i) prompt.push_back(after + i);
    return prompt;
  }
  bool has_row(const StepPlan& plan, SequenceId sequence) const {
    const auto is_own = [&](const PlanRow& row) { return row.sequence == sequence; };
    return std::any_of(plan.rows.begin(), plan.rows.end(), is_own);
  }

  SchedulerHarness h;
  SequenceId first, last, bystander;
};

TEST(SchedulerDcp, WhoGivesWayHasAPageThatHelps) {
  CrowdAtIndexOne crowd;
  crowd.h.step();
  EXPECT_EQ(crowd.h.scheduler.gauges().preemptions, 0);
  const StepPlan plan = crowd.h.plan();
  EXPECT_TRUE(crowd.has_row(plan, crowd.first));
  EXPECT_FALSE(crowd.has_row(plan, crowd.last));
  EXPECT_TRUE(crowd.has_row(plan, crowd.bystander)) << "its page is at index 0";
  EXPECT_EQ(crowd.h.scheduler.gauges().preemptions, 1);
  crowd.h.apply(plan);
  crowd.h.run_to_end();
  for (const auto& [sequence, outcome] : crowd.h.outcomes)
    EXPECT_EQ(outcome.ids.size(), sequence == crowd.first ? 60u : 40u) << "sequence " << sequence;
}

// A page that comes back at another index is nothing to wait for: where many short sequences end, one always does.
TEST(SchedulerDcp, OnlyPagesThatHelpAreWaitedFor) {
  CrowdAtIndexOne crowd;
  SchedulerHarness& h = crowd.h;
  const StepPlan in_flight = h.plan();
  h.scheduler.cancel({crowd.bystander});
  const StepPlan next = h.plan();
  EXPECT_EQ(h.scheduler.gauges().preemptions, 1) << "it waits for the page of the one that was cancelled";
  EXPECT_FALSE(crowd.has_row(next, crowd.first)) << "the page that helps is under flight";
  h.apply(in_flight);
  h.apply(next);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[crowd.first].ids.size(), 60u);
}

TEST(SchedulerDcp, TheSizeIsValidated) {
  for (const int32_t dcp_size : {0, kMaxDcpSize + 1}) {
    const Status status = validate(config_of(dcp_size));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().field, "dcp_size");
  }
  EXPECT_TRUE(validate(config_of(kMaxDcpSize)).ok());
  SchedulerConfig config = config_of(16);
  config.num_pages = 1 << 28;
  EXPECT_EQ(validate(config).error().field, "num_pages");
}

}  // namespace
}  // namespace perigee

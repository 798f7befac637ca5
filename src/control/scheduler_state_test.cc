// Recurrent models: state pages, checkpoints at their positions, hits only there.
#include <gtest/gtest.h>

#include <deque>

#include "control/scheduler.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

using Rows = std::vector<std::pair<int64_t, int32_t>>;
using Request = SchedulerHarness::Request;

SchedulerConfig hybrid_config() {
  SchedulerConfig config = small_config();
  config.num_pages = 64;
  config.state_pages = 3;
  config.checkpoint_interval_blocks = 0;
  config.checkpoint_rolling_blocks = 0;
  config.attention_alignment = 64;
  return config;
}

Request with_max_tokens(Request request, int32_t max_tokens) {
  request.sampling.max_tokens = max_tokens;
  return request;
}

std::vector<int32_t> positions_of(const StepPlan& plan) {
  std::vector<int32_t> positions;
  for (const CheckpointWrite& write : plan.checkpoints) positions.push_back(write.boundary());
  return positions;
}

// The hit of a request with this prompt, which is then cancelled.
int32_t hit_of(SchedulerHarness& h, std::vector<int32_t> prompt) {
  const SequenceId sequence = h.submit(with_max_tokens({.prompt = std::move(prompt)}, 1));
  const StepPlan plan = h.plan();
  CHECK(plan.starts.size() == 1, "one start was expected");
  h.scheduler.cancel({sequence, FinishReason::kCancelled});
  h.collect();
  h.apply(plan);
  return plan.starts[0].num_cached_tokens;
}

std::vector<int32_t> plus(std::vector<int32_t> tokens, const std::vector<int32_t>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

TEST(SchedulerState, PagesFromAdmissionToTheEnd) {
  SchedulerHarness h(hybrid_config());
  const SequenceId a = h.submit(70, 3);
  const StepPlan first = h.plan();
  ASSERT_EQ(first.starts.size(), 1u);
  EXPECT_EQ(first.starts[0].state_pages.size(), 3u);
  EXPECT_TRUE(first.starts[0].checkpoint.empty());
  EXPECT_EQ(h.scheduler.gauges().state_pages, 3);
  EXPECT_EQ(h.scheduler.gauges().latent_pages, 2);
  h.apply(first);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 3u);
  const SchedulerGauges gauges = h.scheduler.gauges();
  EXPECT_EQ(gauges.state_pages, 0);
  EXPECT_EQ(gauges.used_pages, 0);
  EXPECT_EQ(gauges.latent_pages, 1) << "the prompt's full block";
  EXPECT_EQ(gauges.checkpoint_pages, 3) << "and the state after it";
  EXPECT_EQ(gauges.free_pages + gauges.latent_pages + gauges.state_pages + gauges.checkpoint_pages, gauges.total_pages);
}

TEST(SchedulerState, AChunkWritesEachCheckpointThatItPasses) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 2;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(330, 3);
  const StepPlan plan = h.plan();
  EXPECT_EQ(rows_of(plan), (Rows{{a.value, 330}}));
  ASSERT_EQ(positions_of(plan), (std::vector<int32_t>{128, 256, 320}));
  for (const CheckpointWrite& write : plan.checkpoints) {
    EXPECT_EQ(write.slot, plan.rows[0].slot);
    EXPECT_EQ(write.pages.size(), 3u);
  }
  EXPECT_TRUE(plan.rows[0].samples());
  h.apply(plan);
  EXPECT_TRUE(h.plan().checkpoints.empty());
  EXPECT_EQ(h.scheduler.gauges().checkpoint_writes, 3);
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 3);
}

// What the budget cuts off writes its own.
TEST(SchedulerState, ChunksOfAPromptShareItsCheckpoints) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 2;
  config.max_step_tokens = 270;
  SchedulerHarness h(config);
  h.submit(600, 3);
  h.submit(130, 3);
  std::vector<std::vector<int32_t>> written;
  for (int step = 0; step < 3; ++step) {
    const StepPlan plan = h.plan();
    written.push_back(positions_of(plan));
    h.apply(plan);
  }
  EXPECT_EQ(written, (std::vector<std::vector<int32_t>>{{128, 256}, {384, 512}, {576, 128}}));
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 6);
}

TEST(SchedulerState, WherePagesAreShortTheLastCheckpointsAreWritten) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 1;
  config.num_pages = 6 + 3 + 1 + 7;  // blocks, the state, a page for who runs, and two checkpoints
  config.max_model_len = 380;
  SchedulerHarness h(config);
  h.submit(330, 3);
  const StepPlan plan = h.plan();
  EXPECT_EQ(positions_of(plan), (std::vector<int32_t>{256, 320}));
  EXPECT_EQ(h.scheduler.gauges().checkpoint_skips, 3);
  h.apply(plan);
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 2);
}

TEST(SchedulerState, CheckpointsLeaveAPageForWhoRuns) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 1;
  config.num_pages = 6 + 3 + 6;  // blocks, the state, and two checkpoints if they took the last page
  config.max_model_len = 380;
  SchedulerHarness h(config);
  h.submit(330, 3);
  EXPECT_EQ(positions_of(h.plan()), std::vector<int32_t>{320});
}

// The device alone knows whether a row reached the boundary.
TEST(SchedulerState, OnlyCheckpointsThatWereWrittenAreKept) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 2;
  SchedulerHarness h(config);
  h.submit({.prompt = tokens_from(0, 330)});
  const StepPlan plan = h.plan();
  ASSERT_EQ(positions_of(plan), (std::vector<int32_t>{128, 256, 320}));
  for (const CheckpointWrite& write : plan.checkpoints) EXPECT_TRUE(write.is_valid());
  StepResult result = h.answer(plan);
  result.rows[0].checkpoints = {128, 320};
  h.apply(result);
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 2);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 6) << "the third one's pages are free";
  EXPECT_EQ(hit_of(h, tokens_from(0, 300)), 128);
}

TEST(SchedulerStateDeathTest, ACheckpointThatNobodyAskedForIsABug) {
  SchedulerHarness h(hybrid_config());
  h.submit(330, 3);
  StepResult result = h.answer(h.plan());
  result.rows[0].checkpoints = {256, 320};
  EXPECT_DEATH(h.scheduler.apply(result), "a checkpoint at 256 that no plan has");
}

TEST(SchedulerState, CheckpointsOfASequenceThatStopsAreFree) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(330, 3);
  const StepPlan plan = h.plan();
  ASSERT_EQ(plan.checkpoints.size(), 5u);
  h.scheduler.cancel({a, FinishReason::kCancelled});
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 15) << "still being written";
  h.apply(plan);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 0);
  EXPECT_EQ(h.scheduler.gauges().free_pages, h.scheduler.gauges().total_pages);
}

TEST(SchedulerState, ASmallBudgetStillMeetsTheBoundary) {
  SchedulerConfig config = hybrid_config();
  config.max_step_tokens = 100;
  SchedulerHarness h(config);
  h.submit(200, 3);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 64);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 64);
}

// With a checkpoint at every block, the hit is as long as that of an attention model; then at every second one.
TEST(SchedulerState, HitsAtEachCheckpointAndNowhereElse) {
  for (const int32_t interval : {1, 2, 3}) {
    SchedulerConfig config = hybrid_config();
    config.checkpoint_interval_blocks = interval;
    SchedulerHarness h(config);
    h.submit(with_max_tokens({.prompt = tokens_from(0, 400)}, 1));  // the last one at 384
    h.run_to_end();
    // Own tokens from there on, so that a try leaves no checkpoint that the next one finds.
    for (const int32_t length : {65, 128, 129, 193, 256, 257, 321, 385, 400}) {
      const int32_t own = interval * 64;
      const int32_t expected = length == 400 ? 384 : (length - 1) / own * own;
      SchedulerHarness fresh(config);
      fresh.submit(with_max_tokens({.prompt = tokens_from(0, 400)}, 1));
      fresh.run_to_end();
      EXPECT_EQ(hit_of(fresh, tokens_from(0, length)), expected) << "interval " << interval << ", length " << length;
    }
  }
}

TEST(SchedulerState, AHitBringsTheCheckpointsPages) {
  SchedulerHarness h(hybrid_config());
  h.submit(with_max_tokens({.prompt = tokens_from(0, 200)}, 1));
  const StepPlan writing = h.plan();
  ASSERT_EQ(positions_of(writing), std::vector<int32_t>{192});
  h.apply(writing);
  h.run_to_end();
  h.submit(with_max_tokens({.prompt = tokens_from(0, 200)}, 5));
  h.submit(with_max_tokens({.prompt = plus(tokens_from(0, 192), {5, 6, 7})}, 5));
  const StepPlan plan = h.plan();
  ASSERT_EQ(plan.starts.size(), 2u) << "two copy the same checkpoint at once";
  for (const SequenceStart& start : plan.starts) {
    EXPECT_EQ(start.num_cached_tokens, 192);
    EXPECT_EQ(start.checkpoint, writing.checkpoints[0].pages);
    EXPECT_EQ(start.state_pages.size(), 3u);
  }
  EXPECT_EQ(h.scheduler.gauges().checkpoint_hits, 2);
  EXPECT_TRUE(plan.checkpoints.empty()) << "the end of the prompt is where the hit ends";
  h.apply(plan);
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 1);
}

TEST(SchedulerState, UnconfirmedCheckpointsAreNoHits) {
  SchedulerHarness h(hybrid_config());
  h.submit({.prompt = tokens_from(0, 200)});
  const StepPlan writing = h.plan();
  h.submit({.prompt = tokens_from(0, 200)});
  const StepPlan second = h.plan();
  ASSERT_EQ(second.starts.size(), 1u);
  EXPECT_EQ(second.starts[0].num_cached_tokens, 0);
  h.apply(writing);
  h.submit({.prompt = tokens_from(0, 200)});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 192);
}

// Many requests with one system prompt: the second one saves the state where they part, the third one uses it.
TEST(SchedulerState, AJunctionIsSavedByTheSecondThatMeetsIt) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_rolling_blocks = 2;
  SchedulerHarness h(config);
  const std::vector<int32_t> system = tokens_from(0, 200);
  h.submit(with_max_tokens({.prompt = plus(system, tokens_from(5000, 80))}, 1));
  h.run_to_end();
  h.submit(with_max_tokens({.prompt = plus(system, tokens_from(6000, 80))}, 1));
  const StepPlan second = h.plan();
  EXPECT_EQ(second.starts[0].num_cached_tokens, 0);
  EXPECT_EQ(positions_of(second), (std::vector<int32_t>{192, 256})) << "and its own end";
  h.apply(second);
  h.run_to_end();
  EXPECT_EQ(hit_of(h, plus(system, tokens_from(7000, 80))), 192);
}

TEST(SchedulerState, OutputsKeepTheirNewestTurnAndIntervals) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_interval_blocks = 4;
  config.checkpoint_rolling_blocks = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 60)}, 400));
  std::vector<int32_t> written;
  while (!h.scheduler.idle()) {
    const StepPlan plan = h.plan();
    for (const CheckpointWrite& write : plan.checkpoints) {
      EXPECT_EQ(plan.rows[0].position.least, write.boundary()) << "the row that begins there commits it";
      written.push_back(write.boundary());
    }
    h.apply(plan);
    EXPECT_LE(h.scheduler.gauges().checkpoints, 2);
  }
  EXPECT_EQ(written, (std::vector<int32_t>{64, 128, 192, 256, 320, 384, 448}));
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 2) << "256 stays, 448 is the newest";
  const std::vector<int32_t> turn = plus(plus(tokens_from(0, 60), h.outcomes[a].ids), tokens_from(9000, 20));
  EXPECT_EQ(hit_of(h, std::vector<int32_t>(turn.begin(), turn.begin() + 300)), 256);
  EXPECT_EQ(hit_of(h, turn), 448);
}

// Verify rows that keep all their tokens pass boundaries between two rows. However late results come, some row has each
// boundary in the range that it commits.
TEST(SchedulerState, NoBoundaryLiesBetweenTwoRowsThatVerifyDrafts) {
  for (const size_t num_in_flight : {1u, 2u}) {
    for (int32_t prompt = 60; prompt < 64; ++prompt) {
      SchedulerConfig config = hybrid_config();
      config.checkpoint_rolling_blocks = 1;
      config.num_drafts = 3;
      SchedulerHarness h(config);
      h.submit(with_max_tokens({.prompt = tokens_from(0, prompt)}, 150));
      std::deque<StepPlan> plans;
      std::vector<int32_t> written;
      int32_t position = 0, committed = 0;
      while (!h.scheduler.idle()) {
        while (plans.size() < num_in_flight)
          if (std::optional<StepPlan> plan = h.scheduler.next_plan(1))
            plans.push_back(*std::move(plan));
          else
            break;
        ASSERT_FALSE(plans.empty());
        const StepPlan& plan = plans.front();
        StepResult result = h.answer(plan);
        RowResult& row = result.rows[0];
        row.checkpoints.clear();
        const bool is_chunk = plan.rows[0].prefill() != nullptr;
        const int32_t commits = position + (is_chunk ? plan.rows[0].num_tokens() : 0);
        for (const CheckpointWrite& write : plan.checkpoints)
          if (write.boundary() > committed && write.boundary() <= commits) row.checkpoints.push_back(write.boundary());
        written.insert(written.end(), row.checkpoints.begin(), row.checkpoints.end());
        row.num_drafts = plan.rows[0].num_drafts();
        row.ids = {};
        for (int32_t i = 0; i < plan.rows[0].max_ids(); ++i) row.ids.push_back(7);
        committed = commits;
        position += plan.rows[0].num_tokens();
        h.apply(result);
        plans.pop_front();
      }
      EXPECT_EQ(written, (std::vector<int32_t>{64, 128, 192})) << prompt << ", in flight " << num_in_flight;
    }
  }
}

TEST(SchedulerState, NoCheckpointWhenTheSequenceEndsBeforeItsRow) {
  SchedulerConfig config = hybrid_config();
  config.checkpoint_rolling_blocks = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 63)}, 100));
  h.step();
  const StepPlan before = h.plan();  // at 63
  const StepPlan writing = h.plan();
  ASSERT_EQ(positions_of(writing), std::vector<int32_t>{64});
  h.apply(before);
  h.scheduler.cancel({a, FinishReason::kStop});
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 3) << "still being written";
  h.apply(writing);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 0);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_writes, 0);
}

TEST(SchedulerState, ACheckpointIsEvictedAloneAndItsBlocksGoFirst) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 16;
  config.max_model_len = 800;
  SchedulerHarness h(config);
  h.submit(with_max_tokens({.prompt = tokens_from(0, 200)}, 1));  // 3 blocks, a checkpoint at 192
  h.run_to_end();
  ASSERT_EQ(h.scheduler.gauges().free_pages, 10);
  h.submit(with_max_tokens({.prompt = tokens_from(5000, 63)}, 1));  // cold, a page and a state
  h.run_to_end();
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 1);
  h.submit(with_max_tokens({.prompt = tokens_from(6000, 500)}, 1));  // 8 pages and a state: one page is missing
  h.run_to_end();
  EXPECT_EQ(hit_of(h, tokens_from(0, 200)), 0);
  EXPECT_GE(h.scheduler.gauges().checkpoint_evictions, 1);
}

TEST(SchedulerState, WithoutPagesThereIsNoCheckpointAndNobodySuffers) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 8;  // 4 blocks and the state: one page is left
  config.max_model_len = 250;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(200, 40);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 40u);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_skips, 1);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_writes, 0);
  EXPECT_EQ(h.scheduler.gauges().preemptions, 0);
}

// The pool holds the sequence and a checkpoint, but not the sequence, its hit and the checkpoint that it copies.
TEST(SchedulerState, AHitThatWouldNotFitIsComputedInstead) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 9;
  config.max_model_len = 300;
  SchedulerHarness h(config);
  h.submit(with_max_tokens({.prompt = tokens_from(0, 100)}, 1));
  h.run_to_end();
  ASSERT_EQ(h.scheduler.gauges().checkpoints, 1);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 250)}, 20));  // 5 pages and a state
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts[0].num_cached_tokens, 0);
  h.apply(plan);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 20u);
  EXPECT_EQ(hit_of(h, tokens_from(64, 129)), 0) << "its second block is not found at the start of a prompt";
}

TEST(SchedulerState, ACheckpointLeavesAPageForEachRunningSequence) {
  for (const int32_t num_pages : {8, 9}) {  // 2 blocks, the state, a checkpoint; and one page more
    SchedulerConfig config = hybrid_config();
    config.num_pages = num_pages;
    config.max_model_len = 100;
    SchedulerHarness h(config);
    h.submit(70, 2);
    h.step();
    EXPECT_EQ(h.scheduler.gauges().checkpoint_writes, num_pages - 8);
    EXPECT_EQ(h.scheduler.gauges().checkpoint_skips, 9 - num_pages);
  }
}

TEST(SchedulerState, FollowersStartFromTheLeadersEndOfPrompt) {
  SchedulerHarness h(hybrid_config());
  const SequenceId leader = h.submit({.prompt = tokens_from(0, 150)});
  h.submit({.prompt = tokens_from(0, 150), .leader = leader});
  h.submit({.prompt = tokens_from(0, 150), .leader = leader});
  const StepPlan first = h.plan();
  EXPECT_EQ(rows_of(first), (Rows{{leader.value, 150}}));
  EXPECT_EQ(positions_of(first), std::vector<int32_t>{128});
  h.apply(first);
  const StepPlan plan = h.plan();
  ASSERT_EQ(plan.starts.size(), 2u);
  for (const SequenceStart& start : plan.starts) EXPECT_EQ(start.num_cached_tokens, 128);
  EXPECT_EQ(plan.num_tokens(), 1 + 22 + 22);
}

TEST(SchedulerState, APreemptedSequenceResumesFromItsBestCheckpoint) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 14;
  config.checkpoint_rolling_blocks = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(100, 250);
  const SequenceId b = h.submit(100, 250);
  StepPlan plan;
  while (h.scheduler.gauges().preemptions == 0) {
    plan = h.plan();
    h.apply(plan);
  }
  EXPECT_EQ(h.scheduler.gauges().state_pages, 3);
  const size_t before = h.outcomes[b].ids.size();
  EXPECT_GT(before, 64u);
  for (plan = {}; plan.starts.empty(); h.apply(plan)) plan = h.plan();
  EXPECT_EQ(plan.starts[0].sequence, b);
  EXPECT_EQ(plan.starts[0].tokens->size(), 100 + before);
  EXPECT_EQ(plan.starts[0].checkpoint.empty(), plan.starts[0].num_cached_tokens == 0);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 250u);
  EXPECT_EQ(h.outcomes[b].ids.size(), 250u);
}

// What a sequence started from, or wrote last, is as recent as its blocks when it ends, however long ago it was
// written.
TEST(SchedulerState, TheEndOfASequenceRefreshesItsCheckpoint) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 21;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 70)}, 50));  // a block and a checkpoint
  h.steps(10);
  h.submit(with_max_tokens({.prompt = tokens_from(5000, 70)}, 1));  // another pair, later
  while (!h.outcomes[a].finish) h.step();
  ASSERT_EQ(h.scheduler.gauges().checkpoints, 2);
  h.submit(with_max_tokens({.prompt = tokens_from(9000, 700)}, 1));  // 11 pages and a state: one page too many
  h.run_to_end();
  EXPECT_EQ(hit_of(h, tokens_from(0, 70)), 64);
}

// Under pressure a conversation keeps the checkpoint that its next turn needs, and a prefix that two sequences have
// started from keeps its own; what a later one superseded goes first, however young.
TEST(SchedulerState, SupersededCheckpointsGoFirst) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 28;
  SchedulerHarness h(config);
  const std::vector<int32_t> shared = tokens_from(0, 70), other = tokens_from(5000, 70);
  h.submit(with_max_tokens({.prompt = shared}, 1));  // a block and its checkpoint
  h.run_to_end();
  for (const int32_t own : {3000, 4000}) {  // two start from it: each adds a block and a checkpoint
    h.submit(with_max_tokens({.prompt = plus(tokens_from(0, 64), tokens_from(own, 70))}, 1));
    h.run_to_end();
  }
  h.submit(with_max_tokens({.prompt = other}, 1));
  h.run_to_end();
  h.submit(with_max_tokens({.prompt = plus(tokens_from(5000, 64), tokens_from(6000, 70))}, 1));  // its next turn
  h.run_to_end();
  ASSERT_EQ(h.scheduler.gauges().checkpoints, 5);
  ASSERT_EQ(h.scheduler.gauges().free_pages, 28 - 5 * 4);
  h.submit(with_max_tokens({.prompt = tokens_from(9000, 400)}, 1));  // 7 pages and a state
  h.run_to_end();
  EXPECT_EQ(hit_of(h, plus(tokens_from(5000, 64), {1, 2, 3})), 0) << "superseded by its next turn";
  EXPECT_EQ(hit_of(h, plus(plus(tokens_from(5000, 64), tokens_from(6000, 64)), {1})), 128);
  EXPECT_EQ(hit_of(h, shared), 64);
}

TEST(SchedulerState, DeterministicPositionsAreAligned) {
  SchedulerConfig config = hybrid_config();
  config.deterministic = true;
  config.attention_alignment = 128;
  config.checkpoint_interval_blocks = 1;
  config.checkpoint_rolling_blocks = 1;
  SchedulerHarness h(config);
  h.submit(with_max_tokens({.prompt = tokens_from(0, 300)}, 200));
  while (!h.scheduler.idle()) {
    const StepPlan plan = h.plan();
    for (const CheckpointWrite& write : plan.checkpoints) EXPECT_EQ(write.boundary() % 128, 0);
    h.apply(plan);
  }
  EXPECT_EQ(hit_of(h, tokens_from(0, 250)), 128);
}

// A chunk rounds the state otherwise than token by token. So outputs, which decode rows computed, stay out of the
// cache, and come back one by one after a preemption.
TEST(SchedulerState, DeterministicOutputsAreNotCachedAndRunAgainAsTheyRan) {
  SchedulerConfig config = hybrid_config();
  config.deterministic = true;
  config.num_pages = 13;
  config.checkpoint_interval_blocks = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 100)}, 200));
  const SequenceId b = h.submit(with_max_tokens({.prompt = tokens_from(500, 100)}, 200));
  while (h.scheduler.gauges().preemptions == 0) h.step();
  StepPlan plan;
  for (; plan.starts.empty(); h.apply(plan)) plan = h.plan();
  ASSERT_EQ(plan.starts[0].sequence, b);
  const int32_t num_input = static_cast<int32_t>(plan.starts[0].tokens->size());
  ASSERT_GT(num_input, 110);
  EXPECT_LE(plan.starts[0].num_cached_tokens, 64);
  EXPECT_EQ(plan.rows[0].position.least + plan.rows[0].num_tokens(), 100) << "the prompt as one chunk";
  for (int32_t position = 100; position < num_input; ++position) {
    plan = h.plan();
    EXPECT_EQ(plan.rows[0].position, PositionRange::at(position));
    EXPECT_EQ(plan.rows[0].num_tokens(), 1);
    EXPECT_NE(plan.rows[0].prefill(), nullptr);
    EXPECT_EQ(plan.rows[0].samples(), position + 1 == num_input);
    EXPECT_TRUE(plan.checkpoints.empty());
    h.apply(plan);
  }
  h.run_to_end();
  EXPECT_EQ(h.outcomes[b].ids.size(), 200u);
  EXPECT_EQ(hit_of(h, plus(tokens_from(500, 100), h.outcomes[b].ids)), 64);
  (void)a;
}

TEST(SchedulerState, WithoutPrefixCachingThereAreNoCheckpoints) {
  SchedulerConfig config = hybrid_config();
  config.prefix_caching = false;
  SchedulerHarness h(config);
  h.submit(200, 100);
  EXPECT_EQ(h.plan().rows[0].num_tokens(), 200);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 0);
}

TEST(SchedulerState, DroppingTheCacheFreesCheckpoints) {
  SchedulerHarness h(hybrid_config());
  h.submit({.prompt = tokens_from(0, 200)});
  h.run_to_end();
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 200)}, 100));
  const StepPlan copying = h.plan();
  ASSERT_EQ(copying.starts[0].num_cached_tokens, 192);
  h.scheduler.drop_prefix_cache();
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().checkpoints, 0);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 3) << "held by the plan that copies them";
  h.apply(copying);
  EXPECT_EQ(h.scheduler.gauges().checkpoint_pages, 0);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 100u);
}

TEST(SchedulerState, FitsCountsTheState) {
  SchedulerConfig config = hybrid_config();
  config.num_pages = 7;
  const Scheduler scheduler(config);
  EXPECT_TRUE(scheduler.fits(256, 1));
  EXPECT_FALSE(scheduler.fits(256, 2));
  config.state_pages = 7;
  EXPECT_EQ(validate(config).error().field, "state_pages");
  config.state_pages = -1;
  EXPECT_EQ(validate(config).error().field, "state_pages");
  config = hybrid_config();
  config.checkpoint_interval_blocks = -1;
  EXPECT_EQ(validate(config).error().field, "checkpoint_interval_blocks");
  config = hybrid_config();
  config.checkpoint_rolling_blocks = -1;
  EXPECT_EQ(validate(config).error().field, "checkpoint_rolling_blocks");
}

}  // namespace
}  // namespace perigee

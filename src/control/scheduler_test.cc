// Life of a sequence: submission, chunks, decode rows, ends.
#include "control/scheduler.h"

#include <gtest/gtest.h>

#include <tuple>

#include "control/scheduler_testing.h"

namespace perigee {
namespace {

using Rows = std::vector<std::pair<int64_t, int32_t>>;

TEST(Scheduler, NothingToDo) {
  SchedulerHarness h(small_config());
  EXPECT_TRUE(h.scheduler.idle());
  EXPECT_FALSE(h.has_plan());
  EXPECT_TRUE(h.scheduler.take_updates().empty());
}

TEST(Scheduler, OneSequenceFromPromptToLength) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(70, 3);
  const StepPlan first = h.plan();
  ASSERT_EQ(first.starts.size(), 1u);
  EXPECT_EQ(first.starts[0].num_prompt_tokens, 70);
  EXPECT_EQ(first.starts[0].num_cached_tokens, 0);
  EXPECT_EQ(first.appends.size(), 2u);
  EXPECT_EQ(first.tokens, tokens_from(1000, 70));
  EXPECT_EQ(first.num_decode_rows, 0);
  EXPECT_TRUE(first.rows[0].samples());
  h.apply(first, 11);
  const StepPlan second = h.plan();
  EXPECT_EQ(second.rows[0].work, RowWork(Decode()));
  EXPECT_EQ(second.rows[0].position, PositionRange::at(70));
  EXPECT_EQ(second.num_decode_rows, 1);
  h.apply(second, 12);
  h.step(13);
  EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{11, 12, 13}));
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kLength);
  EXPECT_TRUE(h.scheduler.idle());
  const SchedulerGauges gauges = h.scheduler.gauges();
  EXPECT_EQ(gauges.used_pages, 0);
  EXPECT_EQ(gauges.cached_pages, 1) << "the prompt's full block";
  EXPECT_EQ(gauges.prompt_tokens, 70);
  EXPECT_EQ(gauges.generated_tokens, 3);
  EXPECT_EQ(gauges.steps, 3);
}

TEST(Scheduler, TwoPlansInFlightAndNoMore) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(10, 100);
  const StepPlan first = h.plan();
  const StepPlan second = h.plan();
  EXPECT_EQ(second.rows[0].work, RowWork(Decode()));
  EXPECT_EQ(second.rows[0].position, PositionRange::at(10));
  EXPECT_FALSE(h.has_plan());
  EXPECT_EQ(h.scheduler.gauges().plans_in_flight, 2);
  h.apply(first, 1);
  const StepPlan third = h.plan();
  EXPECT_EQ(third.rows[0].position, PositionRange::at(11));
  h.apply(second, 2);
  h.apply(third, 3);
  EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{1, 2, 3}));
}

TEST(Scheduler, ResultsOutOfOrderAreDeliveredInOrder) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(10, 100);
  const StepPlan first = h.plan();
  const StepPlan second = h.plan();
  h.apply(second, 2);
  EXPECT_TRUE(h.outcomes[a].ids.empty());
  EXPECT_FALSE(h.has_plan()) << "both plans still count as in flight";
  h.apply(first, 1);
  EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(h.scheduler.gauges().plans_in_flight, 0);
}

TEST(Scheduler, NoRowPastMaxTokens) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(10, 1);
  const StepPlan first = h.plan();
  EXPECT_FALSE(h.has_plan()) << "the row in flight gives the last output";
  h.apply(first);
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kLength);
}

TEST(Scheduler, MaxModelLenEndsASequence) {
  SchedulerConfig config = small_config();
  config.max_model_len = 100;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(98, 50);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 2u);
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kLength);
}

TEST(Scheduler, StopIdsCountAfterMinTokens) {
  SchedulerHarness h(small_config());
  SchedulerHarness::Request request{.prompt = tokens_from(0, 10)};
  request.sampling.stop_ids = {5, 7};
  request.sampling.min_tokens = 2;
  request.sampling.max_tokens = 10;
  const SequenceId a = h.submit(request);
  h.step(7);
  h.step(5);
  EXPECT_FALSE(h.outcomes[a].finish);
  h.step(7);
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kStop);
  EXPECT_EQ(h.outcomes[a].stop_id, 7);
  EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{7, 5, 7}));
}

TEST(Scheduler, ALateRowsIdIsDropped) {
  SchedulerHarness h(small_config());
  SchedulerHarness::Request request{.prompt = tokens_from(0, 10)};
  request.sampling.stop_ids = {7};
  const SequenceId a = h.submit(request);
  const StepPlan first = h.plan();
  const StepPlan late = h.plan();
  h.apply(first, 7);
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kStop);
  EXPECT_GT(h.scheduler.gauges().used_pages, 0) << "the late row may still write";
  EXPECT_FALSE(h.scheduler.idle());
  h.apply(late, 9);
  EXPECT_EQ(h.outcomes[a].ids, std::vector<int32_t>{7});
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  EXPECT_TRUE(h.scheduler.idle());
}

TEST(Scheduler, CancelWaitingAndRunningAndUnknown) {
  SchedulerConfig config = small_config();
  config.max_sequences = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(10, 100);
  const SequenceId b = h.submit(10, 100);
  const StepPlan first = h.plan();
  h.scheduler.cancel({b, FinishReason::kCancelled});
  h.scheduler.cancel({a, FinishReason::kStop});
  h.scheduler.cancel({a, FinishReason::kCancelled});
  h.scheduler.cancel({SequenceId(999), FinishReason::kCancelled});
  h.collect();
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kStop);
  EXPECT_EQ(h.outcomes[b].finish, FinishReason::kCancelled);
  const SequenceId c = h.submit(10, 1);
  EXPECT_FALSE(h.has_plan()) << "the only slot is still touched by the plan in flight";
  EXPECT_EQ(h.scheduler.gauges().used_pages, 1);
  h.apply(first);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[c].finish, FinishReason::kLength);
}

// A client that leaves: whatever was in flight then, the pages are free when those steps are in, two at most.
TEST(Scheduler, ACancelFreesThePagesWithinTwoSteps) {
  SchedulerHarness h(small_config());
  const SequenceId gone = h.submit(100, 100);
  const SequenceId stays = h.submit(10, 100);
  while (h.outcomes[gone].ids.empty() || h.outcomes[stays].ids.empty()) h.step();
  const StepPlan one = h.plan(), two = h.plan();
  EXPECT_EQ(rows_of(two).size(), 2);
  h.scheduler.cancel({gone, FinishReason::kCancelled});
  EXPECT_GE(h.scheduler.gauges().used_pages, 3) << "pages in flight are not given away";
  h.apply(one);
  h.apply(two);
  EXPECT_EQ(h.outcomes[gone].finish, FinishReason::kCancelled);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 1) << "of the sequence that stays";
}

TEST(Scheduler, DeadlinesEndRunningAndWaiting) {
  SchedulerConfig config = small_config();
  config.max_sequences = 1;
  SchedulerHarness h(config);
  const SequenceId a = h.submit({.prompt = tokens_from(0, 10), .deadline_s = 5});
  const SequenceId b = h.submit({.prompt = tokens_from(0, 10), .deadline_s = 4});
  const SequenceId c = h.submit({.prompt = tokens_from(0, 10), .deadline_s = 50});
  h.step();
  h.now_s = 4;
  h.step();
  h.collect();
  EXPECT_EQ(h.outcomes[b].finish, FinishReason::kDeadline);
  EXPECT_FALSE(h.outcomes[a].finish);
  h.now_s = 5.5;
  const StepPlan next = h.plan();
  h.collect();
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kDeadline);
  EXPECT_EQ(next.rows[0].sequence, c);
  h.now_s = 60;
  EXPECT_FALSE(h.has_plan());
  h.collect();
  EXPECT_EQ(h.outcomes[c].finish, FinishReason::kDeadline);
}

TEST(Scheduler, ANonFiniteRowEndsOnlyItsSequence) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(10, 5);
  const SequenceId b = h.submit(10, 5);
  const StepPlan first = h.plan();
  StepResult result = h.answer(first);
  result.rows[0].finite = false;
  result.rows[0].ids.clear();
  h.apply(result);
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kError);
  EXPECT_FALSE(h.outcomes[a].error.empty());
  EXPECT_TRUE(h.outcomes[a].ids.empty());
  EXPECT_EQ(h.scheduler.gauges().not_finite, 1);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[b].ids.size(), 5u);
}

SchedulerConfig drafting_config() {
  SchedulerConfig config = small_config();
  config.num_drafts = 3;
  return config;
}

// With two plans in flight the second row's position is known as a range.
TEST(SchedulerDrafts, PositionsAreRangesUntilTheResultIsIn) {
  SchedulerHarness h(drafting_config());
  const SequenceId a = h.submit(62, 50);
  h.step(1);
  const StepPlan first = h.plan(), second = h.plan();
  EXPECT_EQ(first.rows[0].work, RowWork(Verify{3}));
  EXPECT_EQ(first.rows[0].position, PositionRange::at(62));
  EXPECT_EQ(first.appends.size(), 1u) << "for the last draft at most";
  EXPECT_EQ(second.rows[0].position, (PositionRange{63, 66}));
  StepResult result = h.answer(first);
  result.rows[0].ids = {2, 3};
  h.apply(result);
  EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(h.plan().rows[0].position, (PositionRange{65, 68}));
  result = h.answer(second);
  result.rows[0].ids = {4, 5, 6, 7};
  h.apply(result);
  EXPECT_EQ(h.plan().rows[0].position, (PositionRange{69, 72})) << "after one row in flight";
}

TEST(SchedulerDrafts, AcceptedDraftsAreCountedByTheirPlace) {
  SchedulerHarness h(drafting_config());
  h.submit(10, 50);
  h.step(1);
  for (const auto& [ids, num_drafts] :
       {std::pair{RowIds{2, 3}, 3}, {RowIds{4, 5, 6, 7}, 3}, {RowIds{8}, 2}, {RowIds{9}, 0}}) {
    StepResult result = h.answer(h.plan());
    result.rows[0].ids = ids;
    result.rows[0].num_drafts = num_drafts;
    h.apply(result);
  }
  const SpeculationTotals totals = h.scheduler.gauges().speculation;
  EXPECT_EQ(totals.rows, 3) << "of four, one had no drafts";
  EXPECT_EQ(totals.drafts, 8);
  EXPECT_EQ(totals.accepted(), 4);
  EXPECT_EQ(totals.accepted_at[0], 2);
  EXPECT_EQ(totals.accepted_at[1], 1);
  EXPECT_EQ(totals.accepted_at[2], 1);
  EXPECT_EQ(totals.accepted_at[3], 0);
}

// Of each sequence by itself: a row verifies none that could end beyond the longest context that drafts are for.
TEST(SchedulerDrafts, LongContextsVerifyNone) {
  SchedulerConfig config = drafting_config();
  config.speculation_max_context = 16;
  SchedulerHarness h(config);
  h.submit(13, 50);
  h.submit(12, 50);
  h.step(1);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.rows[0].work, RowWork(Decode())) << "positions 13 to 16";
  EXPECT_EQ(plan.rows[1].work, RowWork(Verify{3})) << "positions 12 to 15";
  EXPECT_EQ(h.plan().rows[1].work, RowWork(Decode())) << "all drafts of the row in flight may count";
}

TEST(SchedulerDrafts, ARequestMayHaveALongestContextOfItsOwn) {
  SchedulerConfig config = drafting_config();
  config.speculation_max_context = 4;
  SchedulerHarness h(config);
  for (const int32_t most : {17, 0, -1}) {
    SchedulerHarness::Request request{.prompt = tokens_from(1000 * most, 13), .speculation_max_context = most};
    request.sampling.max_tokens = 50;
    h.submit(request);
  }
  h.step(1);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.rows[0].work, RowWork(Verify{3}));
  EXPECT_EQ(plan.rows[1].work, RowWork(Verify{3}));
  EXPECT_EQ(plan.rows[2].work, RowWork(Decode()));
}

TEST(SchedulerDrafts, UpdatesSayWhatWasVerifiedForTheirIds) {
  SchedulerHarness h(drafting_config());
  SchedulerHarness::Request request{.prompt = tokens_from(0, 10)};
  request.sampling.max_tokens = 50;
  request.sampling.stop_ids = {7};
  h.submit(request);
  h.step(1);
  for (const auto& [ids, num_drafts, num_accepted] :
       std::vector<std::tuple<RowIds, int32_t, int32_t>>{{{4, 5, 6}, 3, 2}, {{8}, 0, 0}, {{4, 7, 9, 3}, 3, 2}}) {
    StepResult result = h.answer(h.plan());
    result.rows[0].ids = ids;
    result.rows[0].num_drafts = num_drafts;
    h.scheduler.apply(result);
    const std::vector<SequenceUpdate> updates = h.scheduler.take_updates();
    ASSERT_EQ(updates.size(), 1u);
    EXPECT_EQ(updates[0].num_drafts, num_drafts);
    EXPECT_EQ(updates[0].num_accepted, num_accepted) << "of the ids that are delivered";
  }
}

TEST(SchedulerDrafts, NoMoreThanOutputsAreWanted) {
  SchedulerHarness h(drafting_config());
  const SequenceId a = h.submit(10, 4);
  h.step(1);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.rows[0].work, RowWork(Verify{2}));
  EXPECT_FALSE(h.has_plan()) << "the row in flight may give the last output";
  h.apply(plan, 2);
  EXPECT_EQ(h.plan().rows[0].work, RowWork(Verify{1}));
  (void)a;
}

// The row's ids up to the one whose logits are not finite are delivered; one of them may end the sequence.
TEST(SchedulerDrafts, IdsBeforeANonFiniteOneCount) {
  for (const bool stops : {false, true}) {
    SchedulerHarness h(drafting_config());
    SchedulerHarness::Request request{.prompt = tokens_from(0, 10)};
    request.sampling.stop_ids = {stops ? 3 : 99};
    const SequenceId a = h.submit(request);
    h.step(1);
    StepResult result = h.answer(h.plan());
    result.rows[0].ids = {2, 3};
    result.rows[0].finite = false;
    h.apply(result);
    EXPECT_EQ(h.outcomes[a].ids, (std::vector<int32_t>{1, 2, 3}));
    EXPECT_EQ(h.outcomes[a].finish, stops ? FinishReason::kStop : FinishReason::kError);
    EXPECT_EQ(h.scheduler.gauges().not_finite, stops ? 0 : 1);
  }
}

// Chunks before the one that samples are published unseen; nothing of them may be hit once the output was not finite.
TEST(Scheduler, ANonFiniteRowLeavesNothingInThePrefixCache) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 128;
  SchedulerHarness h(config);
  const SchedulerHarness::Request request{.prompt = tokens_from(5, 200)};
  const SequenceId bad = h.submit(request);
  h.step(1);
  EXPECT_EQ(h.scheduler.gauges().latent_pages, 4);
  const StepPlan last = h.plan();
  StepResult result = h.answer(last);
  result.rows[0].finite = false;
  result.rows[0].ids.clear();
  h.apply(result);
  EXPECT_EQ(h.outcomes[bad].finish, FinishReason::kError);
  EXPECT_EQ(h.scheduler.gauges().cached_pages, 0);
  h.submit(request);
  EXPECT_EQ(h.plan().starts.at(0).num_cached_tokens, 0);
}

TEST(Scheduler, LogprobsFollowTheIds) {
  SchedulerHarness h(small_config());
  h.submit(10, 5);
  StepResult result = h.answer(h.plan(), 3);
  result.rows[0].logprobs = {{.id = 3, .logprob = -1.5f, .rank = 2, .top = {}}};
  h.scheduler.apply(result);
  const auto updates = h.scheduler.take_updates();
  ASSERT_EQ(updates.size(), 1u);
  ASSERT_EQ(updates[0].logprobs.size(), 1u);
  EXPECT_EQ(updates[0].logprobs[0].logprob, -1.5f);
}

TEST(Scheduler, PromptLogprobsComeOnceAndTakeNoHit) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 100;
  SchedulerHarness h(config);
  h.submit({.prompt = tokens_from(0, 200)});
  h.run_to_end();
  SchedulerHarness::Request request{.prompt = tokens_from(0, 200)};
  request.sampling.prompt_logprobs = 0;
  request.sampling.max_tokens = 2;
  const SequenceId a = h.submit(request);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].prompt_logprob_ids, tokens_from(1, 199));
  EXPECT_EQ(h.outcomes[a].num_cached_tokens, 0);
}

// Together they have a step's 256; who asks for none is not held up by who waits for them.
TEST(Scheduler, PromptLogprobsShareTheRowsOfLogits) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 1000;
  SchedulerHarness h(config);
  SchedulerHarness::Request scored{.prompt = tokens_from(0, 200)};
  scored.sampling.prompt_logprobs = 0;
  scored.sampling.max_tokens = 2;
  const SequenceId a = h.submit(scored), b = h.submit(scored), c = h.submit(scored), d = h.submit(100, 2);
  using Rows = std::vector<std::pair<int64_t, int32_t>>;
  const StepPlan first = h.plan();
  EXPECT_EQ(rows_of(first), (Rows{{a.value, 200}, {b.value, 56}, {d.value, 100}}));
  const StepPlan second = h.plan();
  EXPECT_EQ(rows_of(second), (Rows{{a.value, 1}, {d.value, 1}, {b.value, 144}, {c.value, 112}}));
  h.apply(first);
  h.apply(second);
  h.run_to_end();
  for (const SequenceId sequence : {a, b, c}) EXPECT_EQ(h.outcomes[sequence].prompt_logprob_ids, tokens_from(1, 199));
}

// A chunk of what is left would end where the alignment forbids it.
TEST(Scheduler, AlignedChunksUnderPromptLogprobsStayAligned) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 1000;
  config.attention_alignment = 96;
  config.deterministic = true;
  SchedulerHarness h(config);
  SchedulerHarness::Request scored{.prompt = tokens_from(0, 300)};
  scored.sampling.prompt_logprobs = 0;
  scored.sampling.max_tokens = 1;
  const SequenceId a = h.submit(scored), b = h.submit(scored);
  using Rows = std::vector<std::pair<int64_t, int32_t>>;
  EXPECT_EQ(rows_of(h.plan()), (Rows{{a.value, 192}}));
  EXPECT_EQ(rows_of(h.plan()), (Rows{{a.value, 108}, {b.value, 96}}));
}

TEST(Scheduler, FitsKnowsThePoolAndTheModel) {
  SchedulerConfig config = small_config();
  config.num_pages = 4;
  config.max_model_len = 300;
  const Scheduler scheduler(config);
  EXPECT_TRUE(scheduler.fits(1, 1));
  EXPECT_TRUE(scheduler.fits(256, 1));
  EXPECT_TRUE(scheduler.fits(200, 57)) << "the last output is not computed";
  EXPECT_FALSE(scheduler.fits(200, 58));
  EXPECT_FALSE(scheduler.fits(0, 5));
  EXPECT_FALSE(scheduler.fits(5, 0));
  EXPECT_FALSE(scheduler.fits(10, int64_t{1} << 40));
  config.num_pages = 100;
  EXPECT_TRUE(Scheduler(config).fits(200, 100));
  EXPECT_FALSE(Scheduler(config).fits(200, 101));
}

TEST(Scheduler, APromptThatFillsThePoolRuns) {
  SchedulerConfig config = small_config();
  config.num_pages = 4;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(256, 1);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kLength);
}

TEST(Scheduler, ValidateNamesTheField) {
  const auto field = [](auto change) {
    SchedulerConfig config = small_config();
    change(config);
    const Status status = validate(config);
    return status.ok() ? std::string() : status.error().field;
  };
  EXPECT_EQ(field([](SchedulerConfig&) {}), "");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.num_pages = 0; }), "num_pages");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.max_sequences = 0; }), "max_sequences");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.max_model_len = 1; }), "max_model_len");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.max_step_tokens = 0; }), "max_step_tokens");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.attention_alignment = 0; }), "attention_alignment");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.attention_alignment = kPromptLogprobTokens + 1; }), "attention_alignment");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.long_prefill_tokens = -1; }), "long_prefill_tokens");
  EXPECT_EQ(field([](SchedulerConfig& c) { c.hash_bits = 0; }), "hash_bits");
  EXPECT_EQ(field([](SchedulerConfig& c) {
              c.attention_alignment = 1024;
              c.deterministic = true;
            }),
            "max_step_tokens");
}

TEST(SchedulerDeathTest, WrongResultsAreBugs) {
  SchedulerHarness h(small_config());
  h.submit(10, 5);
  const StepPlan first = h.plan();
  const StepPlan second = h.plan();
  StepResult result = h.answer(second);
  EXPECT_DEATH(h.scheduler.apply(StepResult{StepId(9), {}}), "not in flight");
  EXPECT_DEATH(h.scheduler.apply(StepResult{first.step, {}}), "step 0 has 1 rows, its result 0");
  StepResult early = result;
  early.rows.push_back(early.rows[0]);
  EXPECT_DEATH(h.scheduler.apply(early), "step 1 has 1 rows, its result 2") << "also one that waits for its turn";
  result.rows[0].slot = SlotId(3);
  result.step = first.step;
  EXPECT_DEATH(h.scheduler.apply(result), "another sequence");
  h.apply(second);
  EXPECT_DEATH(h.scheduler.apply(h.answer(second)), "twice");
  h.apply(first);
  EXPECT_DEATH(h.scheduler.apply(h.answer(first)), "not in flight");
}

}  // namespace
}  // namespace perigee

// Who runs, with how many tokens and whose pages: order, budget, alignment, prefix hits, followers, preemption.
#include <gtest/gtest.h>

#include "control/scheduler.h"
#include "control/scheduler_testing.h"

namespace perigee {
namespace {

using Rows = std::vector<std::pair<int64_t, int32_t>>;
using Request = SchedulerHarness::Request;

Request with_max_tokens(Request request, int32_t max_tokens) {
  request.sampling.max_tokens = max_tokens;
  return request;
}

TEST(SchedulerOrder, PriorityThenArrival) {
  SchedulerConfig config = small_config();
  config.max_sequences = 2;
  SchedulerHarness h(config);
  const SequenceId late = h.submit(10, 2, 1);
  const SequenceId first = h.submit(10, 2, 0);
  const SequenceId second = h.submit(10, 2, 0);
  const SequenceId urgent = h.submit(10, 2, -1);
  EXPECT_EQ(rows_of(h.plan()), (Rows{{urgent.value, 10}, {first.value, 10}}));
  (void)late;
  (void)second;
}

TEST(SchedulerOrder, DecodesThenPrefillsThenAdmissions) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 100;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(40, 50);
  const SequenceId b = h.submit(150, 50);
  const SequenceId c = h.submit(60, 50);
  const StepPlan first = h.plan();
  EXPECT_EQ(rows_of(first), (Rows{{a.value, 40}, {b.value, 60}}));
  const StepPlan second = h.plan();
  EXPECT_EQ(rows_of(second), (Rows{{a.value, 1}, {b.value, 90}, {c.value, 9}}));
  EXPECT_EQ(second.num_decode_rows, 1);
  EXPECT_EQ(second.num_tokens(), 100);
  EXPECT_FALSE(first.rows[1].samples());
  EXPECT_TRUE(second.rows[1].samples());
  h.apply(first);
  EXPECT_EQ(rows_of(h.plan()), (Rows{{a.value, 1}, {b.value, 1}, {c.value, 51}}));
}

TEST(SchedulerChunks, EndAtTheCapTheAlignmentOrThePromptsEnd) {
  struct Case {
    const char* why;
    int32_t max_step_tokens, long_prefill_tokens, alignment;
    bool deterministic;
    std::vector<int32_t> prompts;  // of sequences 1, 2
    std::vector<Rows> plans;
  };
  const Case cases[] = {
      {"a long prefill is capped", 512, 50, 1, false, {120}, {{{1, 50}}, {{1, 50}}}},
      {"a short chunk is progress", 100, 0, 64, false, {150, 300}, {{{1, 64}, {2, 36}}, {{1, 86}, {2, 14}}}},
      {"30 + 98 = 128, the next multiple", 100, 0, 64, false, {70, 300}, {{{1, 70}, {2, 30}}, {{1, 1}, {2, 98}}}},
      {"the second would end at 36; a cap of 10 is 64", 100, 10, 64, true, {150, 100}, {{{1, 64}}, {{1, 64}}}}};
  for (const Case& each : cases) {
    SchedulerConfig config = small_config();
    config.max_step_tokens = each.max_step_tokens;
    config.long_prefill_tokens = each.long_prefill_tokens;
    config.attention_alignment = each.alignment;
    config.deterministic = each.deterministic;
    SchedulerHarness h(config);
    for (const int32_t length : each.prompts) h.submit(length, 5);
    for (const Rows& rows : each.plans) EXPECT_EQ(rows_of(h.plan()), rows) << each.why;
  }
}

TEST(SchedulerHits, WholeConfirmedBlocksButNeverTheWholePrompt) {
  SchedulerHarness h(small_config());
  h.submit(with_max_tokens({.prompt = tokens_from(0, 192)}, 1));
  h.run_to_end();
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 192)}, 3));
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts[0].num_cached_tokens, 128);
  EXPECT_EQ(plan.rows[0].position, PositionRange::at(128));
  EXPECT_EQ(plan.tokens, tokens_from(128, 64));
  EXPECT_EQ(plan.appends.size(), 3u);
  h.apply(plan);
  EXPECT_EQ(h.outcomes[a].num_cached_tokens, 128);
  const SchedulerGauges gauges = h.scheduler.gauges();
  EXPECT_EQ(gauges.prefix_queries, 384);
  EXPECT_EQ(gauges.prefix_hits, 128);
}

TEST(SchedulerHits, UnconfirmedBlocksAreNoHits) {
  SchedulerHarness h(small_config());
  h.submit({.prompt = tokens_from(0, 200)});
  const StepPlan first = h.plan();
  h.submit({.prompt = tokens_from(0, 200)});
  const StepPlan second = h.plan();
  ASSERT_EQ(second.starts.size(), 1u);
  EXPECT_EQ(second.starts[0].num_cached_tokens, 0);
  h.apply(first);
  h.submit({.prompt = tokens_from(0, 200)});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 192);
}

TEST(SchedulerHits, BlocksOfOutputsAreHitsToo) {
  SchedulerHarness h(small_config());
  const SequenceId a = h.submit(with_max_tokens({.prompt = tokens_from(0, 60)}, 80));
  h.run_to_end();
  std::vector<int32_t> turn = tokens_from(0, 60);
  turn.insert(turn.end(), h.outcomes[a].ids.begin(), h.outcomes[a].ids.end());
  turn.push_back(1);
  h.submit({.prompt = turn});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 128);
}

TEST(SchedulerHits, SaltAndSwitchSeparate) {
  SchedulerHarness h(small_config());
  h.submit({.prompt = tokens_from(0, 100), .salt = "a"});
  h.run_to_end();
  h.submit({.prompt = tokens_from(0, 100), .salt = "b"});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 0);
  h.submit({.prompt = tokens_from(0, 100), .salt = "a"});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 64);

  SchedulerConfig config = small_config();
  config.prefix_caching = false;
  SchedulerHarness off(config);
  const SequenceId leader = off.submit({.prompt = tokens_from(0, 100)});
  off.submit({.prompt = tokens_from(0, 100), .leader = leader});
  EXPECT_EQ(off.plan().starts.size(), 2u) << "nothing to wait for";
  EXPECT_EQ(off.scheduler.gauges().cached_pages, 0);
}

// The placeholders of two images are the same tokens.
TEST(SchedulerHits, PrefixesAreSharedUnderTheSameExtraKeys) {
  SchedulerHarness h(small_config());
  const auto hit_with = [&](const std::vector<ExtraKey>& extra_keys) {
    const SequenceId sequence = h.submit({.prompt = tokens_from(0, 200), .extra_keys = extra_keys});
    const StepPlan plan = h.plan();
    CHECK(plan.starts.size() == 1, "one start was expected");
    h.apply(plan);
    h.scheduler.cancel({sequence, FinishReason::kCancelled});
    h.collect();
    return plan.starts[0].num_cached_tokens;
  };
  EXPECT_EQ(hit_with({{}, {1, 0}}), 0);
  EXPECT_EQ(hit_with({{}, {1, 0}}), 192);
  EXPECT_EQ(hit_with({{}, {2, 0}}), 64) << "up to the image";
  EXPECT_EQ(hit_with({}), 64);
  EXPECT_EQ(hit_with({{}, {1, 0}, {}}), 192) << "blocks without a key have none";
}

TEST(SchedulerHits, DeterministicHitsAreAligned) {
  SchedulerConfig config = small_config();
  config.attention_alignment = 96;  // with blocks of 64: every 192 tokens
  config.deterministic = true;
  SchedulerHarness h(config);
  h.submit({.prompt = tokens_from(0, 400)});
  h.run_to_end();
  h.submit({.prompt = tokens_from(0, 380)});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 192);
}

TEST(SchedulerHits, DroppingTheCacheForgetsAll) {
  SchedulerHarness h(small_config());
  h.submit({.prompt = tokens_from(0, 200)});
  h.run_to_end();
  const SequenceId runs = h.submit(with_max_tokens({.prompt = tokens_from(0, 200)}, 100));
  h.step();
  h.scheduler.drop_prefix_cache();
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().cached_pages, 0);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[runs].ids.size(), 100u);
  h.submit({.prompt = tokens_from(0, 200)});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 0);
}

TEST(SchedulerFollowers, WaitForTheLeadersPrompt) {
  SchedulerConfig config = small_config();
  config.max_step_tokens = 100;
  SchedulerHarness h(config);
  const SequenceId leader = h.submit({.prompt = tokens_from(0, 150)});
  const SequenceId follower = h.submit({.prompt = tokens_from(0, 150), .leader = leader});
  const SequenceId other = h.submit(10, 5);
  h.step();
  const StepPlan second = h.plan();
  EXPECT_EQ(rows_of(second), (Rows{{leader.value, 50}, {other.value, 10}})) << "others pass the follower";
  h.apply(second);
  const StepPlan third = h.plan();
  ASSERT_EQ(third.starts.size(), 1u);
  EXPECT_EQ(third.starts[0].sequence, follower);
  EXPECT_EQ(third.starts[0].num_cached_tokens, 128);
  h.apply(third);
  EXPECT_EQ(h.scheduler.gauges().prompt_tokens, 150 + 10 + 150) << "of each choice";
  EXPECT_EQ(h.scheduler.gauges().cached_prompt_tokens, 128);
}

TEST(SchedulerFollowers, ALeaderThatEndsOrIsLateDoesNotHold) {
  SchedulerHarness h(small_config());
  const SequenceId leader = h.submit({.prompt = tokens_from(0, 150)});
  const SequenceId follower = h.submit({.prompt = tokens_from(0, 150), .leader = leader});
  h.scheduler.cancel({leader, FinishReason::kCancelled});
  EXPECT_EQ(h.plan().starts[0].sequence, follower);
  const SequenceId gone = h.submit({.prompt = tokens_from(0, 150), .leader = leader});
  const SequenceId slow = h.submit(64, 5, 9);
  const SequenceId urgent = h.submit({.prompt = tokens_from(0, 10), .priority = -9, .leader = slow});
  const StepPlan plan = h.plan();
  ASSERT_EQ(plan.starts.size(), 3u);
  EXPECT_EQ(plan.starts[0].sequence, urgent);
  EXPECT_EQ(plan.starts[1].sequence, gone);
}

TEST(SchedulerAdmission, NeedsThePromptsPagesAndOneMore) {
  SchedulerConfig config = small_config();
  config.num_pages = 5;
  SchedulerHarness h(config);
  h.submit(128, 3);
  h.submit(192, 50);
  const SequenceId small = h.submit(10, 3);
  EXPECT_EQ(rows_of(h.plan()), (Rows{{1, 128}})) << "3 pages are left, the next one needs 3 and one more";
  EXPECT_EQ(h.scheduler.gauges().waiting, 2) << "and nobody overtakes the head";
  (void)small;
}

// Pool of 7: the first sequence holds two pages and can grow, the second one needs three; then the third one, too.
TEST(SchedulerAdmission, LeavesAPageForEachThatCanGrow) {
  SchedulerConfig config = small_config();
  config.num_pages = 7;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(100, 150);
  const SequenceId b = h.submit(100, 150);
  const SequenceId c = h.submit(60, 5);  // one page, and it will never need another
  EXPECT_EQ(rows_of(h.plan()), (Rows{{a.value, 100}, {b.value, 100}, {c.value, 60}}))
      << "3 pages were left: 1 for the third one, 2 for those that run";
  config.num_pages = 6;
  SchedulerHarness tight(config);
  tight.submit(100, 150);
  tight.submit(100, 150);
  tight.submit(60, 5);
  const StepPlan first = tight.plan();
  EXPECT_EQ(rows_of(first), (Rows{{a.value, 100}, {b.value, 100}}));
  tight.submit(128, 1, -1);  // the head now
  const StepPlan second = tight.plan();
  EXPECT_EQ(rows_of(second), (Rows{{a.value, 1}, {b.value, 1}})) << "it needs the two that are kept back";
  tight.apply(first);
  tight.apply(second);
  tight.run_to_end();
}

// Neither counts where it would keep a sequence out that has the pool to itself, or beside those that are complete.
TEST(SchedulerAdmission, NothingIsKeptBackForWhoNeedsNothing) {
  SchedulerConfig config = small_config();
  config.num_pages = 4;
  SchedulerHarness h(config);
  const SequenceId whole = h.submit(200, 57);  // all four pages in the end
  h.run_to_end();
  EXPECT_EQ(h.outcomes[whole].ids.size(), 57u);
  const SequenceId a = h.submit(128, 1), b = h.submit(128, 1);
  EXPECT_EQ(rows_of(h.plan()), (Rows{{a.value, 128}, {b.value, 128}}));
}

TEST(SchedulerAdmission, TheBlockedHeadStartsWhenPagesReturn) {
  SchedulerConfig config = small_config();
  config.num_pages = 6;
  SchedulerHarness h(config);
  const SequenceId runs = h.submit(100, 20);
  const SequenceId ends = h.submit(64, 3);
  const SequenceId head = h.submit(192, 50);
  h.steps(2);
  EXPECT_EQ(h.scheduler.gauges().waiting, 1);
  h.step();
  EXPECT_TRUE(h.outcomes[ends].finish);
  const StepPlan next = h.plan();
  EXPECT_EQ(rows_of(next), (Rows{{runs.value, 1}, {head.value, 192}}));
}

// Blocks that the head's prompt begins with, from the first.
TEST(SchedulerAdmission, AWaitingHeadHashesItsPromptOnce) {
  SchedulerConfig config = small_config();
  config.num_pages = 14;
  SchedulerHarness h(config);
  h.submit(with_max_tokens({.prompt = tokens_from(0, 400)}, 1));  // leaves six cached blocks
  h.run_to_end();
  const SequenceId runs = h.submit(300, 200);  // of five pages, then more
  h.step();
  const SequenceId head = h.submit(with_max_tokens({.prompt = tokens_from(0, 800)}, 1));
  const int64_t before = h.scheduler.gauges().blocks_hashed;
  h.step();
  EXPECT_EQ(h.scheduler.gauges().blocks_hashed - before, 7) << "six that are cached and the next one";
  ASSERT_EQ(h.scheduler.gauges().waiting, 1);
  int64_t hashed = h.scheduler.gauges().blocks_hashed;
  for (int i = 0; i < 15; ++i) h.step();  // up to 317 tokens: none completes a block
  EXPECT_EQ(h.scheduler.gauges().blocks_hashed, hashed) << "nothing was published";
  for (int i = 0; i < 10; ++i) h.step();  // one is completed
  EXPECT_EQ(h.scheduler.gauges().blocks_hashed, hashed + 2) << "that block, and the head's next one once more";
  h.scheduler.cancel({runs, FinishReason::kCancelled});
  h.collect();
  const StepPlan start = h.plan();
  ASSERT_EQ(start.starts.size(), 1u);
  EXPECT_EQ(start.starts[0].sequence, head);
  EXPECT_EQ(start.starts[0].num_cached_tokens, 384);
}

// The head lacks pages for its whole prompt. One that runs publishes the same blocks, and then it lacks none.
TEST(SchedulerAdmission, AHeadsNeedShrinksWithWhatOthersPublish) {
  SchedulerConfig config = small_config();
  config.num_pages = 9;
  config.max_step_tokens = 128;
  SchedulerHarness h(config);
  const SequenceId runs = h.submit(with_max_tokens({.prompt = tokens_from(0, 330)}, 20));
  const SequenceId head = h.submit(with_max_tokens({.prompt = tokens_from(0, 332)}, 20));
  std::vector<size_t> starts;
  for (int i = 0; i < 4; ++i) {
    const StepPlan plan = h.plan();
    starts.push_back(plan.starts.size());
    h.apply(plan);
  }
  EXPECT_EQ(starts, (std::vector<size_t>{1, 0, 1, 0})) << "after two chunks of 128 tokens four blocks are shared";
  EXPECT_FALSE(h.outcomes[runs].finish);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[head].ids.size(), 20u);
  EXPECT_EQ(h.outcomes[head].num_cached_tokens, 256);
}

// Blocks of the head's match are evicted while it waits, from the last to the first.
TEST(SchedulerAdmission, AHeadsMatchLosesWhatIsEvicted) {
  SchedulerConfig config = small_config();
  config.num_pages = 10;
  config.max_sequences = 2;
  SchedulerHarness h(config);
  h.submit(with_max_tokens({.prompt = tokens_from(0, 257)}, 1));
  h.run_to_end();
  ASSERT_EQ(h.scheduler.gauges().cached_pages, 4);
  const SequenceId grows = h.submit(320, 150);
  h.step();
  const SequenceId head = h.submit(with_max_tokens({.prompt = tokens_from(0, 500)}, 2));
  while (!h.outcomes[grows].finish) {
    h.step();
    EXPECT_EQ(h.scheduler.gauges().waiting, 1);
  }
  const StepPlan start = h.plan();
  ASSERT_EQ(start.starts.size(), 1u);
  EXPECT_EQ(start.starts[0].num_cached_tokens, 128) << "two of the four went when the other one grew";
  h.apply(start);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[head].ids.size(), 2u);
}

TEST(SchedulerFairness, DecodeRowsLeaveAPrefillItsChunk) {
  SchedulerConfig config = small_config();
  config.deterministic = true;
  config.attention_alignment = 64;
  config.max_step_tokens = 70;
  config.max_sequences = 20;
  SchedulerHarness h(config);
  for (int i = 0; i < 20; ++i) h.submit(3, 40);
  for (int i = 0; i < 3; ++i) h.step();
  EXPECT_EQ(h.scheduler.gauges().running, 7) << "64 tokens are left for a chunk beside six of them";
  EXPECT_EQ(h.scheduler.gauges().waiting, 13);
  h.run_to_end();
}

// The urgent prefill leaves 16 tokens of a step's budget, and the next chunk of the other one has 64 at least. Nobody
// takes those 16: a stream of short prompts would, for as long as it lasts.
TEST(SchedulerFairness, NobodyIsAdmittedPastAPrefillThatGetsNothing) {
  SchedulerConfig config = small_config();
  config.num_pages = 64;
  config.deterministic = true;
  config.attention_alignment = 64;
  config.max_step_tokens = 400;
  SchedulerHarness h(config);
  Request request = with_max_tokens({.prompt = tokens_from(0, 900)}, 5);
  request.sampling.prompt_logprobs = 0;  // in chunks of 256 tokens
  const SequenceId patient = h.submit(request);
  h.step();
  const SequenceId urgent = h.submit(700, 5, -1);
  const StepPlan both = h.plan();
  EXPECT_EQ(rows_of(both), (Rows{{patient.value, 256}, {urgent.value, 128}}));
  const SequenceId small = h.submit(5, 5);
  const StepPlan squeezed = h.plan();
  EXPECT_EQ(rows_of(squeezed), (Rows{{urgent.value, 384}}));
  h.apply(both);
  h.apply(squeezed);
  EXPECT_EQ(rows_of(h.plan()), (Rows{{urgent.value, 188}, {patient.value, 192}, {small.value, 5}}));
}

// Two sequences whose outputs outgrow the pool: the later one gives way, resumes by a hit, and both finish.
TEST(SchedulerPreemption, TheWorstGivesWayAndResumes) {
  SchedulerConfig config = small_config();
  config.admission_reserve = nullptr;
  config.num_pages = 5;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(100, 150);
  const SequenceId b = h.submit(100, 150);
  h.steps(70);
  EXPECT_EQ(h.scheduler.gauges().preemptions, 1);
  EXPECT_EQ(h.scheduler.gauges().running, 1);
  const size_t before = h.outcomes[b].ids.size();
  EXPECT_GT(before, 20u);
  StepPlan resume;
  while (resume.starts.empty()) {
    resume = h.plan();
    h.apply(resume);
  }
  EXPECT_TRUE(h.outcomes[a].finish);
  EXPECT_EQ(resume.starts[0].sequence, b);
  EXPECT_EQ(resume.starts[0].num_prompt_tokens, 100);
  EXPECT_EQ(resume.starts[0].tokens->size(), 100 + before) << "prompt and former outputs";
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 150u);
  EXPECT_EQ(h.outcomes[b].ids.size(), 150u);
  EXPECT_EQ(h.outcomes[b].finish, FinishReason::kLength);
}

// Its blocks can be entered in the prefix index no more once the one before them was dropped; in its next life they
// can.
TEST(SchedulerPreemption, ABrokenChainIsMendedByThePreemption) {
  SchedulerConfig config = small_config();
  config.num_pages = 5;
  config.admission_reserve = nullptr;
  SchedulerHarness h(config);
  h.submit(100, 150);
  const SequenceId b = h.submit(100, 150);
  h.steps(10);
  h.scheduler.drop_prefix_cache();
  h.run_to_end();
  ASSERT_EQ(h.scheduler.gauges().preemptions, 1);
  std::vector<int32_t> again = tokens_from(2000, 100);
  again.insert(again.end(), h.outcomes[b].ids.begin(), h.outcomes[b].ids.end());
  h.submit({.prompt = again});
  EXPECT_EQ(h.plan().starts.at(0).num_cached_tokens, 192);
}

TEST(SchedulerPreemption, PagesUnderFlightAreWaitedFor) {
  SchedulerConfig config = small_config();
  config.admission_reserve = nullptr;
  config.num_pages = 4;
  SchedulerHarness h(config);
  const SequenceId a = h.submit(63, 100);
  const SequenceId b = h.submit(63, 100);
  StepPlan in_flight = h.plan();
  std::optional<StepPlan> next = h.scheduler.next_plan(h.now_s);
  while (next && h.scheduler.gauges().preemptions == 0) {
    h.apply(in_flight);
    in_flight = *std::exchange(next, h.scheduler.next_plan(h.now_s));
  }
  EXPECT_FALSE(next) << "the victim's pages are under flight, so the winner waits, and takes no second victim";
  EXPECT_EQ(h.scheduler.gauges().preemptions, 1);
  EXPECT_EQ(h.scheduler.gauges().running, 1);
  EXPECT_EQ(h.scheduler.gauges().free_pages, 0);
  const size_t known = h.outcomes[b].ids.size();
  h.apply(in_flight);
  EXPECT_EQ(h.outcomes[b].ids.size(), known) << "the victim's late id is dropped";
  const StepPlan alone = h.plan();
  EXPECT_EQ(rows_of(alone), (Rows{{a.value, 1}}));
  h.apply(alone);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 100u);
  EXPECT_EQ(h.outcomes[b].ids.size(), 100u);
}

}  // namespace
}  // namespace perigee

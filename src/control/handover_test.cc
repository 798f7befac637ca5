// Leases and imports: what is held, for how long, and what a sequence starts from afterwards.
#include "control/handover_testing.h"

namespace perigee {
namespace {

class Handover : public EachModel {};
INSTANTIATE_TEST_SUITE_P(Models, Handover, testing::Bool(), EachModel::name);

// Runs until the sequence ends; its last update.
SequenceUpdate run(SchedulerHarness& h, SequenceId sequence) {
  for (int i = 0; i < 1000; ++i) {
    const StepPlan plan = h.plan();
    h.scheduler.apply(h.answer(plan));
    h.scheduler.check_integrity();
    for (SequenceUpdate& update : h.scheduler.take_updates())
      if (update.sequence == sequence && update.finish) return update;
  }
  CHECK(false, "no end");
}

// A prompt of which another node holds all that it may.
SequenceId submit_remote(SchedulerHarness& h, int64_t id, std::vector<int32_t> prompt, int32_t max_tokens = 2) {
  Submit submit = request(id, std::move(prompt), max_tokens);
  submit.remote_blocks = static_cast<int32_t>((submit.prompt->size() - 1) / kBlockTokens);
  h.scheduler.submit(submit);
  return submit.sequence;
}

Import only_import(SchedulerHarness& h) {
  EXPECT_FALSE(h.has_plan());
  h.scheduler.check_integrity();
  const std::vector<Import> imports = h.scheduler.take_imports();
  CHECK(imports.size() == 1, imports.size(), " imports");
  return imports[0];
}

// What a request that asks for it leases at its end. Null: nothing.
std::shared_ptr<const Lease> run_leased(SchedulerHarness& h, Submit submit) {
  submit.lease = LeaseWish::kAtEnd;
  h.scheduler.submit(submit);
  return run(h, submit.sequence).lease;
}

// A lease is every token of the prompt but one: full blocks with the state after them, and the tail with its own.
TEST_P(Handover, APromptIsLeasedAtItsEnd) {
  struct Case {
    const char* what;
    int32_t length;
    bool has_tail = false;
    int32_t max_tokens = 1;
    bool scores_prompt = false, deterministic = false;
  };
  for (const Case& of : {
           Case{"all but one token are in full blocks", 65},
           Case{"the same, of two blocks", 129},
           Case{"its last block is full but for a token", 128, true},
           Case{"its last block is short", 200, true},
           Case{"another row changes the state", 200, false, 2},
           Case{"prompt_logprobs want the last token in a chunk", 200, false, 1, true},
           Case{"chunks end where one node's do", 200, false, 1, false, true},
       }) {
    SCOPED_TRACE(of.what);
    SchedulerConfig config = Handover::config();
    config.deterministic = of.deterministic;
    SchedulerHarness h(config);
    Submit submit = request(1, tokens_from(0, of.length), of.max_tokens);
    SamplingParams sampling = *submit.sampling;
    if (of.scores_prompt) sampling.prompt_logprobs = 0;
    submit.sampling = std::make_shared<SamplingParams>(sampling);
    const auto lease = run_leased(h, submit);
    ASSERT_TRUE(lease);
    const int32_t all = of.length - 1, num_tokens = of.has_tail ? all : all / kBlockTokens * kBlockTokens;
    EXPECT_EQ(lease->num_tokens, num_tokens);
    EXPECT_EQ(std::ssize(lease->blocks), num_blocks(num_tokens));
    EXPECT_EQ(std::ssize(lease->checkpoint), state_pages());
    EXPECT_EQ(std::ssize(lease->tail_state), of.has_tail ? state_pages() : 0);
    EXPECT_EQ(h.scheduler.gauges().leases, 1);
    EXPECT_EQ(h.scheduler.gauges().used_pages, num_blocks(num_tokens) + (of.has_tail ? 2 : 1) * state_pages());
    h.scheduler.release(SequenceId(1));
    h.scheduler.release(SequenceId(1));
    h.scheduler.check_integrity();
    EXPECT_EQ(h.scheduler.gauges().leases, 0);
    EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  }
}

// The pool has room for five blocks and a state. Without a tail, too, nobody could start from the blocks.
TEST(HandoverHybrid, ALeaseWithATailNeedsNoCheckpoint) {
  SchedulerConfig tight = hybrid_config();
  tight.num_pages = 5 + kTestStatePages + 2;
  tight.max_model_len = 320;
  SchedulerHarness h(tight);
  EXPECT_FALSE(run_leased(h, request(1, tokens_from(0, 257))));
  const auto lease = run_leased(h, request(2, tokens_from(1000, 300)));
  ASSERT_TRUE(lease);
  EXPECT_EQ(lease->num_tokens, 299);
  EXPECT_EQ(lease->blocks.size(), 5u);
  EXPECT_TRUE(lease->checkpoint.empty());
  EXPECT_EQ(std::ssize(lease->tail_state), kTestStatePages);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 5 + kTestStatePages);
  h.scheduler.release(SequenceId(2));
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// Two sequences compute the same prompt at once, and the index has the pages of the one that ends first. They are given
// to others before the other one ends. A state that is in the index alone is then gone.
TEST_P(Handover, ALeaseHasTheSequencesOwnPages) {
  for (const bool has_tail : {true, false}) {
    SCOPED_TRACE(has_tail);
    SchedulerConfig tight = config();
    tight.num_pages = 16 + 3 * state_pages();
    SchedulerHarness h(tight);
    h.scheduler.submit(request(1, tokens_from(0, 257)));
    Submit submit = request(2, tokens_from(0, 700), has_tail ? 1 : 2);
    submit.lease = LeaseWish::kAtEnd;
    h.scheduler.submit(submit);
    h.scheduler.apply(h.answer(h.plan()));
    h.scheduler.submit(request(3, tokens_from(5000, 257)));
    const auto lease = run(h, SequenceId(2)).lease;
    if (has_tail || state_pages() == 0) {
      ASSERT_TRUE(lease);
      EXPECT_EQ(lease->num_tokens, has_tail ? 699 : 640);
      EXPECT_EQ(lease->blocks.size(), has_tail ? 11u : 10u);
    } else {
      EXPECT_FALSE(lease);
    }
    h.scheduler.release(SequenceId(2));
    h.scheduler.check_integrity();
  }
}

TEST_P(Handover, NothingIsLeasedOfAShortPromptOrACancelledOne) {
  SchedulerHarness h(config());
  EXPECT_FALSE(run_leased(h, request(1, tokens_from(0, 64))));

  Submit submit = request(2, tokens_from(500, 200), 8);
  submit.lease = LeaseWish::kAtEnd;
  h.scheduler.submit(submit);
  h.scheduler.apply(h.answer(h.plan()));
  h.scheduler.cancel({SequenceId(2), FinishReason::kCancelled});
  for (const SequenceUpdate& each : h.scheduler.take_updates()) EXPECT_FALSE(each.lease);
  EXPECT_EQ(h.scheduler.gauges().leases, 0);
}

// Whatever the pool is asked for meanwhile.
TEST_P(Handover, LeasedPagesAreNotGivenOut) {
  SchedulerConfig tight = config();
  tight.num_pages = 16 + state_pages();
  tight.max_model_len = 1000;
  SchedulerHarness h(tight);
  const auto lease = run_leased(h, request(1, tokens_from(0, 257)));
  ASSERT_TRUE(lease);
  for (int64_t id = 2; id < 8; ++id) {
    h.scheduler.submit(request(id, tokens_from(1000 * static_cast<int32_t>(id), 300), 2));
    while (!h.scheduler.idle()) {
      const StepPlan plan = h.plan();
      for (const BlockAppend& append : plan.appends)
        for (const Placement& leased : lease->blocks) EXPECT_NE(append.place, leased);
      h.scheduler.apply(h.answer(plan));
    }
  }
}

// The last token runs as a decode row, before the chunks of the same step.
TEST_P(Handover, ASequenceStartsFromItsTail) {
  SchedulerHarness h(config());
  h.scheduler.submit(request(1, tokens_from(7000, 40)));
  const SequenceId a = submit_remote(h, 2, tokens_from(0, 200));
  h.apply(h.plan());
  const std::vector<Import> imports = h.scheduler.take_imports();
  ASSERT_EQ(imports.size(), 1u);
  const Import& import = imports[0];
  EXPECT_EQ(import.num_tokens, 199);
  EXPECT_EQ(std::ssize(import.blocks), 4);
  EXPECT_EQ(std::ssize(import.tail_state), state_pages());
  h.scheduler.end_import(a, ImportEnd::kArrived);
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 1 + state_pages()) << "the tail waits, the rest is in the index";
  h.scheduler.submit(request(3, tokens_from(8000, 40)));
  const StepPlan plan = h.plan();
  ASSERT_EQ(plan.starts.size(), 2u);
  EXPECT_EQ(plan.starts[0].num_cached_tokens, 199);
  EXPECT_EQ(plan.starts[0].state_pages, import.tail_state);
  EXPECT_EQ(plan.starts[0].checkpoint, import.tail_state) << "there is nothing to copy";
  EXPECT_EQ(rows_of(plan), (std::vector<std::pair<int64_t, int32_t>>{{2, 1}, {3, 40}}));
  EXPECT_EQ(plan.num_decode_rows, 1);
  for (size_t block = 0; block < 4; ++block) EXPECT_EQ(plan.appends[block].place, import.blocks[block]);
  h.apply(plan);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 2u);
  EXPECT_EQ(h.scheduler.gauges().imported_blocks, 4);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// By one that is served before it; and when its sequence is cancelled.
TEST_P(Handover, ATailIsGivenUpForPagesThatAreNeeded) {
  SchedulerConfig tight = config();
  tight.num_pages = 8 + 2 * state_pages();
  tight.max_model_len = 500;
  tight.admission_reserve = nullptr;
  SchedulerHarness h(tight);
  const SequenceId a = submit_remote(h, 2, tokens_from(0, 200));
  only_import(h);
  h.scheduler.end_import(a, ImportEnd::kArrived);
  h.scheduler.submit(request(1, tokens_from(7000, 490)));
  const StepPlan plan = h.plan();
  EXPECT_EQ(rows_of(plan).front().first, 1) << "it needs all eight pages, one of which is the tail's";
  h.apply(plan);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 2u);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);

  const SequenceId b = submit_remote(h, 3, tokens_from(3000, 200));
  only_import(h);
  h.scheduler.end_import(b, ImportEnd::kArrived);
  h.scheduler.cancel({b, FinishReason::kCancelled});
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// The blocks before the tail went: without them it is of no use.
TEST_P(Handover, ATailWithoutItsPrefixIsNone) {
  SchedulerHarness h(config());
  const SequenceId a = submit_remote(h, 1, tokens_from(0, 200));
  only_import(h);
  h.scheduler.end_import(a, ImportEnd::kArrived);
  h.scheduler.drop_prefix_cache();
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts[0].num_cached_tokens, 0);
  h.scheduler.check_integrity();
  h.apply(plan);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 2u);
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// From the tail, or else from the checkpoint: the other may be missing. Only what arrived is a hit of the next one.
TEST_P(Handover, ASequenceStartsFromWhatHasArrived) {
  struct Case {
    ImportEnd end;
    bool has_tail, has_checkpoint;
  };
  for (const auto& [end, has_tail, has_checkpoint] :
       {Case{ImportEnd::kArrived, true, true}, Case{ImportEnd::kWithoutTail, false, true},
        Case{ImportEnd::kWithoutCheckpoint, true, false}}) {
    SCOPED_TRACE(static_cast<int>(end));
    SchedulerHarness h(config());
    const SequenceId a = submit_remote(h, 1, tokens_from(0, 200));
    const Import import = only_import(h);
    EXPECT_EQ(import.sequence, a);
    EXPECT_EQ(import.first_block, 0);
    EXPECT_EQ(std::ssize(import.blocks), 4);
    EXPECT_EQ(std::ssize(import.checkpoint), state_pages());
    EXPECT_EQ(h.scheduler.gauges().awaiting, 1);
    EXPECT_FALSE(h.scheduler.idle());
    h.scheduler.end_import(a, end);
    h.scheduler.check_integrity();
    const StepPlan plan = h.plan();
    ASSERT_EQ(plan.starts.size(), 1u);
    const int32_t num_cached = has_tail ? 199 : 192;
    EXPECT_EQ(plan.starts[0].num_cached_tokens, num_cached);
    EXPECT_EQ(plan.starts[0].checkpoint, has_tail ? import.tail_state : import.checkpoint);
    EXPECT_EQ(rows_of(plan), (std::vector<std::pair<int64_t, int32_t>>{{1, 200 - num_cached}}));
    const auto num_blocks = static_cast<size_t>(has_tail ? 4 : 3);
    for (size_t block = 0; block < num_blocks; ++block) EXPECT_EQ(plan.appends[block].place, import.blocks[block]);
    h.apply(plan);
    h.run_to_end();
    EXPECT_EQ(h.outcomes[a].ids.size(), 2u);
    EXPECT_EQ(h.scheduler.gauges().imported_blocks, num_blocks);
    EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
    h.submit({.prompt = tokens_from(0, 200)});
    EXPECT_EQ(h.plan().starts[0].num_cached_tokens, GetParam() && !has_checkpoint ? 0 : 192);
  }
}

TEST_P(Handover, BlocksThatAreCachedHereAreNotImported) {
  SchedulerHarness h(config());
  h.scheduler.submit(request(1, tokens_from(0, 200), 1));
  run(h, SequenceId(1));
  submit_remote(h, 2, tokens_from(0, 200));
  const StepPlan same = h.plan();
  EXPECT_EQ(same.starts[0].num_cached_tokens, 192) << "the prompt is here";
  ASSERT_EQ(h.scheduler.take_imports(), (std::vector<Import>{{.sequence = SequenceId(2)}})) << "and an empty import";
  h.apply(same);
  h.run_to_end();

  const SequenceId longer = submit_remote(h, 3, tokens_from(0, 400));
  const Import import = only_import(h);
  EXPECT_EQ(import.first_block, 3);
  EXPECT_EQ(std::ssize(import.blocks), 4);
  h.scheduler.end_import(longer, ImportEnd::kArrived);
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 399);
}

TEST_P(Handover, WhatDoesNotArriveIsComputedOrFails) {
  SchedulerHarness h(config());
  const SequenceId a = submit_remote(h, 1, tokens_from(0, 200));
  only_import(h);
  h.scheduler.end_import(a, ImportEnd::kRecompute);
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  const StepPlan plan = h.plan();
  EXPECT_EQ(plan.starts[0].num_cached_tokens, 0);
  h.apply(plan);
  h.run_to_end();
  EXPECT_EQ(h.outcomes[a].ids.size(), 2u);

  const SequenceId b = submit_remote(h, 2, tokens_from(9000, 200));
  only_import(h);
  h.scheduler.end_import(b, ImportEnd::kFail, "the peer is gone");
  h.collect();
  EXPECT_EQ(h.outcomes[b].finish, FinishReason::kError);
  EXPECT_EQ(h.outcomes[b].error, "the peer is gone");
  EXPECT_TRUE(h.scheduler.idle());
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  EXPECT_EQ(h.scheduler.gauges().failed_imports, 2);
}

// INV-14.
TEST_P(Handover, PagesRestUntilTheTransferHasEnded) {
  SchedulerHarness h(config());
  const SequenceId a = submit_remote(h, 1, tokens_from(0, 200));
  const Import import = only_import(h);
  const int32_t used = h.scheduler.gauges().used_pages;
  EXPECT_EQ(used, 4 + 2 * state_pages());
  h.scheduler.cancel({a, FinishReason::kCancelled});
  h.collect();
  h.scheduler.check_integrity();
  EXPECT_EQ(h.outcomes[a].finish, FinishReason::kCancelled);
  EXPECT_EQ(h.scheduler.gauges().used_pages, used);
  h.scheduler.end_import(a, ImportEnd::kArrived);
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
  h.submit({.prompt = tokens_from(0, 200)});
  EXPECT_EQ(h.plan().starts[0].num_cached_tokens, 0) << "a cancelled import is no hit";
}

TEST_P(Handover, ADeadlineEndsOneThatAwaits) {
  SchedulerHarness h(config());
  Submit submit = request(1, tokens_from(0, 200), 2);
  submit.remote_blocks = 3;
  submit.deadline_s = 5;
  h.scheduler.submit(submit);
  only_import(h);
  h.now_s = 6;
  EXPECT_FALSE(h.has_plan());
  h.collect();
  EXPECT_EQ(h.outcomes[SequenceId(1)].finish, FinishReason::kDeadline);
  h.scheduler.end_import(SequenceId(1), ImportEnd::kRecompute);
  h.scheduler.check_integrity();
  EXPECT_EQ(h.scheduler.gauges().used_pages, 0);
}

// Two of one prompt, and one whose pool has no room for both: nobody waits for ever.
TEST_P(Handover, ImportsOfOnePromptAndAFullPool) {
  SchedulerConfig tight = config();
  tight.num_pages = 8 + 2 * state_pages();
  tight.max_model_len = 500;
  SchedulerHarness h(tight);
  submit_remote(h, 1, tokens_from(0, 400));
  submit_remote(h, 2, tokens_from(0, 400));
  std::vector<Import> begun;
  for (int i = 0; i < 200 && !h.scheduler.idle(); ++i) {
    for (std::optional<StepPlan> plan = h.scheduler.next_plan(1); plan; plan = h.scheduler.next_plan(1)) h.apply(*plan);
    for (const Import& import : h.scheduler.take_imports())
      if (!import.empty()) h.scheduler.end_import(import.sequence, ImportEnd::kArrived);
    h.scheduler.check_integrity();
  }
  h.collect();
  EXPECT_TRUE(h.scheduler.idle());
  EXPECT_EQ(h.outcomes[SequenceId(1)].ids.size(), 2u);
  EXPECT_EQ(h.outcomes[SequenceId(2)].ids.size(), 2u);
}

// Two sequences have their block at index 0: blocks of an import that came first would leave too little there for its
// state, which needs as much at every index.
TEST(HandoverDcp, AnImportTakesItsStateBeforeItsBlocks) {
  SchedulerConfig config = hybrid_config();
  config.dcp_size = 2;
  config.num_pages = 13;
  config.max_model_len = 450;
  config.admission_reserve = nullptr;
  SchedulerHarness h(config);
  for (int64_t id = 1; id <= 3; ++id) {
    h.scheduler.submit(request(id, tokens_from(100 * static_cast<int32_t>(id), 10), 50));
    h.apply(h.plan());
  }
  h.scheduler.cancel({.sequence = SequenceId(2)});
  h.apply(h.plan());
  submit_remote(h, 4, tokens_from(1000, 6 * kBlockTokens + 1));
  h.apply(h.plan());
  const std::vector<Import> imports = h.scheduler.take_imports();
  ASSERT_EQ(imports.size(), 1u);
  EXPECT_EQ(imports[0].blocks.size(), 6u);
  EXPECT_EQ(imports[0].checkpoint.size(), 6u);
  h.scheduler.check_integrity();
}

}  // namespace
}  // namespace perigee

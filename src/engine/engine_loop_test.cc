// The engine's loop against hands that a test holds: who hears what, how often, and when nothing comes back.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "base/clock.h"
#include "engine/engine_testing.h"

namespace perigee {
namespace {

class EngineLoop : public testing::Test {
 protected:
  void answer_at_once() {
    hands->on_plan = [this](const StepPlan& plan) { hands->answer(plan); };
  }
  std::shared_ptr<Hands> hands = std::make_shared<Hands>();
};

TEST_F(EngineLoop, ARequestFromSubmissionToItsEnd) {
  answer_at_once();
  const auto engine = engine_with(hands);
  Chunks chunks;
  const double before_s = system_clock().now_s();
  ASSERT_TRUE(engine->submit(request_for(5), chunks.sink()).ok());
  ASSERT_TRUE(chunks.wait());
  EXPECT_EQ(chunks.choice().ids, std::vector<int32_t>(5, 7));
  EXPECT_EQ(chunks.choice().finish, FinishReason::kLength);
  EXPECT_EQ(chunks.choice().error, "");
  EXPECT_GE(chunks.choice().scheduled_s, before_s);
  EXPECT_EQ(hands->num_plans(), 5);
  ASSERT_TRUE(eventually([&] { return engine->stats().steps == 5; }));
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.step_tokens.tokens, 3 + 4);
  EXPECT_EQ(stats.step_tokens.steps[0], 4) << "of one token";
  EXPECT_EQ(stats.step_tokens.steps[1], 1) << "the prompt";
  EXPECT_GE(stats.last_step_s, before_s);
  EXPECT_EQ(stats.scheduler.generated_tokens, 5);
}

// Of few steps as of many: the time that building a batch is said to take outweighs all that is measured here.
TEST_F(EngineLoop, TheHostTimeOfAStepIsAMean) {
  hands->build_us = 1e12;
  answer_at_once();
  const auto engine = engine_with(hands);
  EXPECT_EQ(engine->stats().host_step_us, 0);
  for (const int32_t tokens : {3, 100}) {
    Chunks chunks;
    const int64_t before = engine->stats().steps;
    ASSERT_TRUE(engine->submit(request_for(tokens), chunks.sink()).ok());
    ASSERT_TRUE(eventually([&] { return engine->stats().steps == before + tokens; }));
    ASSERT_TRUE(chunks.wait()) << "a step counts before its updates are delivered";
    EXPECT_NEAR(engine->stats().host_step_us, 1e12, 1e11);
  }
}

TEST_F(EngineLoop, ChoicesHaveSeedsOfTheirOwn) {
  answer_at_once();
  const auto engine = engine_with(hands);
  Chunks chunks;
  EngineRequest request = request_for(2, 3);
  request.sampling.seed = 40;
  ASSERT_TRUE(engine->submit(request, chunks.sink()).ok());
  ASSERT_TRUE(chunks.wait(3));
  EXPECT_EQ(hands->seeds(), (std::map<int64_t, uint64_t>{{0, 40}, {1, 41}, {2, 42}}));
}

// The second choice is planned when the first one's prompt has been computed.
TEST_F(EngineLoop, ARequestIsScheduledWithItsFirstChoice) {
  const auto engine = engine_with(hands);
  Chunks chunks;
  ASSERT_TRUE(engine->submit(request_for(2, 2), chunks.sink()).ok());
  const StepPlan leader = hands->next();
  const double planned_s = system_clock().now_s();
  hands->answer(leader);
  ASSERT_TRUE(hands->answer_until([&] { return chunks.num_finished() >= 2; }));
  EXPECT_LE(chunks.choice(0).scheduled_s, planned_s);
  EXPECT_LE(chunks.choice(1).scheduled_s, planned_s);
}

TEST_F(EngineLoop, CancellingOneChoiceLeavesTheOthers) {
  const auto engine = engine_with(hands);
  Chunks chunks;
  const auto id = engine->submit(request_for(3, 3), chunks.sink());
  ASSERT_TRUE(id.ok());
  const StepPlan leader = hands->next();
  engine->cancel(*id, 0, FinishReason::kStop);
  ASSERT_TRUE(chunks.wait());
  EXPECT_EQ(chunks.choice(0).finish, FinishReason::kStop);
  EXPECT_FALSE(chunks.choice(1).finish) << "they waited for the leader's prompt, and now go on without it";
  EXPECT_FALSE(chunks.choice(2).finish);
  engine->cancel(*id, 0);  // ended
  engine->cancel(*id, 3);  // unknown
  engine->cancel(RequestId(99));
  hands->answer(leader);
  ASSERT_TRUE(hands->answer_until([&] { return chunks.num_finished() >= 3; }));
  for (const int32_t i : {1, 2}) {
    EXPECT_EQ(chunks.choice(i).ids.size(), 3u);
    EXPECT_EQ(chunks.choice(i).finish, FinishReason::kLength);
  }
  EXPECT_TRUE(chunks.choice(0).ids.empty()) << "the leader's row came after its end";
}

TEST_F(EngineLoop, CancellingARequestEndsEveryChoiceAndNothingElse) {
  const auto engine = engine_with(hands);
  Chunks gone, stays;
  const auto id = engine->submit(request_for(100, 2), gone.sink());
  ASSERT_TRUE(engine->submit(request_for(1), stays.sink()).ok());
  engine->cancel(*id);
  ASSERT_TRUE(gone.wait(2));
  EXPECT_EQ(gone.choice(0).finish, FinishReason::kCancelled);
  EXPECT_EQ(gone.choice(1).finish, FinishReason::kCancelled);
  ASSERT_TRUE(hands->answer_until([&] { return stays.num_finished() >= 1; }));
  EXPECT_EQ(stays.choice().finish, FinishReason::kLength);
}

TEST_F(EngineLoop, WhatWasRefusedOrHasEndedTakesNoPlace) {
  EngineConfig config;
  config.rank.limits.max_sequences = 2;
  config.max_waiting = 2;
  const auto engine = engine_with(hands, config);
  ASSERT_EQ(engine->max_choices(), 4);
  for (int round = 0; round < 3; ++round) {
    Chunks chunks, refused;
    ASSERT_TRUE(engine->submit(request_for(1, 3), chunks.sink()).ok()) << "round " << round;
    for (int i = 0; i < 5; ++i) {
      const auto over = engine->submit(request_for(1, 2), refused.sink());
      ASSERT_FALSE(over.ok());
      EXPECT_EQ(over.error().code, Code::kExhausted);
    }
    ASSERT_TRUE(engine->submit(request_for(1, 1), refused.sink()).ok()) << "there is room for exactly one";
    ASSERT_TRUE(hands->answer_until([&] { return chunks.num_finished() + refused.num_finished() >= 4; }));
    EXPECT_EQ(refused.num_finished(), 1);
    // The place of a choice is free when its sink has returned.
    Chunks all;
    ASSERT_TRUE(eventually([&] { return engine->submit(request_for(1, 4), all.sink()).ok(); })) << "round " << round;
    ASSERT_TRUE(hands->answer_until([&] { return all.num_finished() >= 4; }));
    Chunks probe;
    ASSERT_TRUE(eventually([&] { return engine->submit(request_for(1, 4), probe.sink()).ok(); }));
    ASSERT_TRUE(hands->answer_until([&] { return probe.num_finished() >= 4; }));
    ASSERT_TRUE(eventually([&] { return engine->stats().scheduler.running == 0; }));
  }
}

TEST_F(EngineLoop, WhatCanNeverFitIsRefused) {
  EngineConfig config;
  config.scheduling.max_model_len = 100;
  config.rank.limits.max_sequences = 3;
  config.max_waiting = 0;
  const auto engine = engine_with(hands, config);
  EXPECT_EQ(engine->max_model_len(), 100);
  Chunks never;
  const auto too_long = engine->submit(request_for(98), never.sink());
  ASSERT_FALSE(too_long.ok());
  EXPECT_EQ(too_long.error().code, Code::kBadInput);
  EXPECT_NE(too_long.error().message.find("100"), std::string::npos) << too_long.error().message;
  const auto too_many = engine->submit(request_for(1, 4), never.sink());
  ASSERT_FALSE(too_many.ok());
  EXPECT_EQ(too_many.error().field, "n");
  Chunks fits;
  ASSERT_TRUE(engine->submit(request_for(97), fits.sink()).ok()) << "exactly";
  ASSERT_TRUE(eventually([&] { return hands->num_plans() > 0; }));
  engine->shutdown();
  EXPECT_EQ(fits.num_finished(), 1);
  EXPECT_EQ(never.num_finished(), 0);
}

// A deadline passes before anything was planned: also while the hands hold both plans.
TEST_F(EngineLoop, DeadlinesEndWhatWaitsAndWhatRuns) {
  const auto engine = engine_with(hands);
  Chunks late, runs;
  EngineRequest request = request_for(5);
  request.timeout_s = 1e-9;
  ASSERT_TRUE(engine->submit(request, late.sink()).ok());
  ASSERT_TRUE(late.wait());
  EXPECT_EQ(late.choice().finish, FinishReason::kDeadline);
  EXPECT_EQ(late.choice().scheduled_s, 0) << "never";
  EXPECT_EQ(hands->num_plans(), 0);
  request = request_for(100);
  request.timeout_s = 0.05;
  ASSERT_TRUE(engine->submit(request, runs.sink()).ok());
  ASSERT_TRUE(runs.wait()) << "no result comes, and yet it ends";
  EXPECT_EQ(runs.choice().finish, FinishReason::kDeadline);
}

// Time without requests is not a stall. `progress` is when the engine last did, or had, nothing to do.
TEST_F(EngineLoop, IdleTimeIsNoStallAndAHangIsOne) {
  answer_at_once();
  const auto engine = engine_with(hands);
  Chunks first;
  ASSERT_TRUE(engine->submit(request_for(1), first.sink()).ok());
  ASSERT_TRUE(first.wait());
  EXPECT_EQ(engine->stats().scheduler.running, 0);
  // The next request ends by its deadline before it is planned, so no step tells that the engine is alive; and its sink
  // holds the engine's thread for as long as the test looks.
  const double before_s = system_clock().now_s();
  std::promise<void> entered, leave;
  EngineRequest request = request_for(1);
  request.timeout_s = 1e-9;
  ASSERT_TRUE(engine
                  ->submit(request,
                           [&](OutputChunk&&) {
                             entered.set_value();
                             leave.get_future().wait();
                           })
                  .ok());
  entered.get_future().wait();
  const EngineStats held = engine->stats();
  EXPECT_GE(held.now_s - held.stalled_s, before_s) << "what lies before the request does not count";
  EXPECT_TRUE(eventually([&] { return engine->stats().stalled_s > held.stalled_s; })) << "but a thread that hangs does";
  leave.set_value();
  ASSERT_TRUE(eventually([&] { return engine->stats().stalled_s == 0; })) << "nothing is in flight";
}

TEST_F(EngineLoop, StatsMayBeReadAtAnyTime) {
  answer_at_once();
  const auto engine = engine_with(hands);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    int64_t steps = 0;
    while (!done) {
      const EngineStats stats = engine->stats();
      EXPECT_GE(stats.steps, steps);
      int64_t counted = 0;
      for (const int64_t in_bucket : stats.step_tokens.steps) counted += in_bucket;
      EXPECT_EQ(counted, stats.steps) << "of one moment";
      steps = stats.steps;
    }
  });
  Chunks chunks[8];
  for (Chunks& request : chunks) ASSERT_TRUE(engine->submit(request_for(200), request.sink()).ok());
  for (const Chunks& request : chunks) EXPECT_TRUE(request.wait());
  done = true;
  reader.join();
}

// The loss is reported from within the second plan's submission, so that the engine finds the first plan's result, the
// loss and a new request in its mailbox at once.
TEST_F(EngineLoop, ALostDeviceEndsAllAfterTheTokensBeforeIt) {
  Chunks running, queued, choices;
  std::string why;
  std::atomic<bool> told{false};
  EngineConfig config;
  config.on_device_lost = [&](const std::string& reason) {
    why = reason;
    EXPECT_EQ(running.num_finished(), 1) << "every choice has got its error before";
    told = true;
  };
  std::unique_ptr<Engine> engine;
  std::optional<StepPlan> first;
  std::atomic<bool> ready{false};
  hands->on_plan = [&](const StepPlan& plan) {
    while (!ready) std::this_thread::yield();
    if (!first) {
      first = plan;
      return;
    }
    hands->answer(*first, 5);
    hands->lose_device(plan);
    EXPECT_TRUE(engine->submit(request_for(4, 2), choices.sink()).ok()) << "nobody knows yet";
  };
  engine = engine_with(hands, config);
  ASSERT_TRUE(engine->submit(request_for(10), running.sink()).ok());
  ready = true;
  ASSERT_TRUE(running.wait());
  EXPECT_EQ(running.choice().ids, std::vector<int32_t>{5}) << "the token that came before the loss";
  EXPECT_EQ(running.choice().finish, FinishReason::kError);
  EXPECT_NE(running.choice().error.find("device_lost"), std::string::npos) << running.choice().error;
  ASSERT_TRUE(choices.wait(2)) << "whoever came too late to be refused";
  EXPECT_EQ(choices.choice(1).finish, FinishReason::kError);
  ASSERT_TRUE(eventually([&] { return told.load(); }));
  EXPECT_EQ(why, "a test");
  const auto refused = engine->submit(request_for(1), queued.sink());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kDeviceLost);
  engine->shutdown();
  EXPECT_EQ(hands->num_plans(), 2) << "nothing is sent to a device that is lost";
  EXPECT_EQ(queued.num_finished(), 0);
}

// Both plans are in flight and never return.
TEST_F(EngineLoop, ShutdownAnswersWhatIsInFlightAndWhatWaits) {
  EngineConfig config;
  config.rank.limits.max_sequences = 1;
  const auto engine = engine_with(hands, config);
  Chunks runs, waits;
  ASSERT_TRUE(engine->submit(request_for(50), runs.sink()).ok());
  ASSERT_TRUE(engine->submit(request_for(50, 3), waits.sink()).ok());
  ASSERT_TRUE(eventually([&] { return hands->num_plans() == 2; }));
  hands->answer(hands->next());
  ASSERT_TRUE(eventually([&] { return runs.choice().ids.size() == 1; }));
  engine->shutdown();
  EXPECT_EQ(runs.choice().finish, FinishReason::kError);
  EXPECT_EQ(runs.choice().ids.size(), 1u);
  EXPECT_EQ(waits.num_finished(), 3) << "when shutdown() returns, all have heard";
  EXPECT_NE(waits.choice(2).error.find("shutting down"), std::string::npos) << waits.choice(2).error;
  Chunks never;
  const auto refused = engine->submit(request_for(1), never.sink());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kUnavailable);
  engine->cancel(RequestId(0));  // into a closed mailbox
  engine->shutdown();            // again
}

// A sink holds the engine's thread until the loop is told to stop, so that it ends with a full mailbox.
TEST_F(EngineLoop, ShutdownAnswersWhatLiesInTheMailbox) {
  answer_at_once();
  const auto engine = engine_with(hands);
  std::promise<void> entered, leave;
  ASSERT_TRUE(engine
                  ->submit(request_for(1),
                           [&](OutputChunk&&) {
                             entered.set_value();
                             leave.get_future().wait();
                           })
                  .ok());
  entered.get_future().wait();
  Chunks late, never;
  ASSERT_TRUE(engine->submit(request_for(1, 2), late.sink()).ok());
  std::thread end([&] { engine->shutdown(); });
  EXPECT_TRUE(eventually([&] {  // what can never fit is refused as such until then
    return engine->submit(request_for(1 << 20), never.sink()).error().code == Code::kUnavailable;
  }));
  leave.set_value();
  end.join();
  EXPECT_EQ(late.num_finished(), 2);
  EXPECT_NE(late.choice(1).error.find("shutting down"), std::string::npos) << late.choice(1).error;
}

TEST_F(EngineLoop, TheRanksHaveTheEnginesLimits) {
  EngineConfig config;
  config.rank.limits.max_sequences = 5;
  config.rank.limits.max_step_tokens = 700;
  for (const bool deterministic : {false, true}) {
    config.rank.limits.deterministic = deterministic;
    const auto engine = Engine::create(config, [&](const EngineConfig& made, OnStep) {
      EXPECT_EQ(made.rank.limits.max_sequences, 5);
      EXPECT_EQ(made.rank.limits.max_step_tokens, 700);
      EXPECT_EQ(made.rank.limits.deterministic, deterministic);
      return Result<std::unique_ptr<Executor>>(std::make_unique<NoRanks>(hands));
    });
    EXPECT_TRUE(engine.ok());
  }
}

TEST_F(EngineLoop, ACacheTooSmallForTheLengthIsNamed) {
  EngineConfig config;
  config.scheduling.max_model_len = 64 * 64 + 1;
  const auto engine = Engine::create(config, [&](const EngineConfig&, OnStep) {
    return Result<std::unique_ptr<Executor>>(std::make_unique<NoRanks>(hands));
  });
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.error().field, "max-model-len");
  EXPECT_NE(engine.error().message.find("4096"), std::string::npos) << engine.error().message;
}

}  // namespace
}  // namespace perigee

// Replies under a constraint, through a whole small engine.
#include <gtest/gtest.h>

#include "control/constraint_testing.h"
#include "engine/small_engine.h"

namespace perigee {
namespace {

int32_t vocab_of(const Engine& engine) {
  return static_cast<int32_t>(engine.model().vocab);
}

EngineRequest constrained_request(const Engine& engine, int32_t max_tokens, int32_t n = 1, int32_t at_least = 4) {
  EngineRequest request = request_of(5, max_tokens, n);
  const int32_t vocab = vocab_of(engine);
  request.sampling.temperature = 1;
  request.sampling.stop_ids = {vocab - 1};
  request.constraint = std::make_shared<SumConstraint>(vocab, vocab - 1, 0, at_least);
  return request;
}

void expect_obeys(const EngineRequest& request, const Reply& reply) {
  EXPECT_EQ(reply.error, "");
  EXPECT_EQ(reply.finish, FinishReason::kStop);
  EXPECT_EQ(static_cast<const SumConstraint&>(*request.constraint).first_fault(reply.ids), -1);
}

TEST(EngineConstraint, EveryChoiceObeysAndEndsInTime) {
  const auto engine = make_engine(small_config());
  for (const int32_t max_tokens : {5, 6, 14, 60}) {
    const EngineRequest request = constrained_request(*engine, max_tokens, 3);
    std::vector<std::vector<int32_t>> all;
    for (const auto& [choice, reply] : run(*engine, request)) {
      expect_obeys(request, reply);
      all.push_back(reply.ids);
    }
    EXPECT_NE(all[0], all[1]) << "each choice has a state of its own";
  }
}

TEST(EngineConstraint, TheModelsLengthBindsAsMaxTokensDoes) {
  EngineConfig config = small_config();
  config.scheduling.max_model_len = 20;
  const auto engine = make_engine(config);
  const EngineRequest request = constrained_request(*engine, 15);
  expect_obeys(request, run(*engine, request)[0]);
}

TEST(EngineConstraint, AUsersStopIdMayCutTheReply) {
  const auto engine = make_engine(small_config());
  EngineRequest request = constrained_request(*engine, 60);
  for (int32_t id = 0; id < vocab_of(*engine); id += 3) request.sampling.stop_ids.push_back(id);
  const Reply reply = run(*engine, request)[0];
  EXPECT_EQ(reply.finish, FinishReason::kStop);
  EXPECT_EQ(reply.ids.size(), 1u);
}

// A free request beside them gets what it gets alone.
TEST(EngineConstraint, OthersAreLeftAlone) {
  const auto engine = make_engine(small_config());
  const std::vector<int32_t> alone = run(*engine, request_of(7, 40))[0].ids;
  Replies constrained, free;
  const EngineRequest request = constrained_request(*engine, 60, 2, 30);
  ASSERT_TRUE(engine->submit(request, constrained.sink()).ok());
  ASSERT_TRUE(engine->submit(request_of(7, 40), free.sink()).ok());
  for (const auto& [choice, reply] : constrained.wait(2)) expect_obeys(request, reply);
  EXPECT_EQ(free.wait()[0].ids, alone);
}

TEST(EngineConstraint, ACancelledOneHoldsUpNobody) {
  const auto engine = make_engine(small_config());
  const EngineRequest request = constrained_request(*engine, 40, 1, 20);
  for (int round = 0; round < 20; ++round) {
    Replies cancelled, other;
    const auto id = engine->submit(request, cancelled.sink());
    ASSERT_TRUE(engine->submit(request, other.sink()).ok());
    engine->cancel(*id);
    EXPECT_EQ(cancelled.wait()[0].finish, FinishReason::kCancelled);
    expect_obeys(request, other.wait()[0]);
  }
}

TEST(EngineConstraint, DraftsAtGivenRatesAreRefused) {
  EngineConfig config = small_config();
  config.rank.limits.num_drafts = 1;
  config.rank.synthetic_rates = {0.5f};
  const auto engine = make_engine(config);
  const auto refused = engine->submit(constrained_request(*engine, 10), Replies().sink());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kBadInput);
}

// After its third id it allows nothing.
struct DeadEnd final : Constraint {
  struct State final : ConstraintState {
    bool accept(int32_t) override { return ++count <= 3; }
    void masks(std::span<const int32_t> drafts, int32_t, int64_t words, uint32_t* out) override {
      std::fill_n(out, words * (1 + std::ssize(drafts)), count < 3 ? ~0u : 0u);
    }
    int32_t count = 0;
  };
  std::unique_ptr<ConstraintState> begin() const override { return std::make_unique<State>(); }
  int32_t shortest() const override { return 1; }
};

TEST(EngineConstraint, ADeadEndEndsItsOwnRequest) {
  const auto engine = make_engine(small_config());
  EngineRequest request = request_of(5, 20);
  request.constraint = std::make_shared<DeadEnd>();
  Replies dead, free;
  ASSERT_TRUE(engine->submit(request, dead.sink()).ok());
  ASSERT_TRUE(engine->submit(request_of(5, 20), free.sink()).ok());
  const Reply reply = dead.wait()[0];
  EXPECT_EQ(reply.ids.size(), 3u);
  EXPECT_EQ(reply.finish, FinishReason::kError);
  EXPECT_EQ(reply.error, "the request's constraint allows no token to follow");
  EXPECT_EQ(free.wait()[0].ids.size(), 20u);
}

}  // namespace
}  // namespace perigee

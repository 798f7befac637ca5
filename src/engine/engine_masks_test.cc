// What an engine sends to the ranks of constrained requests, seen by hands without a model.
#include <gtest/gtest.h>

#include "engine/engine_testing.h"

namespace perigee {
namespace {

// Everything, always.
struct Anything final : Constraint {
  struct State final : ConstraintState {
    bool accept(int32_t) override { return true; }
    void masks(std::span<const int32_t> drafts, int32_t, int64_t words, uint32_t* out) override {
      std::fill_n(out, words * (1 + std::ssize(drafts)), ~0u);
    }
  };
  std::unique_ptr<ConstraintState> begin() const override { return std::make_unique<State>(); }
  int32_t shortest() const override { return 1; }
};

EngineRequest request_of(bool constrained) {
  EngineRequest request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(3, 7);
  request.sampling.max_tokens = 20;
  if (constrained) request.constraint = std::make_shared<Anything>();
  return request;
}

TEST(EngineMasks, OneMessageForEachStepWithMaskedRowsAndNoOther) {
  const auto hands = std::make_shared<Hands>();
  Chunks constrained, free;
  const auto engine = engine_with(hands);
  ASSERT_TRUE(engine->submit(request_of(false), free.sink()).ok());
  StepPlan plan = hands->next();
  EXPECT_FALSE(plan.rows[0].masked);
  ASSERT_TRUE(engine->submit(request_of(true), constrained.sink()).ok());
  int num_masked = 0;
  for (int step = 0; step < 10; ++step) {
    hands->answer(plan);
    plan = hands->next();
    const bool is_masked =
        std::any_of(plan.rows.begin(), plan.rows.end(), [](const PlanRow& row) { return row.masked; });
    num_masked += is_masked ? 1 : 0;
    // A rank has no result before it has its masks.
    ASSERT_TRUE(eventually([&] { return std::ssize(hands->masks()) >= num_masked; })) << num_masked;
  }
  EXPECT_GT(num_masked, 5);
  const std::vector<StepMasks> masks = hands->masks();
  for (size_t i = 0; i < masks.size(); ++i) {
    EXPECT_EQ(masks[i].rows.size(), 1u) << "of the constrained row alone";
    if (i > 0) {
      EXPECT_GT(masks[i].step, masks[i - 1].step);
    }
  }
}

TEST(EngineMasks, ConstrainedRowsVerifyDraftsAsFreeOnesDo) {
  EngineConfig config;
  config.rank.limits.num_drafts = 3;
  const auto hands = std::make_shared<Hands>();
  Chunks constrained, free;
  const auto engine = engine_with(hands, config);
  ASSERT_TRUE(engine->submit(request_of(true), constrained.sink()).ok());
  ASSERT_TRUE(engine->submit(request_of(false), free.sink()).ok());
  int num_free = 0, num_constrained = 0;  // rows that verify drafts
  for (int step = 0; step < 8; ++step) {
    const StepPlan plan = hands->next();
    for (const PlanRow& row : plan.rows) (row.masked ? num_constrained : num_free) += row.num_drafts() > 0 ? 1 : 0;
    hands->answer(plan);
  }
  EXPECT_GT(num_free, 2);
  EXPECT_GT(num_constrained, 2);
}

}  // namespace
}  // namespace perigee

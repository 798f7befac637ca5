// A step allocates nothing, on any thread: the engine's loop with scheduler and mailbox, the ranks' phases, and the way
// back to the sinks. That holds for sequences that decode, once memory has grown to its size. What does allocate: what
// control/step_allocations_test.cc lists, and what a sink takes out of its chunk (here it only reads).
// And a submission that finds no memory takes no place.
#include <gtest/gtest.h>

#include <future>

#include "base/test_allocations.h"
#include "engine/engine_testing.h"
#include "engine/small_engine.h"

namespace perigee {
namespace {

struct Load {
  int32_t sequences = 0, prompt = 0;
};

// What the engine allocates while each sequence gets its tokens [from, to).
int64_t allocations_while_decoding(Engine& engine, const Load& load, int32_t from, int32_t to) {
  std::promise<void> all_submitted, done;
  std::atomic<int> num_finished{0};
  int32_t num_tokens = 0;
  int64_t num_chunks = 0, before = 0, after = 0;
  const auto leader = [&](OutputChunk&& chunk) {
    if (num_tokens == 0) all_submitted.get_future().wait();
    if (num_tokens == from) before = num_allocations();
    if (num_tokens == to) after = num_allocations();
    num_tokens += static_cast<int32_t>(chunk.ids.size());
    if (chunk.finish && ++num_finished == load.sequences) done.set_value();
  };
  const auto other = [&](OutputChunk&& chunk) {
    if (num_tokens > from && num_tokens <= to) ++num_chunks;
    if (chunk.finish && ++num_finished == load.sequences) done.set_value();
  };
  for (int i = 0; i < load.sequences; ++i) {
    const EngineRequest request = request_of(load.prompt, to + 2 * kMaxPlansInFlight);  // none ends while it is looked
    const auto id = i == 0 ? engine.submit(request, leader) : engine.submit(request, other);
    CHECK(id.ok(), id.error().message);
  }
  all_submitted.set_value();
  CHECK(done.get_future().wait_for(kHangLimit) == std::future_status::ready, "no end");
  CHECK(num_chunks == int64_t{load.sequences - 1} * (to - from), "not all decode: ", num_chunks, " chunks");
  return after - before;
}

// Answers each plan at once, on the engine's thread.
class InstantRanks final : public Executor {
 public:
  explicit InstantRanks(OnStep on_step) : on_step_(std::move(on_step)) {}
  void submit(Step step) override {
    step.result.begin(step.plan);
    for (size_t i = 0; i < step.plan.rows.size(); ++i)
      if (step.plan.rows[i].samples()) step.result.rows[i].ids.push_back(7);
    on_step_(std::move(step));
  }
  void set_masks(StepMasks) override {}
  const ModelInfo& model() const override { return model_; }
  int32_t num_pages() const override { return 4096; }
  int32_t state_pages() const override { return 0; }
  double last_build_us() const override { return 0; }

 private:
  const ModelInfo model_ = {.max_positions = 4096};
  const OnStep on_step_;
};

TEST(StepAllocations, NoneOfTheEngine) {
  EngineConfig config;
  config.rank.limits.max_sequences = 64;
  auto engine = Engine::create(config, [](const EngineConfig&, OnStep on_step) {
    return Result<std::unique_ptr<Executor>>(std::make_unique<InstantRanks>(std::move(on_step)));
  });
  ASSERT_TRUE(engine.ok());
  EXPECT_EQ(allocations_while_decoding(**engine, {.sequences = 64, .prompt = 70}, 20, 900), 0);
}

struct RanksCase {
  const char* model;
  int32_t num_ranks;
};
class StepAllocationsOfRanks : public testing::TestWithParam<RanksCase> {};
INSTANTIATE_TEST_SUITE_P(Kinds, StepAllocationsOfRanks,
                         testing::Values(RanksCase{"heads16", 1}, RanksCase{"kimi_linear", 1},
                                         RanksCase{"kimi_linear", 2}));

// CPU ranks with models of their own; each sequence gets a new block meanwhile. (The ref backend allocates its
// tensors.)
TEST_P(StepAllocationsOfRanks, None) {
  EngineConfig config = small_config(GetParam().model);
  config.rank.limits.max_sequences = 8;
  config.rank.limits.max_step_tokens = 512;
  config.rank.device = Device::kCpu;
  config.rank.size = GetParam().num_ranks;
  config.rank.load.num_threads = 2;
  config.rank.cache_bytes = 64 << 20;
  config.rank_timeouts.behind_s = 1e6;
  config.scheduling.checkpoint_interval_blocks = config.scheduling.checkpoint_rolling_blocks = 0;
  EXPECT_EQ(allocations_while_decoding(*make_engine(config), {.sequences = 8, .prompt = 50}, 12, 30), 0);
}

// The engine's thread is held, so that the mailbox has to grow.
TEST(EngineMemory, ASubmissionWithoutMemoryTakesNoPlace) {
  EngineConfig config;
  config.rank.limits.max_sequences = 1;
  config.max_waiting = 99;
  std::promise<void> entered, leave;  // before the engine, whose thread may still use them when this one is done
  const auto hold = [&, left = leave.get_future().share()](OutputChunk&&) {
    entered.set_value();
    left.wait();
  };
  const auto engine = engine_with(std::make_shared<Hands>(), config);
  EngineRequest holder = request_for(1);
  holder.timeout_s = 1e-9;
  ASSERT_TRUE(engine->submit(holder, hold).ok());
  entered.get_future().wait();
  const auto ignore = [](OutputChunk&&) {};
  int num_accepted = 0, num_failed = 0;
  for (int i = 0; i < 50; ++i) {
    EngineRequest request = request_for(1);
    const FailingAllocations failing(0, 1);
    try {
      num_accepted += engine->submit(std::move(request), ignore).ok() ? 1 : 0;
    } catch (const std::bad_alloc&) {
      ++num_failed;
    }
  }
  EXPECT_GT(num_failed, 0);
  EXPECT_EQ(num_accepted + num_failed, 50);
  const int32_t free = engine->max_choices() - 1 - num_accepted;
  EXPECT_TRUE(engine->submit(request_for(1, free), ignore).ok());
  EXPECT_EQ(engine->submit(request_for(1), ignore).error().code, Code::kExhausted);
  leave.set_value();
}

}  // namespace
}  // namespace perigee

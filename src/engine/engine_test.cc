#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine/engine_testing.h"
#include "engine/small_engine.h"

namespace perigee {
namespace {

// Every submission is refused, or its sink hears the end: also those that race with shutdown().
TEST(Engine, ShutdownAnswersEverySubmission) {
  for (int round = 0; round < 16; ++round) {
    const auto hands = std::make_shared<Hands>();
    hands->on_plan = [&](const StepPlan& plan) { hands->answer(plan); };
    const auto engine = engine_with(hands);
    std::atomic<int> accepted{0}, finished{0};
    const auto submit_until_refused = [&] {
      EngineRequest request;
      request.prompt = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{1, 2, 3});
      request.sampling.max_tokens = 4;
      const auto sink = [&](OutputChunk&& chunk) { finished += chunk.finish.has_value(); };
      for (;;) {
        const auto id = engine->submit(request, sink);
        accepted += id.ok();
        if (id.ok() || id.error().code == Code::kExhausted) continue;
        EXPECT_EQ(id.error().code, Code::kUnavailable);
        return;
      }
    };
    std::thread submitters[4];
    for (std::thread& thread : submitters) thread = std::thread(submit_until_refused);
    EXPECT_TRUE(eventually([&] { return accepted >= 32; }));
    engine->shutdown();
    for (std::thread& thread : submitters) thread.join();
    EXPECT_EQ(accepted, finished);
  }
}

TEST(Engine, WithoutAGpuTheWayOutIsNamed) {
  EngineConfig config;
  config.rank.device = Device::kCuda;
  config.rank.load.path = "tests/golden/heads16";
  config.rank.load.format = LoadFormat::kDummy;
  const auto engine = Engine::create(config);
  if (engine.ok()) GTEST_SKIP() << "here is a GPU";
  EXPECT_EQ(engine.error().field, "device");
  EXPECT_NE(engine.error().message.find("--device cpu"), std::string::npos) << engine.error().message;
}

// The queue and a step together hold six: as many at once, before any of them runs, are all answered.
TEST(Engine, AcceptsAsManyAtOnceAsItSays) {
  EngineConfig config = small_config();
  config.max_waiting = 2;
  const auto engine = make_engine(config);
  EngineRequest request;
  request.prompt = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{1, 2, 3});
  request.sampling.max_tokens = 4;
  request.n = 6;
  std::atomic<int> finished{0};
  std::string errors;  // of the engine's thread until all have finished
  const auto sink = [&](OutputChunk&& chunk) {
    errors += chunk.error;
    finished += chunk.finish.has_value();
  };
  ASSERT_TRUE(engine->submit(request, sink).ok());
  while (finished < 6) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(errors, "");
  request.n = 7;
  const auto never = engine->submit(request, sink);  // not even when it is idle
  ASSERT_FALSE(never.ok());
  EXPECT_EQ(never.error().code, Code::kBadInput);
  EXPECT_EQ(never.error().field, "n");
}

}  // namespace
}  // namespace perigee

// However a request ends, it is answered, and everything that it held is free again. On real models, for the
// sanitizers.
#include <future>

#include "harness.h"

namespace perigee {
namespace {

class EngineEnds : public testing::TestWithParam<TestModel> {};

TEST_P(EngineEnds, CancelAndDeadlineEndAndFreeEverything) {
  const auto engine = make_engine(base_config(GetParam()));
  Job job{.prompt = std::vector<int32_t>(500, 7), .max_tokens = 4000};
  Collector collector;
  EngineRequest request = request_of(job);
  request.sampling.logprobs = -1;
  const auto first = engine->submit(request, collector.sink(0));
  request.timeout_s = 0.2;
  ASSERT_TRUE(engine->submit(request, collector.sink(1)).ok());
  engine->cancel(*first);
  const std::vector<Reply> replies = collector.wait(2);
  EXPECT_EQ(replies[0].finish, FinishReason::kCancelled);
  EXPECT_EQ(replies[1].finish, FinishReason::kDeadline);
  for (int i = 0; i < 100 && engine->stats().scheduler.used_pages != 0; ++i) {
    Collector small;
    ASSERT_TRUE(engine->submit(request_of({.prompt = {1}, .max_tokens = 1}), small.sink(0)).ok());
    small.wait(1);
  }
  EXPECT_EQ(engine->stats().scheduler.used_pages, 0);
}

TEST_P(EngineEnds, RefusesWhatCannotFitAndAnswersAllAtShutdown) {
  EngineConfig config = base_config(GetParam());
  config.scheduling.max_model_len = 256;
  const auto engine = make_engine(config);
  Collector collector;
  const auto refused =
      engine->submit(request_of({.prompt = std::vector<int32_t>(250, 1), .max_tokens = 7}), collector.sink(9));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("256"), std::string::npos) << refused.error().message;
  ASSERT_TRUE(engine->submit(request_of({.prompt = {1, 2}, .max_tokens = 200}), collector.sink(0)).ok());
  auto ended = std::async(std::launch::async, [&] { engine->shutdown(); });
  CHECK(ended.wait_for(std::chrono::minutes(5)) == std::future_status::ready,
        "shutdown() has not returned after 5 minutes");
  EXPECT_EQ(collector.wait(1)[0].finish.has_value(), true);
}

INSTANTIATE_TEST_SUITE_P(, EngineEnds, testing::ValuesIn(on_all_devices()), name_of);

}  // namespace
}  // namespace perigee

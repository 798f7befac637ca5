// What a request asks reaches scheduler and ranks, and what they say comes back, through a whole small engine.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>
#include <stop_token>
#include <thread>

#include "base/manual_clock.h"
#include "engine/small_engine.h"

namespace perigee {
namespace {

constexpr int32_t kLong = 1000;  // tokens: more than any test waits for, and they fit the cache

TEST(EngineRequests, APromptIsCachedUnderItsSaltAlone) {
  const auto engine = make_engine(small_config());
  EngineRequest request = request_of(70, 2);
  EXPECT_EQ(run(*engine, request)[0].num_cached_tokens, 0);
  EXPECT_EQ(run(*engine, request)[0].num_cached_tokens, 64);
  request.cache_salt = "another";
  EXPECT_EQ(run(*engine, request)[0].num_cached_tokens, 0);
}

TEST(EngineRequests, WithoutPrefixCachingNothingIsCached) {
  EngineConfig config = small_config();
  config.scheduling.prefix_caching = false;
  const auto engine = make_engine(config);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(run(*engine, request_of(70, 2))[0].num_cached_tokens, 0);
}

TEST(EngineRequests, FurtherChoicesGoOnFromTheFirstOnesPrompt) {
  const auto engine = make_engine(small_config());
  const std::map<int32_t, Reply> replies = run(*engine, request_of(70, 2, 3));
  EXPECT_EQ(replies.at(0).num_cached_tokens, 0);
  EXPECT_EQ(replies.at(1).num_cached_tokens, 64);
  EXPECT_EQ(replies.at(2).num_cached_tokens, 64);
}

TEST(EngineRequests, RequestsWithSeveralChoicesRunBesideEachOther) {
  const auto engine = make_engine(small_config());
  Replies first, second;
  ASSERT_TRUE(engine->submit(request_of(5, 20, 2), first.sink()).ok());
  ASSERT_TRUE(engine->submit(request_of(5, 20, 2), second.sink()).ok());
  for (Replies* replies : {&first, &second})
    for (const auto& [choice, reply] : replies->wait(2)) EXPECT_EQ(reply.ids.size(), 20u) << "choice " << choice;
}

// The choices of one request are planned at different times; the request has one: that of its first.
TEST(EngineRequests, AllChunksHaveTheTimeOfTheFirstPlan) {
  const auto engine = make_engine(small_config());
  const double before_s = engine->stats().now_s;
  const std::map<int32_t, Reply> replies = run(*engine, request_of(70, 3, 2));
  const double scheduled_s = replies.at(0).scheduled_s.front();
  EXPECT_GE(scheduled_s, before_s);
  for (const auto& [choice, reply] : replies)
    for (const double chunk_s : reply.scheduled_s) EXPECT_EQ(chunk_s, scheduled_s) << "choice " << choice;
}

TEST(EngineRequests, TheStopIdThatEndedAChoiceIsNamed) {
  const auto engine = make_engine(small_config());
  EngineRequest request = request_of(5, 4);
  const int32_t first_id = run(*engine, request)[0].ids[0];
  request.sampling.stop_ids = {first_id};
  const Reply reply = run(*engine, request)[0];
  EXPECT_EQ(reply.finish, FinishReason::kStop);
  EXPECT_EQ(reply.stop_id, first_id);
  EXPECT_EQ(reply.ids, std::vector<int32_t>{first_id});
}

TEST(EngineRequests, ATimeoutCountsFromTheRequest) {
  const auto engine = make_engine(small_config());
  EngineRequest request = request_of(5, 3);
  request.timeout_s = 3600;
  EXPECT_EQ(run(*engine, request)[0].finish, FinishReason::kLength);
  request = request_of(5, kLong);
  request.timeout_s = 0.01;
  EXPECT_EQ(run(*engine, request)[0].finish, FinishReason::kDeadline);
}

// While the sink of the first request holds up the engine, two more are submitted: they arrive at once.
TEST(EngineRequests, TheLowerPriorityRunsFirst) {
  EngineConfig config = small_config();
  config.rank.limits.max_sequences = 1;
  const auto engine = make_engine(config);
  std::promise<void> submitted;
  std::atomic<bool> held{false};
  ASSERT_TRUE(engine
                  ->submit(request_of(5, 1),
                           [&, all = submitted.get_future().share()](OutputChunk&&) {
                             held = true;
                             all.wait();
                           })
                  .ok());
  ASSERT_TRUE(eventually([&] { return held.load(); }));
  std::vector<int32_t> order;  // of the engine's thread, until both have ended
  std::atomic<int> num_ended{0};
  for (const int32_t priority : {5, -5}) {
    EngineRequest request = request_of(5, 2);
    request.priority = priority;
    ASSERT_TRUE(engine
                    ->submit(request,
                             [&, priority](OutputChunk&& chunk) {
                               if (!chunk.finish) return;
                               order.push_back(priority);
                               ++num_ended;
                             })
                    .ok());
  }
  submitted.set_value();
  ASSERT_TRUE(eventually([&] { return num_ended == 2; }));
  EXPECT_EQ(order, (std::vector<int32_t>{-5, 5}));
}

// Both cancels arrive at once, before any choice can end by itself.
TEST(EngineRequests, OneChoiceCanEndForAReasonOfTheCaller) {
  const auto engine = make_engine(small_config());
  Replies replies;
  std::promise<void> cancelled;
  const auto id = engine->submit(request_of(5, kLong, 3),
                                 [sink = replies.sink(), all = cancelled.get_future().share()](OutputChunk&& chunk) {
                                   all.wait();
                                   sink(std::move(chunk));
                                 });
  ASSERT_TRUE(id.ok());
  engine->cancel(*id, 0, FinishReason::kStop);
  engine->cancel(*id);
  cancelled.set_value();
  const std::map<int32_t, Reply> ended = replies.wait(3);
  EXPECT_EQ(ended.at(0).finish, FinishReason::kStop);
  EXPECT_EQ(ended.at(1).finish, FinishReason::kCancelled);
  EXPECT_EQ(ended.at(2).finish, FinishReason::kCancelled);
}

TEST(EngineRequests, AFinishedRequestLetsItsSinkGo) {
  const auto engine = make_engine(small_config());
  auto held = std::make_shared<std::atomic<int>>(0);
  const std::weak_ptr<std::atomic<int>> watched = held;
  ASSERT_TRUE(engine->submit(request_of(5, 2, 2), [held](OutputChunk&&) { ++*held; }).ok());
  held = nullptr;
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
}

// What was refused for a full queue gives its places back.
TEST(EngineRequests, AQueueThatWasFullTakesRequestsAgain) {
  EngineConfig config = small_config();
  config.rank.limits.max_sequences = 1;
  config.max_waiting = 1;
  const auto engine = make_engine(config);
  for (int round = 0; round < 3; ++round) {
    Replies replies;
    std::optional<RequestId> id;
    const auto accepted = [&] {  // a choice counts until just after its sink has heard the end
      const Result<RequestId> submitted = engine->submit(request_of(5, kLong, 2), replies.sink());
      if (submitted.ok()) id = *submitted;
      return submitted.ok();
    };
    ASSERT_TRUE(eventually(accepted)) << "round " << round;
    const auto refused = engine->submit(request_of(5, 1), [](OutputChunk&&) { ADD_FAILURE(); });
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kExhausted);
    engine->cancel(*id);
    replies.wait(2);
  }
}

TEST(EngineRequests, ShutdownSaysWhy) {
  const auto engine = make_engine(small_config());
  Replies replies;
  ASSERT_TRUE(engine->submit(request_of(5, kLong), replies.sink()).ok());
  engine->shutdown();
  const Reply reply = replies.wait()[0];
  EXPECT_EQ(reply.finish, FinishReason::kError);
  EXPECT_NE(reply.error.find("shutting down"), std::string::npos) << reply.error;
}

// The steps before the loss give their tokens, nothing comes after it, and the owner is told once.
TEST(EngineRequests, ALostDeviceEndsEverything) {
  std::atomic<int> times_told{0};
  EngineConfig config = small_config();
  config.rank.fault.step = 3;  // the prompt, then two tokens more
  config.on_device_lost = [&](const std::string&) { ++times_told; };
  const auto engine = make_engine(config);
  const Reply reply = run(*engine, request_of(5, kLong))[0];
  EXPECT_EQ(reply.finish, FinishReason::kError);
  EXPECT_EQ(reply.ids.size(), 3u);
  EXPECT_NE(reply.error.find("device_lost"), std::string::npos) << reply.error;
  EXPECT_TRUE(eventually([&] { return times_told == 1; }));
  const auto refused = engine->submit(request_of(5, 1), [](OutputChunk&&) { ADD_FAILURE(); });
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kDeviceLost);
}

// After token t comes t + 1, at once.
class CountingModel final : public Model {
 public:
  explicit CountingModel(std::shared_ptr<std::atomic<int32_t>> num_forwards) : num_forwards_(std::move(num_forwards)) {
    info_.vocab = 2048;
    info_.max_positions = 4096;
  }
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat format) const override { return {CacheGroup::latent(1, 16, 0, format)}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }
  ModelOutput forward(const Batch& batch, Ops& ops, const PagePool&) const override {
    const Tensor logits = ops.arena().tensor(DType::kF32, std::ssize(batch.logit_rows), info_.vocab);
    for (int64_t i = 0; i < logits.rows; ++i) {
      const int32_t token = batch.tokens[static_cast<size_t>(batch.logit_rows[static_cast<size_t>(i)])];
      std::fill_n(logits.row<float>(i), info_.vocab, 0.0f);
      logits.row<float>(i)[(token + 1) % info_.vocab] = 1;
    }
    ++*num_forwards_;
    return {.logits = logits};
  }

 private:
  ModelInfo info_;
  const std::shared_ptr<std::atomic<int32_t>> num_forwards_;  // of all ranks
};

// Groups of ranks that each hold the whole model. tests/equality has them with real models.
class EngineOfReplicas : public testing::TestWithParam<int32_t> {
 protected:
  EngineOfReplicas() {
    config.rank.make_model = [count = num_forwards](Ops&) { return std::make_unique<CountingModel>(count); };
    config.rank.size = GetParam();
    config.rank_timeouts.behind_s = 0.1;
    config.rank_timeouts.end_s = 0.2;
    config.rank_timeouts.clock = &clock;
    config.selfcheck = true;  // compares what they sample
  }
  ManualClock clock;  // of the watch
  std::shared_ptr<std::atomic<int32_t>> num_forwards = std::make_shared<std::atomic<int32_t>>(0);
  EngineConfig config = small_config();
};
INSTANTIATE_TEST_SUITE_P(Sizes, EngineOfReplicas, testing::Values(2, 4));

TEST_P(EngineOfReplicas, AnswersLikeOne) {
  const auto engine = make_engine(config);
  const std::map<int32_t, Reply> replies = run(*engine, request_of(70, 20, 3));
  std::vector<int32_t> counted(20);
  std::iota(counted.begin(), counted.end(), 8);  // the prompt is sevens
  for (int32_t i = 0; i < 3; ++i) EXPECT_EQ(replies.at(i).ids, counted) << i;
}

TEST_P(EngineOfReplicas, OneThatFailsEndsEverything) {
  for (const RankFault::Mode mode : {RankFault::Mode::kError, RankFault::Mode::kHang}) {
    std::atomic<bool> told{false};
    config.rank.fault = {.rank = GetParam() - 1, .step = 3, .mode = mode};
    config.on_device_lost = [&](const std::string&) { told = true; };
    const auto engine = make_engine(config);
    *num_forwards = 0;
    // Where a rank hangs, the watch's time goes on only once the others have run that step.
    const std::jthread ticker([&](const std::stop_token& stop) {
      for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        if (*num_forwards >= 4 * GetParam() - 1) clock.advance(1);
    });
    Replies replies, more;
    ASSERT_TRUE(engine->submit(request_of(5, kLong), replies.sink()).ok());
    const auto other = engine->submit(request_of(6, kLong, 2), more.sink());
    const std::string lost = fmt::format("in step 3 of rank {}", GetParam() - 1);
    const Reply first = replies.wait()[0];
    EXPECT_EQ(first.finish, FinishReason::kError);
    EXPECT_NE(first.error.find(lost), std::string::npos) << first.error;
    if (other.ok()) {  // else it came too late; or while the loss was told, and then its error is the bare one
      for (const auto& [choice, reply] : more.wait(2)) {
        EXPECT_EQ(reply.finish, FinishReason::kError);
        EXPECT_TRUE(reply.error.find(lost) != std::string::npos || reply.error == "device_lost") << reply.error;
      }
    }
    EXPECT_TRUE(eventually([&] { return told.load(); }));
    EXPECT_TRUE(engine->stats().lost);
    EXPECT_EQ(engine->submit(request_of(5, 1), [](OutputChunk&&) {}).error().code, Code::kDeviceLost);
  }
}

}  // namespace
}  // namespace perigee

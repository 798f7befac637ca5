// Limits that the engine derives from model and cache, and what it counts.
#include <gtest/gtest.h>

#include "engine/small_engine.h"
#include "kv/socket.h"

namespace perigee {
namespace {

constexpr int32_t kPositions = 8192;  // max_position_embeddings of heads16
constexpr int32_t kBlock = kBlockTokens;

TEST(EngineLimits, TheContextMayBeAsLongAsTheModelsPositions) {
  EngineConfig config = small_config();
  config.rank.cache_bytes = 64 << 20;
  config.scheduling.max_model_len = kPositions;
  const auto engine = make_engine(config);
  EXPECT_EQ(engine->max_model_len(), kPositions);
  EXPECT_GE(engine->num_pages(), kPositions / kBlock) << "the cache is not the limit here";
  config.scheduling.max_model_len = 0;
  EXPECT_EQ(make_engine(config)->max_model_len(), kPositions);
  config.scheduling.max_model_len = kPositions + 1;
  const auto refused = Engine::create(config);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().field, "max-model-len");
}

TEST(EngineLimits, AContextOfOneTokenIsRefusedBeforeAnythingIsRead) {
  EngineConfig config;
  config.rank.load.path = "/nowhere/a-model";
  config.scheduling.max_model_len = 1;
  EXPECT_EQ(Engine::create(config).error().message,
            "--max-model-len 1 has no room for a prompt and an output: raise it, or leave it out");
}

TEST(EngineLimits, APortInUseIsRefusedBeforeAnythingIsRead) {
  const auto taken = Socket::listen("127.0.0.1", 0);
  ASSERT_TRUE(taken.ok());
  EngineConfig config;
  config.rank.load.path = "/nowhere/a-model";
  config.handover = {.gives = true, .listens = HandoverConfig::Address{"127.0.0.1", taken->port()}};
  const auto refused = Engine::create(config);
  EXPECT_EQ(refused.error().field, "kv-side-channel-port");
  EXPECT_NE(refused.error().message.find(std::to_string(taken->port())), std::string::npos) << refused.error().message;
}

TEST(EngineLimits, TheContextMayFillTheCacheBesideAState) {
  for (const char* model : {"heads16", "kimi_linear"}) {
    SCOPED_TRACE(model);
    EngineConfig config = small_config(model);
    config.rank.cache_bytes = 4 << 20;
    const auto engine = make_engine(config);
    EXPECT_EQ(engine->state_pages() > 0, model == std::string("kimi_linear"));
    const int32_t room = (engine->num_pages() - engine->state_pages()) * kBlock;
    ASSERT_LT(room, kPositions);
    EXPECT_EQ(engine->max_model_len(), room);
    config.scheduling.max_model_len = room;
    EXPECT_EQ(make_engine(config)->max_model_len(), room);
    config.scheduling.max_model_len = room + 1;
    const auto refused = Engine::create(config);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().field, "max-model-len");
  }
}

// Of a dcp group a sequence has more blocks than any one rank has pages.
TEST(EngineLimits, TheContextMayFillTheCacheOfAllRanks) {
  EngineConfig config = small_config();
  config.rank.layout = RankLayout::kTensorParallel;
  config.rank.size = config.rank.limits.dcp_size = 2;
  config.rank.cache_bytes = 1 << 20;
  const auto engine = make_engine(config);
  const int32_t length = engine->max_model_len();
  ASSERT_EQ(length, 2 * engine->num_pages() * kBlock);
  ASSERT_LT(length, kPositions) << "the cache is the limit here";
  const Reply reply = run(*engine, request_of(length - kBlock, kBlock)).at(0);
  EXPECT_EQ(reply.finish, FinishReason::kLength) << reply.error;
  EXPECT_EQ(reply.ids.size(), kBlock);
}

// The two distances between checkpoints are not one: here only rolling ones are left.
TEST(EngineLimits, CheckpointsOfATurnHaveADistanceOfTheirOwn) {
  for (const int32_t rolling_blocks : {0, 1}) {
    EngineConfig config = small_config("kimi_linear");
    config.scheduling.checkpoint_interval_blocks = 0;
    config.scheduling.checkpoint_rolling_blocks = rolling_blocks;
    const auto engine = make_engine(config);
    run(*engine, request_of(kBlock - 4, kBlock + 10));  // up to the second block's end and past it
    EXPECT_TRUE(eventually([&] { return engine->stats().scheduler.checkpoint_writes == 2 * rolling_blocks; }))
        << engine->stats().scheduler.checkpoint_writes << " with " << rolling_blocks;
  }
}

TEST(EngineLimits, AStepOfABoundsTokensCountsInItsBucket) {
  const auto engine = make_engine(small_config());
  run(*engine, request_of(8, 2));  // a step of 8 tokens, one of 1
  StepTokens counted;
  EXPECT_TRUE(eventually([&] { return (counted = engine->stats().step_tokens).tokens == 9; })) << counted.tokens;
  ASSERT_EQ(kStepTokenBounds[1], 8);
  EXPECT_EQ(counted.steps[0], 1);
  EXPECT_EQ(counted.steps[1], 1);
  EXPECT_EQ(counted.steps[2], 0);
}

TEST(EngineLimits, CachedPagesAreNotInUse) {
  const auto engine = make_engine(small_config());
  run(*engine, request_of(70, 2));
  EngineStats stats;
  EXPECT_TRUE(eventually([&] { return (stats = engine->stats()).scheduler.used_pages == 0 && stats.steps > 0; }));
  EXPECT_GT(stats.scheduler.cached_pages, 0);
  EXPECT_EQ(stats.kv_usage, 0);
}

}  // namespace
}  // namespace perigee

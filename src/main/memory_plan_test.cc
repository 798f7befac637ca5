#include "main/memory_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/temp_folder.h"
#include "engine/engine.h"
#include "kv/tcp_peer.h"

namespace perigee {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

EngineConfig config_of(const char* folder, int32_t ranks = 1, int32_t dcp = 1) {
  EngineConfig config;
  config.rank.device = Device::kCpu;
  config.rank.load.path = folder;
  config.rank.load.num_threads = 1;
  config.rank.cache_bytes = 16 << 20;
  config.rank.limits.max_sequences = 4;
  config.rank.size = ranks;
  config.rank.limits.dcp_size = dcp;
  if (ranks > 1) config.rank.layout = RankLayout::kTensorParallel;
  return config;
}

// The published sizes, from config.json alone.
EngineConfig kimi_linear(int32_t ranks = 1) {
  EngineConfig config = config_of("bench/models/kimi-linear-48b", ranks);
  config.rank.device = Device::kCuda;
  config.rank.load.format = LoadFormat::kDummy;
  config.rank.cache_bytes = 0;
  config.rank.limits = {.max_sequences = 1024, .max_step_tokens = 8192};
  return config;
}

Machine gpus(const char* text) {
  return Machine::of_gpus(*parse_gpus(text));
}

MemoryPlan plan_of(const EngineConfig& config, const Machine& machine) {
  const auto plan = plan_memory(config, machine);
  CHECK(plan.ok(), plan.error().message);
  return *plan;
}

// Bytes of weights, pages, tokens and state: what an engine says that has loaded the model.
TEST(MemoryPlan, IsWhatAnEngineThenHas) {
  for (const char* folder : {"models/tiny-k2", "models/tiny-kimi-linear"}) {
    for (const auto& [ranks, dcp, whole_experts] :
         {std::tuple(1, 1, false), {2, 1, false}, {2, 1, true}, {2, 2, false}}) {
      for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles}) {
        SCOPED_TRACE(fmt::format("{}, tp {}, dcp {}, {}", folder, ranks, dcp, latent_format_name(format)));
        EngineConfig config = config_of(folder, ranks, dcp);
        config.rank.whole_experts = whole_experts;
        config.rank.load.cache = format;
        const MemoryPlan plan = plan_of(config, *this_machine(config.rank));
        EXPECT_TRUE(check_fits(config, plan).ok());
        const auto engine = Engine::create(config);
        ASSERT_TRUE(engine.ok()) << engine.error().message;
        EXPECT_EQ((*engine)->model().weight_bytes, plan.weights);
        EXPECT_EQ((*engine)->num_pages(), plan.pages());
        EXPECT_EQ((*engine)->state_pages(), plan.layout.state_pages());
        EXPECT_EQ((*engine)->cache_size().max_tokens(), plan.cache_size().max_tokens());
        EXPECT_EQ((*engine)->max_model_len(), std::min(plan.max_model_len, plan.cache_size().max_tokens()));
        EXPECT_EQ((*engine)->model().max_positions, plan.max_model_len);
        EXPECT_EQ(plan.pool, plan.pages() * plan.layout.page_bytes());
      }
    }
  }
}

// The same with a draft, for each place of its cache.
TEST(MemoryPlan, IsWhatAnEngineWithADraftThenHas) {
  struct Pairing {
    const char *target, *draft;
    int32_t ranks = 1, dcp = 1;
    Eagle3::Layer layer = Eagle3::Layer::kDivided;
    std::optional<LatentFormat> cache = {};
  };
  constexpr const char *kK2 = "models/tiny-k2", *kHybrid = "models/tiny-kimi-linear";
  for (const Pairing& p : std::initializer_list<Pairing>{{kK2, "-eagle3-mla"},
                                                         {kK2, "-eagle3-mla", 2, 2},
                                                         {kK2, "-eagle3-mla", 2, 2, Eagle3::Layer::kWhole},
                                                         {kK2, "-eagle3-mla", 2, 2, {}, LatentFormat::kF8E4M3},
                                                         {kK2, "-eagle3", 1, 1},
                                                         {kK2, "-eagle3", 2, 2, {}, LatentFormat::kBF16},
                                                         {kK2, "-eagle3", 2, 1, Eagle3::Layer::kWhole},
                                                         {kHybrid, "-eagle3-mla", 2, 1}}) {
    EngineConfig config = config_of(p.target, p.ranks, p.dcp);
    config.rank.draft_model = std::string(p.target) + p.draft;
    config.rank.draft_layer = p.layer;
    config.rank.draft_cache = p.cache;
    config.rank.limits.num_drafts = 3;
    SCOPED_TRACE(fmt::format("{}, tp {}, dcp {}, {}", config.rank.draft_model, p.ranks, p.dcp,
                             p.layer == Eagle3::Layer::kWhole ? "whole" : "divided"));
    const MemoryPlan plan = plan_of(config, *this_machine(config.rank));
    const auto engine = Engine::create(config);
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    EXPECT_EQ((*engine)->weight_bytes(), plan.weights);
    EXPECT_GT(plan.weights, (*engine)->model().weight_bytes) << "without the draft's";
    EXPECT_EQ((*engine)->num_pages(), plan.pages());
    EXPECT_EQ(plan.pool, plan.pages() * plan.layout.bytes_per_page());
    EXPECT_EQ((*engine)->cache_size().max_tokens(), plan.cache_size().max_tokens());
  }
}

// A draft's weights come on top, and its cache is one more layer of latents.
TEST(MemoryPlan, ADraftTakesWeightsAndALayerOfTheCache) {
  EngineConfig config = config_of("models/tiny-k2");
  const MemoryPlan alone = plan_of(config, *this_machine(config.rank));
  config.rank.draft_model = "models/tiny-k2-eagle3-mla";
  config.rank.limits.num_drafts = 3;
  const MemoryPlan with = plan_of(config, *this_machine(config.rank));
  const int64_t layers = alone.layout.latent().layers;
  EXPECT_EQ(with.layout.latent().layers, layers + 1);
  EXPECT_EQ(with.layout.page_bytes() * layers, alone.layout.page_bytes() * (layers + 1));
  EXPECT_GT(with.weights, alone.weights + 1'000'000);
  EXPECT_LT(with.pages(), alone.pages());
}

// Of a draft that is not divided each rank has all heads' keys and values; of latents it has those of all ranks of a
// dcp group.
TEST(MemoryPlan, ADraftThatEachRankHasWhole) {
  EngineConfig config = config_of("models/tiny-k2", 2);
  const Machine machine{.name = "m", .bytes = kGiB};
  config.rank.draft_model = "models/tiny-k2-eagle3";
  config.rank.limits.num_drafts = 3;
  config.rank.limits.dcp_size = 2;
  const MemoryPlan divided = plan_of(config, machine);
  config.rank.draft_layer = Eagle3::Layer::kWhole;
  const MemoryPlan whole = plan_of(config, machine);
  EXPECT_EQ(whole.layout.draft().heads, 2 * divided.layout.draft().heads);
  EXPECT_EQ(whole.layout.page_bytes(), divided.layout.page_bytes());
  EXPECT_GT(whole.weights, divided.weights);
  config.rank.draft_model = "models/tiny-k2-eagle3-mla";
  const MemoryPlan latents = plan_of(config, machine);
  EXPECT_EQ(latents.layout.draft().layers, 1);
  EXPECT_EQ(latents.layout.draft().block_ratio, 2);
  EXPECT_EQ(latents.layout.page_bytes(), whole.layout.page_bytes());
  config.rank.limits.dcp_size = 1;
  const MemoryPlan alone = plan_of(config, machine);
  EXPECT_EQ(alone.layout.draft().layers, 0);
  EXPECT_EQ(alone.layout.latent().layers, latents.layout.latent().layers + 1);
}

// In another format than their target's a draft's latents lie beside its blocks.
TEST(MemoryPlan, ADraftsLatentsInAnotherFormat) {
  EngineConfig config = config_of("models/tiny-k2", 2);
  const Machine machine{.name = "m", .bytes = kGiB};
  const MemoryPlan without = plan_of(config, machine);
  config.rank.draft_model = "models/tiny-k2-eagle3-mla";
  config.rank.limits.num_drafts = 3;
  config.rank.draft_cache = LatentFormat::kF8E4M3;
  const MemoryPlan plan = plan_of(config, machine);
  EXPECT_EQ(plan.layout.page_bytes(), without.layout.page_bytes());
  EXPECT_EQ(plan.layout.bytes_per_page() - without.layout.page_bytes(), plan.layout.draft().layer_bytes());
  EXPECT_NE(plan_text(plan).find("bytes a token, fp8, in 1 block beside each page"), std::string::npos)
      << plan_text(plan);
  EXPECT_EQ(plan_json(plan).find("cache_groups")->as_array().back().find("kind")->as_string(), "draft");
  config.rank.draft_cache = LatentFormat::kBF16;
  EXPECT_EQ(plan_of(config, machine).layout.draft().layers, 0);
}

// A rank has the blocks of both dcp indices.
TEST(MemoryPlan, ADraftByHeadOnGpusThatShareTheCache) {
  EngineConfig config = config_of("models/tiny-k2", 2);
  const Machine machine{.name = "m", .bytes = 8 * kGiB};
  config.rank.device = Device::kCuda;
  config.rank.draft_model = "models/tiny-k2-eagle3";
  config.rank.limits.num_drafts = 3;
  config.rank.limits.dcp_size = 2;
  const MemoryPlan plan = plan_of(config, machine);
  EXPECT_EQ(plan.layout.draft().block_ratio, 2);
  EXPECT_EQ(plan.layout.bytes_per_page() - plan.layout.page_bytes(), 2 * plan.layout.draft().layer_bytes());
}

TEST(MemoryPlan, OnAGpuHeadsOfADraftHaveFewSizes) {
  const auto text = read_file("models/tiny-k2-eagle3/config.json", 1 << 16);
  ASSERT_TRUE(text.ok());
  auto draft = parse_json(*text);
  ASSERT_TRUE(draft.ok());
  EngineConfig config = config_of("models/tiny-k2", 1);
  config.rank.device = Device::kCuda;
  config.rank.load.format = LoadFormat::kDummy;
  config.rank.limits.num_drafts = 3;
  const TempFolder folder;
  config.rank.draft_model = folder.path();
  for (const int64_t dim : {32, 48, 64}) {
    draft->set("head_dim", dim);
    folder.write("config.json", dump_json(*draft));
    const auto plan = plan_memory(config, {.name = "m", .bytes = 8 * kGiB});
    EXPECT_EQ(plan.ok(), dim != 48) << dim;
    if (plan.ok()) continue;
    EXPECT_NE(plan.error().message.find("head_dim"), std::string::npos) << plan.error().message;
  }
}

// Plan and engine take the longest context that the ranks of a dcp group hold together, and refuse one of a token more.
TEST(MemoryPlan, AContextThatOneRankCannotHold) {
  const Machine machine{.name = "m", .bytes = kGiB};
  for (const char* folder : {"models/tiny-k2", "models/tiny-kimi-linear"}) {
    SCOPED_TRACE(folder);
    EngineConfig config = config_of(folder, 2);
    const MemoryPlan roomy = plan_of(config, machine);
    constexpr int32_t kBlocks = 4;  // of one rank
    config.rank.cache_bytes = (kBlocks + roomy.layout.state_pages()) * roomy.layout.page_bytes();
    config.scheduling.max_model_len = 2 * kBlocks * kBlockTokens;
    const Status refused = check_fits(config, plan_of(config, machine));
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.error().message.find("a cache that ranks share: --decode-context-parallel-size 2;"),
              std::string::npos)
        << refused.error().message;
    EXPECT_FALSE(Engine::create(config).ok());
    config.rank.limits.dcp_size = 2;
    EXPECT_TRUE(check_fits(config, plan_of(config, machine)).ok());
    const auto engine = Engine::create(config);
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    EXPECT_EQ((*engine)->max_model_len(), 512);
    ++config.scheduling.max_model_len;
    EXPECT_FALSE(check_fits(config, plan_of(config, machine)).ok());
    EXPECT_FALSE(Engine::create(config).ok());
  }
}

TEST(MemoryPlan, RanksThatShareACacheHoldMore) {
  const MemoryPlan apart = plan_of(kimi_linear(4), gpus("4xH200"));
  EngineConfig config = kimi_linear(4);
  config.rank.limits.dcp_size = 4;
  const MemoryPlan shared = plan_of(config, gpus("4xH200"));
  // Each slot has the numbers of its blocks that lie here, twice, beside their pages. The group has boxes of its own.
  const int64_t slots = config.rank.limits.max_sequences, tables = 2 * 4 * slots * (shared.max_model_len / 64 + 1);
  const int64_t more = tables + (int64_t{48} << 20);
  EXPECT_EQ(shared.workspace.arrays - apart.workspace.arrays, more);
  EXPECT_EQ(shared.pages(), (apart.limit - apart.fixed() - more) / shared.layout.bytes_per_page());
  EXPECT_EQ(shared.cache_size().max_tokens(), 4 * 64 * (shared.pages() - shared.layout.state_pages()));
  EXPECT_GT(static_cast<double>(shared.pages()), 0.99 * static_cast<double>(apart.pages()));
  EXPECT_EQ(plan_json(shared).find("dcp_size")->as_int(), 4);
  EXPECT_EQ(plan_json(shared).find("tokens")->as_int(), shared.cache_size().max_tokens());
  EXPECT_NE(plan_text(shared).find("4 ranks share the cache"), std::string::npos) << plan_text(shared);
  EXPECT_EQ(plan_text(apart).find("share"), std::string::npos) << plan_text(apart);
  // A rank of a hybrid holds the state of every sequence, and its share of the blocks.
  const int64_t blocks = blocks_of(shared.max_model_len), state = shared.layout.state_pages();
  EXPECT_EQ(plan_json(shared).find("sequences")->as_int(), 4 * shared.pages() / (blocks + 4 * state));
}

TEST(MemoryPlan, OneOfAThingHasNoPlural) {
  EngineConfig config = config_of("models/tiny-k2");
  config.scheduling.max_model_len = 1280;
  const MemoryPlan wide = plan_of(config, {.name = "m", .bytes = kGiB});
  config.rank.cache_bytes = 20 * wide.layout.page_bytes();
  const std::string text = plan_text(plan_of(config, {.name = "m", .bytes = kGiB}));
  EXPECT_NE(text.find("1,280 tokens; 1 sequence of 1,280 tokens"), std::string::npos) << text;
}

// Of DeepSeek's records: 656 bytes for each of 7 layers with latents.
TEST(MemoryPlan, OfRecordsWithScalesOfTheirOwn) {
  EngineConfig config = kimi_linear();
  config.rank.device = Device::kCpu;
  config.rank.cache_bytes = 8 << 20;
  config.rank.load.cache = LatentFormat::kF8Tiles;
  const std::string text = plan_text(plan_of(config, {.name = "m", .bytes = 500 * kGiB}));
  EXPECT_NE(text.find("4,592 bytes a token, fp8_ds_mla, 7 layers"), std::string::npos) << text;
}

// 48 billion numbers of two bytes; the parts that ranks share are a small share of it.
TEST(MemoryPlan, OfAModelOfPublishedSize) {
  const MemoryPlan one = plan_of(kimi_linear(), gpus("H200"));
  EXPECT_NEAR(static_cast<double>(one.weights) / 1e9, 98.2, 0.03 * 98.2);
  EXPECT_TRUE(one.fits());
  EXPECT_NEAR(static_cast<double>(one.limit), 0.9 * 139 * static_cast<double>(kGiB), 1);
  EXPECT_GT(one.workspace.total(), kGiB);
  EXPECT_EQ(one.pool / one.layout.page_bytes(), one.pages());
  EXPECT_LE(one.fixed() + one.pool, one.limit);
  EXPECT_GT(one.fixed() + one.pool + one.layout.page_bytes(), one.limit);
  const MemoryPlan four = plan_of(kimi_linear(4), gpus("4xH200"));
  EXPECT_NEAR(static_cast<double>(four.weights), static_cast<double>(one.weights) / 4, 0.02 * one.weights / 4.0);
  EXPECT_EQ(four.layout.latent().row_bytes(), one.layout.latent().row_bytes()) << "latents are every rank's";
  EXPECT_EQ(four.layout.state().heads, one.layout.state().heads / 4);
  EXPECT_GT(four.cache_size().max_tokens(), 2 * one.cache_size().max_tokens());
}

// A node that gives caches has areas for other processes, one that takes them slots to copy those into, and both have
// staging for the host.
TEST(MemoryPlan, TransfersOfCachesTakeTheirPartOfAGpu) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const MemoryPlan alone = plan_of(kimi_linear(), gpus("H200"));
  EXPECT_EQ(alone.transfers, 0);
  const auto with = [&](bool gives, bool takes, std::vector<std::string> backends) {
    EngineConfig config = kimi_linear();
    config.handover.gives = gives;
    if (takes) config.handover.connect = connect_by_tcp({});
    config.handover.backends = std::move(backends);
    const MemoryPlan plan = plan_of(config, gpus("H200"));
    EXPECT_EQ(alone.fixed() + plan.transfers, plan.fixed());
    EXPECT_EQ(alone.pages() - plan.pages(),
              (alone.pool + plan.layout.bytes_per_page() - 1 - plan.pool) / plan.layout.bytes_per_page())
        << "the pool gets what is left";
    EXPECT_LT(plan.pages(), alone.pages());
    return plan.transfers / kMiB;
  };
  EXPECT_EQ(with(true, false, {}), 64 + 4 * 256 + 10) << "lists of units among them";
  EXPECT_EQ(with(false, true, {}), 64 + 256 + 7);
  EXPECT_EQ(with(true, true, {"TCP"}), 64 + 7);
}

TEST(MemoryPlan, TooFewGpusNameTheNumberThatIsEnough) {
  const EngineConfig config = kimi_linear();
  const MemoryPlan plan = plan_of(config, gpus("H100"));
  EXPECT_FALSE(plan.fits());
  const Status refused = check_fits(config, plan);
  ASSERT_FALSE(refused.ok());
  const std::string& why = refused.error().message;
  EXPECT_NE(why.find("--tensor-parallel-size 2"), std::string::npos) << why;
  EXPECT_NE(why.find("of weights"), std::string::npos) << why;
  EXPECT_NE(why.find("--gpu-memory-utilization 0.9 of 79.1 GiB"), std::string::npos) << why;
  EXPECT_EQ(std::count(why.begin(), why.end(), ';'), 2) << "three ways out: " << why;
  EXPECT_EQ(refused.error().field, "gpu-memory-utilization");
}

TEST(MemoryPlan, TooLongAContextNamesOneThatFits) {
  EngineConfig config = config_of("models/tiny-k2");
  config.scheduling.max_model_len = 4096;
  config.rank.cache_bytes = 20 * plan_of(config, {.name = "m", .bytes = kGiB}).layout.page_bytes();
  const MemoryPlan plan = plan_of(config, {.name = "m", .bytes = kGiB});
  const Status refused = check_fits(config, plan);
  ASSERT_FALSE(refused.ok());
  const std::string& why = refused.error().message;
  EXPECT_EQ(refused.error().field, "max-model-len");
  EXPECT_NE(why.find("--max-model-len 4096 does not fit the cache of 1280 tokens"), std::string::npos) << why;
  EXPECT_NE(why.find("a shorter context: --max-model-len 1280"), std::string::npos) << why;
  EXPECT_NE(why.find(fmt::format("raise --kv-cache-memory-bytes to {}", 64 * plan.layout.page_bytes())),
            std::string::npos)
      << why;
  config.scheduling.max_model_len = 1280;
  EXPECT_TRUE(check_fits(config, plan_of(config, {.name = "m", .bytes = kGiB})).ok());
}

TEST(MemoryPlan, ACacheOverTheHostsMemoryNamesOneThatFits) {
  EngineConfig config = config_of("models/tiny-k2");
  config.rank.cache_bytes = 2 * kGiB;
  const MemoryPlan plan = plan_of(config, {.name = "m", .bytes = kGiB});
  const Status refused = check_fits(config, plan);
  ASSERT_FALSE(refused.ok());
  const std::string& why = refused.error().message;
  EXPECT_EQ(refused.error().field, "kv-cache-memory-bytes");
  EXPECT_NE(why.find("is over the memory that this process may have, 1.0 GiB"), std::string::npos) << why;
  const size_t at = why.find("lower --kv-cache-memory-bytes to ");
  ASSERT_NE(at, std::string::npos) << why;
  config.rank.cache_bytes = std::stoll(why.substr(at + std::string("lower --kv-cache-memory-bytes to ").size()));
  EXPECT_TRUE(check_fits(config, plan_of(config, {.name = "m", .bytes = kGiB})).ok());
  config.rank.cache_bytes += plan.layout.page_bytes();
  EXPECT_FALSE(check_fits(config, plan_of(config, {.name = "m", .bytes = kGiB})).ok()) << "it was the largest";
}

TEST(MemoryPlan, ACacheOfTooFewPagesNamesHowManyAreNeeded) {
  EngineConfig config = config_of("models/tiny-k2");
  config.rank.cache_bytes = 1;
  const Status refused = check_fits(config, plan_of(config, {.name = "m", .bytes = kGiB}));
  ASSERT_FALSE(refused.ok());
  const std::string& why = refused.error().message;
  EXPECT_EQ(refused.error().field, "kv-cache-memory-bytes");
  EXPECT_EQ(why.find("a cache of 1 bytes holds 0 pages of 294912 bytes, and 2 are needed"), 0u) << why;
  EXPECT_NE(why.find("raise --kv-cache-memory-bytes to 589824"), std::string::npos) << why;
}

TEST(MemoryPlan, WordsAndJsonHaveTheSameFigures) {
  const MemoryPlan plan = plan_of(kimi_linear(2), gpus("2xH200"));
  const Json json = plan_json(plan);
  EXPECT_EQ(json.find("weight_bytes")->as_int(), plan.weights);
  EXPECT_EQ(json.find("tokens")->as_int(), plan.cache_size().max_tokens());
  EXPECT_EQ(json.find("cache_groups")->as_array().size(), 2u);
  EXPECT_EQ(json.find("cache_groups")->as_array()[0].find("bytes_a_token")->as_int(), 7 * 576 * 2);
  const std::string text = plan_text(plan);
  EXPECT_NE(text.find("2 on 2 x H200, 139.0 GiB each"), std::string::npos) << text;
  EXPECT_NE(text.find("8,064 bytes a token, bf16, 7 layers"), std::string::npos) << text;
}

}  // namespace
}  // namespace perigee

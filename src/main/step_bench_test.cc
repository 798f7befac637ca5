#include "main/step_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "main/memory_plan.h"
#include "ops/uniform_routing.h"

namespace perigee {
namespace {

RankConfig tiny(Device device = Device::kCpu) {
  RankConfig config;
  config.device = device;
  config.load.path = "models/tiny-k2";
  config.cache_bytes = 64 << 20;
  config.load.num_threads = 1;
  return config;
}

const StepGroup* find_group(const StepTable& table, const std::string& op) {
  for (const StepGroup& group : table.groups)
    if (group.op == op) return &group;
  return nullptr;
}

TEST(StepBench, TheRowsOfADecodeStepAddUpToIt) {
  const StepRequest request{.shape = {.batch = 3, .context = 200}, .warm_steps = 3, .steps = 5, .trace = true};
  const auto measured = measure_steps(tiny(), request);
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_EQ(measured->step_us.size(), 5u);
  EXPECT_EQ(measured->step_tokens, 3);
  EXPECT_NEAR(measured->tables[0].sum_us() / measured->traced_us[0], 1, 0.03);
  const StepGroup* attend = find_group(measured->tables[0], "mla_attend");
  ASSERT_NE(attend, nullptr);
  EXPECT_EQ(attend->total.calls, 4);
  for (const StepGroup& group : measured->tables[0].groups) EXPECT_GT(group.total.us, 0) << group.op;
}

TEST(StepBench, BytesAreThoseOfTheModel) {
  const StepRequest request{.shape = {.batch = 2, .context = 100}, .warm_steps = 1, .steps = 1, .trace = true};
  const auto measured = measure_steps(tiny(), request);
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_EQ(measured->moe_layers, 3);
  EXPECT_EQ(measured->num_experts, 16);
  // Two tokens choose four experts of a layer each.
  EXPECT_GE(measured->distinct_experts, 3 * 4);
  EXPECT_LE(measured->distinct_experts, 3 * 8);
  const StepGroup* head = find_group(measured->tables[0], "linear 256 -> 2304");
  ASSERT_NE(head, nullptr);
  EXPECT_GE(head->total.bytes, 256 * 2304 * 2);
  EXPECT_LE(head->total.bytes, 256 * 2304 * 2 * 1.1);
}

TEST(StepBench, UniformRoutingTouchesWhatIndependentTokensWould) {
  RankConfig config = tiny();
  config.load.uniform_routing = true;
  const auto measured = measure_steps(config, {.shape = {.batch = 2, .context = 64}, .warm_steps = 1, .steps = 1});
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_TRUE(measured->uniform_routing);
  std::set<int64_t> touched;  // each layer draws the same
  for (int64_t token = 0; token < 2; ++token) {
    std::vector<std::pair<float, int64_t>> choice;
    for (int64_t e = 0; e < 16; ++e) choice.emplace_back(-uniform_choice(token, e), e);
    std::sort(choice.begin(), choice.end());
    for (size_t k = 0; k < 4; ++k) touched.insert(choice[k].second);
  }
  EXPECT_EQ(measured->distinct_experts, 3 * std::ssize(touched));
}

// Whole experts: those of rank 0 and what it reads of them. What two ranks would choose together is what one does.
TEST(StepBench, ARankCountsItsOwnExperts) {
  const StepRequest request{.shape = {.batch = 2, .context = 64}, .warm_steps = 1, .steps = 1, .trace = true};
  RankConfig config = tiny();
  config.size = 2;
  config.layout = RankLayout::kTensorParallel;
  const auto shares = measure_steps(config, request);
  config.whole_experts = true;
  const auto whole = measure_steps(config, request);
  ASSERT_TRUE(shares.ok() && whole.ok());
  EXPECT_EQ(shares->num_experts, 16);
  EXPECT_EQ(whole->num_experts, 8);
  EXPECT_LT(whole->distinct_experts, shares->distinct_experts);
}

// More steps than blocks of 64 tokens hold with one id each; of the host's and of a model's drafts, over a recurrent
// state, too.
TEST(StepBench, RowsMoveByWhatTheyKeep) {
  for (const char* folder : {"models/tiny-k2", "models/tiny-kimi-linear"}) {
    SCOPED_TRACE(folder);
    RankConfig config = tiny();
    config.load.path = folder;
    config.limits.num_drafts = 3;
    const StepRequest request{.shape = {.batch = 2, .context = 100}, .warm_steps = 2, .steps = 20};
    const auto looked_up = measure_steps(config, request);
    ASSERT_TRUE(looked_up.ok()) << looked_up.error().message;
    EXPECT_GE(looked_up->row_tokens, 1);
    config.draft_model = str_cat(folder, "-eagle3-mla");
    for (const auto& [rates, kept] :
         {std::pair<std::vector<float>, double>{{1, 1, 1}, 4}, {{1, 0, 0}, 2}, {{0, 0, 0}, 1}}) {
      config.synthetic_rates = rates;
      const auto measured = measure_steps(config, request);
      ASSERT_TRUE(measured.ok()) << measured.error().message;
      EXPECT_EQ(measured->row_tokens, kept);
      EXPECT_EQ(measured->step_tokens, 2 * kept);
    }
  }
}

// A draft's ops have rows of their own.
TEST(StepBench, TheRowsOfAStepThatDraftsAddUpToIt) {
  RankConfig config = tiny();
  config.limits.num_drafts = 2;
  config.draft_model = "models/tiny-k2-eagle3";
  const auto measured =
      measure_steps(config, {.shape = {.batch = 3, .context = 100}, .warm_steps = 3, .steps = 5, .trace = true});
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_NEAR(measured->tables[0].sum_us() / measured->traced_us[0], 1, 0.03);
  const StepGroup* attend = find_group(measured->tables[0], "full_attend");
  ASSERT_NE(attend, nullptr);
  EXPECT_EQ(attend->total.calls, 2);
}

TEST(StepBench, PrefillStepsRunWholePrompts) {
  const StepRequest request{
      .shape = {.batch = 2, .context = 130, .prefill = true}, .warm_steps = 1, .steps = 3, .trace = true};
  const auto measured = measure_steps(tiny(), request);
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_EQ(measured->step_tokens, 260);
  EXPECT_NEAR(measured->tables[0].sum_us() / measured->traced_us[0], 1, 0.03);
}

void expect_a_table_of_each_rank(const RankConfig& config, bool waits) {
  const StepRequest request{.shape = {.batch = 2, .context = 64}, .warm_steps = 2, .steps = 2, .trace = true};
  const auto measured = measure_steps(config, request);
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  ASSERT_EQ(measured->tables.size(), 2u);
  ASSERT_EQ(measured->traced_us.size(), 2u);
  for (size_t r = 0; r < 2; ++r) {
    const StepTable& table = measured->tables[r];
    EXPECT_NEAR(table.sum_us() / measured->traced_us[r], 1, 0.03);
    ASSERT_NE(find_group(table, "mla_attend"), nullptr);
    const StepGroup* wait = find_group(table, "waiting for other ranks");
    ASSERT_EQ(wait != nullptr, waits);
    if (waits) {
      EXPECT_GT(wait->total.us, 0);
    }
  }
}

TEST(StepBench, EachRankHasATableThatAddsUp) {
  RankConfig config = tiny();
  config.size = 2;
  expect_a_table_of_each_rank(config, false);  // replicas exchange nothing
  config.layout = RankLayout::kTensorParallel;
  expect_a_table_of_each_rank(config, true);
  config.limits.dcp_size = 2;
  expect_a_table_of_each_rank(config, true);
}

// Ten blocks a sequence, of which a rank has room for five, and a recurrent state with every rank.
TEST(StepBench, RanksThatShareACacheHoldTheContextTogether) {
  for (const char* folder : {"models/tiny-k2", "models/tiny-kimi-linear"}) {
    SCOPED_TRACE(folder);
    EngineConfig engine;
    RankConfig& config = engine.rank = tiny();
    config.load.path = folder;
    config.size = 2;
    config.layout = RankLayout::kTensorParallel;
    const auto plan = plan_memory(engine, {.name = "m", .bytes = int64_t{1} << 30});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    config.cache_bytes = 2 * (5 + plan->layout.state_pages()) * plan->layout.page_bytes();
    const StepRequest request{.shape = {.batch = 2, .context = 600}, .warm_steps = 1, .steps = 1, .trace = true};
    EXPECT_FALSE(measure_steps(config, request).ok());
    config.limits.dcp_size = 2;
    const auto measured = measure_steps(config, request);
    ASSERT_TRUE(measured.ok()) << measured.error().message;
    EXPECT_EQ(measured->tables.size(), 2u);
  }
}

TEST(StepBench, SaysWhatTheCacheLacks) {
  RankConfig config = tiny();
  config.cache_bytes = 4 << 20;
  const auto measured = measure_steps(config, {.shape = {.batch = 64, .context = 1000}});
  ASSERT_FALSE(measured.ok());
  EXPECT_NE(measured.error().message.find("kv-cache-memory-bytes"), std::string::npos) << measured.error().message;
}

TEST(StepBench, EndsWhenTheDeviceIsLost) {
  RankConfig config = tiny();
  config.fault.step = 4;
  const auto measured = measure_steps(config, {.shape = {.batch = 1, .context = 64}, .warm_steps = 5, .steps = 5});
  ASSERT_FALSE(measured.ok());
  EXPECT_EQ(measured.error().code, Code::kDeviceLost);
}

}  // namespace
}  // namespace perigee

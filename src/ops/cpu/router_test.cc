#include "ops/cpu/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/matrix_test_util.h"

namespace perigee::cpu {
namespace {

class Router : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not_on(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};

RouterWeight random_router(int64_t experts, int64_t hidden) {
  RouterWeight router{.num_experts = experts, .hidden = hidden, .top_k = 4};
  TestRandom random(3);
  std::vector<float> weight;
  for (int64_t i = 0; i < experts * hidden; ++i) weight.push_back(random.uniform() * 0.2f);
  router.weight = std::move(weight);
  return router;
}

// Scores of a token in double.
std::vector<double> scores_of(const RouterWeight& router, const uint16_t* x) {
  std::vector<double> scores;
  double sum = 0;
  for (int64_t e = 0; e < router.num_experts; ++e) {
    double z = 0;
    for (int64_t i = 0; i < router.hidden; ++i)
      z += static_cast<double>(bf16_to_f32(x[i])) * router.weight[static_cast<size_t>(e * router.hidden + i)];
    scores.push_back(router.score == RouterScore::kSigmoid ? 1 / (1 + std::exp(-z)) : std::exp(z));
    sum += scores.back();
  }
  if (router.score == RouterScore::kSoftmax) {
    for (double& s : scores) s /= sum;
  }
  return scores;
}

TEST_P(Router, PicksTheLargestScoresAndTheirWeights) {
  TestCpu cpu(GetParam(), 2);
  for (const int64_t hidden : {int64_t{64}, int64_t{203}}) {
    const TestRows x(40, hidden, hidden + 2, 1);
    for (const RouterScore score : {RouterScore::kSigmoid, RouterScore::kSoftmax}) {
      RouterWeight router = random_router(24, hidden);
      router.score = score;
      router.normalize = score == RouterScore::kSigmoid;
      router.scale = 2.5f;
      const Routing routing = route(cpu.context(), x.tensor, router);
      for (int64_t t = 0; t < 40; ++t) {
        const std::vector<double> scores = scores_of(router, x.tensor.row<uint16_t>(t));
        std::vector<int32_t> order(24);
        for (int32_t e = 0; e < 24; ++e) order[static_cast<size_t>(e)] = e;
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
        double sum = 0;
        for (size_t k = 0; k < 4; ++k) sum += scores[static_cast<size_t>(order[k])];
        for (size_t k = 0; k < 4; ++k) {
          const double want = scores[static_cast<size_t>(order[k])] / (router.normalize ? sum : 1.0) * 2.5;
          ASSERT_EQ(routing.ids[t * 4 + static_cast<int64_t>(k)], order[k]) << t;
          ASSERT_NEAR(routing.weights[t * 4 + static_cast<int64_t>(k)], want, 1e-5 * want + 1e-7) << t;
        }
      }
    }
  }
}

TEST_P(Router, BiasSelectsOnlyTiesTakeTheLowerIdAndGroupsCountTheirTwoBest) {
  TestCpu cpu(GetParam(), 1);
  std::vector<uint16_t> one = {f32_to_bf16(1.0f)};
  const Tensor x{.data = one.data(), .dtype = DType::kBF16, .rows = 1, .cols = 1, .row_stride = 1};
  RouterWeight router{.num_experts = 4, .hidden = 1, .weight = {0, 0, 1, -9}, .bias = {0, 0, 0, 9}, .top_k = 2};
  Routing r = route(cpu.context(), x, router);
  EXPECT_EQ(r.ids[0], 3);
  EXPECT_EQ(r.ids[1], 2);
  EXPECT_LT(r.weights[0], r.weights[1]);
  router.bias_in_weights = true;
  r = route(cpu.context(), x, router);
  EXPECT_EQ(r.ids[0], 3);
  EXPECT_NEAR(r.weights[0] / r.weights[1], (9 + 1 / (1 + std::exp(9.0))) / (1 / (1 + std::exp(-1.0))), 1e-4);
  router.bias_in_weights = false;
  router.bias = {};
  router.weight = {0, 0, -1, 0};
  r = route(cpu.context(), x, router);
  EXPECT_EQ(r.ids[0], 0);
  EXPECT_EQ(r.ids[1], 1);
  // Group 0 has the single best expert, group 1 the best pair.
  router.weight = {3, -5, 2, 1};
  router.num_groups = 2;
  r = route(cpu.context(), x, router);
  EXPECT_EQ(r.ids[0], 2);
  EXPECT_EQ(r.ids[1], 3);
}

// Their exponentials do not fit an f32.
TEST_P(Router, LargeScoresHaveASoftmax) {
  TestCpu cpu(GetParam(), 1);
  std::vector<uint16_t> one = {f32_to_bf16(1.0f)};
  const Tensor x{.data = one.data(), .dtype = DType::kBF16, .rows = 1, .cols = 1, .row_stride = 1};
  RouterWeight router{.num_experts = 4, .hidden = 1, .weight = {199, 200, 0, -200}, .top_k = 2};
  router.score = RouterScore::kSoftmax;
  router.normalize = false;
  const Routing r = route(cpu.context(), x, router);
  EXPECT_EQ(r.ids[0], 1);
  EXPECT_EQ(r.ids[1], 0);
  EXPECT_NEAR(r.weights[0], 1 / (1 + std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(r.weights[1], 1 / (1 + std::exp(1.0)), 1e-6);
}

TEST_P(Router, ATokenDoesNotDependOnItsBatchOrThreads) {
  TestCpu one(GetParam(), 1), three(GetParam(), 3);
  const TestRows x(100, 256, 256, 8);
  RouterWeight router = random_router(64, 256);
  router.num_groups = 8;
  router.top_groups = 4;
  const Routing all = route(one.context(), x.tensor, router);
  for (TestCpu* cpu : {&one, &three}) {
    for (const int64_t rows : {1, 2, 16, 17, 100}) {
      const Routing part = route(cpu->context(), x.tensor.row_range(100 - rows, rows), router);
      const auto bytes = static_cast<size_t>(rows) * 16;
      ASSERT_EQ(std::memcmp(part.ids, all.ids + (100 - rows) * 4, bytes), 0);
      ASSERT_EQ(std::memcmp(part.weights, all.weights + (100 - rows) * 4, bytes), 0);
    }
  }
}

// A row of NaN ends its own request later; it must not crash here, and its neighbours must not notice.
TEST_P(Router, NanRowKeepsNanWeightsAndValidIds) {
  TestCpu cpu(GetParam(), 1);
  TestRows x(2, 32, 32, 4);
  std::fill_n(x.tensor.row<uint16_t>(0), 32, uint16_t{0x7FC0});
  for (const RouterScore score : {RouterScore::kSigmoid, RouterScore::kSoftmax}) {
    RouterWeight router = random_router(16, 32);
    router.score = score;
    router.num_groups = 4;
    router.top_groups = 2;
    const Routing both = route(cpu.context(), x.tensor, router);
    const Routing second = route(cpu.context(), x.tensor.row_range(1, 1), router);
    for (int k = 0; k < 4; ++k) {
      EXPECT_TRUE(both.ids[k] >= 0 && both.ids[k] < 16);
      EXPECT_TRUE(std::isnan(both.weights[k]));
      EXPECT_EQ(both.ids[4 + k], second.ids[k]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Router, ::testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace perigee::cpu

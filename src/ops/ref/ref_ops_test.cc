#include "ops/ref/ref_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <set>

#include "base/rng.h"

namespace perigee {
namespace {

std::vector<float> noise(uint64_t seed, int64_t n) {
  Rng rng(seed);
  std::vector<float> out(n);
  for (float& x : out) x = 2 * rng.unit() - 1;
  return out;
}

RawMatrix raw(const std::vector<float>& values, int64_t out, int64_t in) {
  return {.format = WeightFormat::kF32, .out = out, .in = in, .data = values.data()};
}

Tensor view(std::vector<float>& values, int64_t rows, int64_t cols) {
  return {.data = values.data(), .dtype = DType::kF32, .rows = rows, .cols = cols, .row_stride = cols};
}

TEST(RefOps, LinearStacksRows) {
  RefOps ops;
  const std::vector<float> a = {1, 2, 3, 4}, b = {5, 6};
  const std::vector<RawMatrix> both = {raw(a, 2, 2), raw(b, 1, 2)};
  std::vector<float> x = {10, 1};
  const Tensor y = ops.linear(view(x, 1, 2), ops.pack_linear(both), DType::kF32);
  EXPECT_EQ(y.cols, 3);
  EXPECT_EQ(y.row<float>(0)[0], 12);
  EXPECT_EQ(y.row<float>(0)[1], 34);
  EXPECT_EQ(y.row<float>(0)[2], 56);
}

TEST(RefOps, RmsNormOfColumns) {
  RefOps ops;
  std::vector<float> x = {3, 4, 100};
  const std::vector<float> weight = {1, 2};
  const Tensor y = ops.rms_norm(view(x, 1, 3).columns(0, 2), weight, 0);
  EXPECT_NEAR(y.row<float>(0)[0], 3 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(y.row<float>(0)[1], 8 / std::sqrt(12.5), 1e-6);
}

TEST(RefOps, RopeRotatesPairsOfEachHead) {
  RefOps ops;
  std::vector<float> x = {7, 1, 0, 7, 0, 1};  // two heads of three, rope at column 1
  const std::vector<int32_t> positions = {2};
  ops.rope(view(x, 1, 6), 3, 1, positions, {.inv_freq = {0.5f}});
  EXPECT_FLOAT_EQ(x[0], 7);
  EXPECT_NEAR(x[1], std::cos(1.0), 1e-6);
  EXPECT_NEAR(x[2], std::sin(1.0), 1e-6);
  EXPECT_NEAR(x[4], -std::sin(1.0), 1e-6);
  EXPECT_NEAR(x[5], std::cos(1.0), 1e-6);
}

// 64 tokens that choose 8 of 384 each, independently: 384 (1 - (1 - 8 / 384)^64) = 284.2 experts on average.
TEST(RefOps, UniformRoutingIsADrawByTheTokensNumberAlone) {
  constexpr int64_t kTokens = 64, kExperts = 384;
  RefOps ops;
  RouterWeight router{.num_experts = kExperts, .hidden = 1, .top_k = 8, .num_groups = 8, .top_groups = 1};
  router.weight = std::vector<float>(kExperts, 1.0f);
  router.uniform = true;
  std::vector<float> x(kTokens, 0.5f);
  ops.begin_step();
  const Routing all = ops.route(view(x, kTokens, 1), router);
  const std::vector<int32_t> ids(all.ids, all.ids + kTokens * 8);
  std::vector<int32_t> uses(kExperts);
  for (int64_t i = 0; i < kTokens; ++i) {
    const std::set<int32_t> of_token(ids.begin() + i * 8, ids.begin() + i * 8 + 8);
    EXPECT_EQ(of_token.size(), 8u) << "token " << i;
    for (const int32_t id : of_token) ++uses[static_cast<size_t>(id)];
  }
  const auto touched = std::count_if(uses.begin(), uses.end(), [](int32_t n) { return n > 0; });
  EXPECT_NEAR(static_cast<double>(touched), 284.2, 15);
  EXPECT_LE(*std::max_element(uses.begin(), uses.end()), 8) << "1.33 on average";
  x.assign(kTokens, -3.0f);
  ops.begin_step();
  const Routing again = ops.route(view(x, 5, 1), router);
  EXPECT_TRUE(std::equal(again.ids, again.ids + 5 * 8, ids.begin())) << "whatever it says, and beside whom";
}

TEST(RefOps, RouterBiasSelectsOnlyAndTiesTakeTheLowerId) {
  RefOps ops;
  RouterWeight router{.num_experts = 4, .hidden = 1, .weight = {0, 0, 1, -9}, .bias = {0, 0, 0, 9}, .top_k = 2};
  std::vector<float> x = {1};
  const float top = 1 / (1 + std::exp(-1.0f)), biased = 1 / (1 + std::exp(9.0f));
  Routing r = ops.route(view(x, 1, 1), router);
  EXPECT_EQ(r.ids[0], 3);
  EXPECT_EQ(r.ids[1], 2);
  EXPECT_NEAR(r.weights[1], top / (top + biased), 1e-6);
  router.bias_in_weights = true;
  r = ops.route(view(x, 1, 1), router);
  EXPECT_EQ(r.ids[0], 3);
  EXPECT_NEAR(r.weights[0], (9 + biased) / (9 + biased + top), 1e-6);
  router.bias_in_weights = false;
  router.bias = {};
  router.normalize = false;
  router.scale = 2;
  r = ops.route(view(x, 1, 1), router);
  EXPECT_EQ(r.ids[0], 2);
  EXPECT_EQ(r.ids[1], 0);
  EXPECT_NEAR(r.weights[1], 1.0, 1e-6);
}

TEST(RefOps, RouterGroupsCountTheirTwoBest) {
  RefOps ops;
  // Group 0 has the single best expert, group 1 the best pair.
  RouterWeight router{.num_experts = 4, .hidden = 1, .weight = {3, -5, 2, 1}, .bias = {}, .top_k = 2, .num_groups = 2};
  std::vector<float> x = {1};
  const Routing r = ops.route(view(x, 1, 1), router);
  EXPECT_EQ(r.ids[0], 2);
  EXPECT_EQ(r.ids[1], 3);
}

TEST(RefOps, MoeSumsWeightedExperts) {
  RefOps ops;
  const std::vector<float> one = {1}, two = {2}, three = {3};
  const std::vector<RawExpert> experts = {{raw(one, 1, 1), raw(one, 1, 1), raw(two, 1, 1)},
                                          {raw(one, 1, 1), raw(two, 1, 1), raw(three, 1, 1)}};
  std::vector<float> x = {1};
  int32_t ids[] = {1, 0};
  float weights[] = {0.5f, 0.25f};
  const Tensor y = ops.moe_experts(view(x, 1, 1), {.num_tokens = 1, .top_k = 2, .ids = ids, .weights = weights},
                                   ops.pack_experts(experts));
  const float silu = 1 / (1 + std::exp(-1.0f));
  EXPECT_NEAR(y.row<float>(0)[0], 0.5f * 3 * silu * 2 + 0.25f * 2 * silu, 1e-5);
}

class Attention : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 100;
  MlaShape shape_{.heads = 2, .nope = 8, .rope = 4, .value = 6, .latent = 16, .softmax_scale = 0.5f};
  std::vector<float> kv_b_ = noise(1, 2 * 14 * 16);
  std::vector<float> q_ = noise(2, kTokens * 24), c_ = noise(3, kTokens * 16), k_ = noise(4, kTokens * 4);
  std::vector<int32_t> pages_ = {2, 0};

  // Attends to all tokens in pieces of `chunk`.
  std::vector<float> run(MlaForm form, int32_t chunk, LatentFormat format) {
    RefOps ops;
    const MlaUpWeight up = ops.pack_mla_up(raw(kv_b_, 28, 16), shape_);
    std::vector<uint8_t> pool(3 * 64 * 80, 0xFF);  // NaN wherever nothing is written
    const LatentLayer cache{.base = pool.data(),
                            .page_bytes = 64 * 80,
                            .row_bytes = latent_row_bytes(format, 16, 4),
                            .format = format,
                            .scale = format == LatentFormat::kF8E4M3 ? 0.25f : 1.0f};
    std::vector<float> out;
    for (int32_t at = 0; at < kTokens; at += chunk) {
      const int32_t n = std::min<int32_t>(chunk, kTokens - at);
      const SequenceRows rows{.num_tokens = n, .position = at, .pages = pages_.data(), .form = form};
      Batch batch;
      batch.sequences = std::span(&rows, 1);
      ops.begin_step();
      ops.write_latent(view(c_, kTokens, 16).row_range(at, n), view(k_, kTokens, 4).row_range(at, n), batch, cache);
      const Tensor y = ops.mla_attend(view(q_, kTokens, 24).row_range(at, n), up, shape_, batch, cache);
      out.insert(out.end(), y.row<float>(0), y.row<float>(0) + n * 12);
    }
    return out;
  }

  // Head g of token t, in double, from the formula.
  double expected(int64_t t, int64_t g, int64_t d) const {
    std::vector<double> p;
    double sum = 0, out = 0;
    for (int64_t s = 0; s <= t; ++s) {
      double score = 0;
      for (int64_t j = 0; j < 8; ++j) score += q_[t * 24 + g * 12 + j] * up(g * 14 + j, s);
      for (int64_t j = 0; j < 4; ++j) score += q_[t * 24 + g * 12 + 8 + j] * static_cast<double>(k_[s * 4 + j]);
      p.push_back(std::exp(0.5 * score));
      sum += p.back();
    }
    for (int64_t s = 0; s <= t; ++s) out += p[s] / sum * up(g * 14 + 8 + d, s);
    return out;
  }
  double up(int64_t row, int64_t s) const {
    double y = 0;
    for (int64_t l = 0; l < 16; ++l) y += static_cast<double>(kv_b_[row * 16 + l]) * c_[s * 16 + l];
    return y;
  }
};

TEST_F(Attention, BothFormsAndAnyChunksGiveTheFormula) {
  for (const MlaForm form : {MlaForm::kAbsorbed, MlaForm::kExpanded}) {
    for (const int32_t chunk : {1, 33, 64, 100}) {
      const std::vector<float> out = run(form, chunk, LatentFormat::kF32);
      for (const int64_t t : {0, 1, 63, 64, 99})
        for (int64_t j = 0; j < 12; ++j) ASSERT_NEAR(out[t * 12 + j], expected(t, j / 6, j % 6), 2e-6) << t;
    }
  }
}

// What a cached number loses: at most one part in 2^9 as bf16, in 2^5 as e4m3.
TEST_F(Attention, RoundedCachesAreCloseAndDifferent) {
  const std::vector<float> exact = run(MlaForm::kExpanded, 100, LatentFormat::kF32);
  for (const auto& [format, least, most] :
       {std::tuple(LatentFormat::kBF16, 1e-4, 3e-2), std::tuple(LatentFormat::kF8E4M3, 3e-2, 16 * 3e-2)}) {
    const std::vector<float> rounded = run(MlaForm::kExpanded, 100, format);
    double worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) worst = std::max<double>(worst, std::fabs(exact[i] - rounded[i]));
    EXPECT_GT(worst, least) << latent_format_name(format);
    EXPECT_LT(worst, most) << latent_format_name(format);
  }
}

// Bytes as other engines of DeepSeek's models have them: e4m3 latents, a scale for each 128 of them, rope in bf16.
TEST(LatentTiles, LieAsInDeepseeksRecord) {
  EXPECT_EQ(latent_row_bytes(LatentFormat::kF8Tiles, 512, 64), 656);
  constexpr size_t kLatent = 512, kRope = 64;
  std::vector<float> c = noise(5, kLatent), k_rope = noise(6, kRope);
  for (size_t j = 0; j < 128; ++j) c[128 + j] *= 1e-3f, c[256 + j] = 0, c[384 + j] *= 1e4f;
  c[384 + 17] = -7e4f;
  std::vector<uint8_t> page(64 * 656, 0xEE);
  const LatentLayer cache{
      .base = page.data(), .page_bytes = 64 * 656, .row_bytes = 656, .format = LatentFormat::kF8Tiles};
  const int32_t page_of_block = 0;
  const SequenceRows rows{.num_tokens = 1, .position = 2, .pages = &page_of_block};
  Batch batch;
  batch.sequences = {&rows, 1};
  RefOps().write_latent(view(c, 1, kLatent), view(k_rope, 1, kRope), batch, cache);
  const uint8_t* record = page.data() + 2 * 656;
  for (size_t tile = 0; tile < 4; ++tile) {
    float largest = 0, scale = 0;
    for (size_t j = 0; j < 128; ++j) largest = std::max(largest, std::fabs(c[tile * 128 + j]));
    std::memcpy(&scale, record + 512 + 4 * tile, 4);
    EXPECT_EQ(scale, tile == 2 ? FLT_MIN : largest / 448) << tile;
    for (size_t j = tile * 128; j < (tile + 1) * 128; ++j) ASSERT_EQ(record[j], f32_to_f8e4m3(c[j] / scale)) << j;
  }
  EXPECT_EQ(record[384 + 17], 0xFE) << "-448";
  for (size_t j = 0; j < kRope; ++j) {
    uint16_t bits = 0;
    std::memcpy(&bits, record + 528 + 2 * j, 2);
    ASSERT_EQ(bits, f32_to_bf16(k_rope[j])) << j;
  }
  EXPECT_EQ(std::count(page.begin(), page.begin() + 2 * 656, 0xEE), 2 * 656);
  EXPECT_EQ(std::count(page.begin() + 3 * 656, page.end(), 0xEE), 61 * 656);
}

}  // namespace
}  // namespace perigee

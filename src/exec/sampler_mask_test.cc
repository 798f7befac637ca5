// Sampling under masks, whatever a word of them says and wherever the vocabulary ends.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "base/rng.h"
#include "exec/sampler.h"

namespace perigee {
namespace {

bool is_open(const std::vector<uint32_t>& mask, int32_t id) {
  return (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1u) != 0;
}

// Words that allow all of their ids, none, or some.
std::vector<uint32_t> random_mask(Rng& rng, int64_t vocab) {
  std::vector<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32));
  for (uint32_t& word : mask) word = std::array{0u, ~0u, static_cast<uint32_t>(rng.next())}[rng.below(3)];
  return mask;
}

TEST(SamplerMask, TheLargestAllowedLogitWins) {
  Rng rng(3);
  for (const int64_t vocab : {1, 3, 31, 32, 33, 63, 100, 131, 2048, 2051}) {
    SCOPED_TRACE(vocab);
    Sampler sampler(vocab);
    for (int round = 0; round < 50; ++round) {
      std::vector<float> logits(static_cast<size_t>(vocab));
      const float steps = round % 4 < 2 ? 1000.0f : 4.0f;  // of which many are equal
      for (float& logit : logits) logit = std::floor(static_cast<float>(rng.unit()) * steps) / steps * 10 - 5;
      const std::vector<uint32_t> mask = random_mask(rng, vocab);
      SamplingParams params;
      params.temperature = 0;
      if (round % 2 == 1) params.logit_bias = {{static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocab))), 20.0f}};
      int32_t best = -1;
      const auto biased = [&](int32_t id) {
        const bool is_listed = !params.logit_bias.empty() && params.logit_bias[0].first == id;
        return logits[static_cast<size_t>(id)] + (is_listed ? 20.0f : 0.0f);
      };
      for (int32_t id = 0; id < vocab; ++id)
        if (is_open(mask, id) && (best < 0 || biased(id) > biased(best))) best = id;
      const SampledToken token = sampler.sample(
          {.logits = logits, .params = &params, .num_outputs = round, .output_counts = {}, .seen = {}, .mask = mask});
      ASSERT_EQ(token.finite, best >= 0);
      if (best >= 0) {
        ASSERT_EQ(token.id, best);
      }
    }
  }
}

// A model that gives such logits is at fault, whatever the mask hides of them.
TEST(SamplerMask, ARowIsNotFiniteWhereverItsFaultIs) {
  constexpr int64_t kIds = 75;
  Sampler sampler(kIds);
  const std::vector<uint32_t> mask = {0u, 0x80000001u, 0xFFu};
  for (const float temperature : {0.0f, 1.0f})
    for (const int32_t id : {3, 33, 63, 70, 74})
      for (const float fault : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        std::vector<float> logits(kIds, 1.0f);
        logits[static_cast<size_t>(id)] = fault;
        SamplingParams params;
        params.temperature = temperature;
        EXPECT_FALSE(sampler.sample({.logits = logits, .params = &params, .mask = mask}).finite) << id;
      }
}

TEST(SamplerMask, DrawsReachEveryAllowedIdAndNoOther) {
  constexpr int64_t kIds = 75;
  Rng rng(4);
  Sampler sampler(kIds);
  const std::vector<float> logits(kIds, 1.0f);
  const std::vector<uint32_t> mask = {0u, 0x80000001u, 0xFFFFFFFFu};
  SamplingParams params;
  std::set<int32_t> drawn;
  for (int i = 0; i < 500; ++i)
    drawn.insert(
        sampler
            .sample(
                {.logits = logits, .params = &params, .num_outputs = i, .output_counts = {}, .seen = {}, .mask = mask})
            .id);
  std::set<int32_t> wanted = {32, 63};
  for (int32_t id = 64; id < kIds; ++id) wanted.insert(id);
  EXPECT_EQ(drawn, wanted);
}

}  // namespace
}  // namespace perigee

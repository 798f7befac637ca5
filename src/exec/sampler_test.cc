#include "exec/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

SamplingParams greedy() {
  SamplingParams p;
  p.temperature = 0;
  return p;
}

SampledToken sample(const std::vector<float>& logits, const SamplingParams& params, int32_t num_outputs = 0) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  return sampler.sample(
      {.logits = logits, .params = &params, .num_outputs = num_outputs, .output_counts = {}, .seen = {}, .mask = {}});
}

// The kept distribution by definition: a full sort in double.
std::map<int32_t, double> distribution(const std::vector<float>& logits, const SamplingParams& p) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  const double max = logits[static_cast<size_t>(order[0])];
  const auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[static_cast<size_t>(id)]) - max) / static_cast<double>(p.temperature));
  };
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < order.size()) order.resize(static_cast<size_t>(p.top_k));
  double total = 0;
  for (const int32_t id : order) total += weight(id);
  std::map<int32_t, double> kept;
  double walked = 0;
  for (const int32_t id : order) {
    if (weight(id) < static_cast<double>(p.min_p)) break;
    if (p.top_p < 1 && walked >= total * static_cast<double>(p.top_p)) break;
    kept[id] = weight(id);
    walked += weight(id);
  }
  for (auto& [id, w] : kept) w /= walked;
  return kept;
}

std::vector<float> random_logits(int64_t vocab, float spread, uint64_t seed) {
  std::vector<float> out(static_cast<size_t>(vocab));
  for (size_t i = 0; i < out.size(); ++i) out[i] = -spread * std::log(random_unit(seed, i));
  return out;
}

// Pearson's test at 10^5 draws; kept ids expected less than 8 times are pooled.
void expect_distribution(const std::vector<float>& logits, SamplingParams p) {
  const std::map<int32_t, double> want = distribution(logits, p);
  Sampler sampler(static_cast<int64_t>(logits.size()));
  constexpr int kDraws = 100000;
  std::map<int32_t, int> got;
  for (int i = 0; i < kDraws; ++i) {
    p.seed = static_cast<uint64_t>(i / 100);
    const SampledToken t = sampler.sample(
        {.logits = logits, .params = &p, .num_outputs = i % 100, .output_counts = {}, .seen = {}, .mask = {}});
    ASSERT_TRUE(want.contains(t.id)) << t.id << " is not kept";
    ++got[t.id];
  }
  double chi2 = 0, rare_want = 0, rare_got = 0;
  int freedom = -1;
  for (const auto& [id, probability] : want) {
    const double expected = probability * kDraws;
    if (expected < 8) {
      rare_want += expected;
      rare_got += got[id];
      continue;
    }
    chi2 += std::pow(got[id] - expected, 2) / expected;
    ++freedom;
  }
  if (rare_want >= 8) {
    chi2 += std::pow(rare_got - rare_want, 2) / rare_want;
    ++freedom;
  }
  // Mean + 4 standard deviations of chi^2; the draws are fixed, so this never flickers.
  EXPECT_LT(chi2, freedom + 4 * std::sqrt(2.0 * freedom + 1)) << freedom << " degrees of freedom";
}

TEST(Sampler, greedy_takes_the_highest_and_the_lowest_id_on_a_tie) {
  std::vector<float> logits(1000, -2.0f);
  logits[700] = logits[123] = 5.0f;
  EXPECT_EQ(sample(logits, greedy()).id, 123);
  logits[999] = 5.5f;
  EXPECT_EQ(sample(logits, greedy()).id, 999);
}

TEST(Sampler, draws_follow_the_distribution) {
  const std::vector<float> logits = random_logits(60, 1.0f, 1);
  SamplingParams p;
  expect_distribution(logits, p);
  p.temperature = 0.5f;
  expect_distribution(logits, p);
  p.temperature = 3.0f;
  expect_distribution(logits, p);
}

TEST(Sampler, each_filter_keeps_its_prefix) {
  const std::vector<float> logits = random_logits(200, 1.0f, 2);
  SamplingParams p;
  p.top_k = 7;
  expect_distribution(logits, p);
  p = {};
  p.top_p = 0.6f;
  expect_distribution(logits, p);
  p = {};
  p.min_p = 0.1f;
  expect_distribution(logits, p);
  p = {};
  p.top_k = 40, p.top_p = 0.8f, p.min_p = 0.02f, p.temperature = 1.3f;
  expect_distribution(logits, p);
}

TEST(Sampler, top_k_one_is_greedy) {
  const std::vector<float> logits = random_logits(5000, 2.0f, 3);
  SamplingParams p;
  p.top_k = 1;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(sample(logits, p, i).id, sample(logits, greedy()).id);
}

TEST(Sampler, ties_at_the_edge_of_top_k_keep_the_lower_ids) {
  const std::vector<float> logits(64, 1.0f);
  SamplingParams p;
  p.top_k = 5;
  expect_distribution(logits, p);
}

// The ids that draws give, all of which are likely.
std::set<int32_t> drawn(const std::vector<float>& logits, const SamplingParams& params) {
  std::set<int32_t> ids;
  for (int i = 0; i < 400; ++i) ids.insert(sample(logits, params, i).id);
  return ids;
}

// A float x with x * log2(e) = -1, as the sampler computes it: its weight is 1/2 exactly.
float half() {
  float x = -0.693146f;
  while (x * 1.44269504f != -1.0f) x = std::nextafter(x, -1.0f);
  return x;
}

TEST(Sampler, top_p_ends_with_the_id_that_reaches_it) {
  SamplingParams p;
  p.top_p = 0.5f;
  EXPECT_EQ(drawn({0, 0, 0, 0}, p), (std::set<int32_t>{0, 1})) << "within a bucket";
  const float h = half();
  EXPECT_EQ(drawn({h, 0, h, 0, h, h}, p), (std::set<int32_t>{1, 3})) << "at the end of a bucket";
  p.top_p = 0.75f;
  EXPECT_EQ(drawn({h, 0, h, 0, h, h}, p), (std::set<int32_t>{0, 1, 2, 3})) << "within the next one";
}

TEST(Sampler, min_p_keeps_what_is_as_likely_as_it_says) {
  SamplingParams p;
  p.min_p = 1.0f;
  EXPECT_EQ(drawn({0, 0, -0.001f, 0}, p), (std::set<int32_t>{0, 1, 3}));
  p.min_p = 0.5f;
  const float floor = std::log(0.5f);
  EXPECT_EQ(drawn({0, floor, std::nextafter(floor, -1.0f), floor}, p), (std::set<int32_t>{0, 1, 3}));
}

// -1 begins the 33rd bucket: the one before it ends the walk only where nothing lies at the floor itself.
TEST(Sampler, min_p_keeps_ties_at_the_begin_of_a_bucket) {
  SamplingParams p;
  p.min_p = std::exp(-1.0f);
  while (std::log(p.min_p) > -1.0f) p.min_p = std::nextafter(p.min_p, 0.0f);
  while (std::log(p.min_p) < -1.0f) p.min_p = std::nextafter(p.min_p, 1.0f);
  ASSERT_EQ(std::log(p.min_p), -1.0f);
  EXPECT_EQ(drawn({0, -0.99f, -1.0f, std::nextafter(-1.0f, -2.0f)}, p), (std::set<int32_t>{0, 1, 2}));
}

TEST(Sampler, a_seed_repeats_and_counters_differ) {
  const std::vector<float> logits = random_logits(4096, 1.0f, 4);
  SamplingParams p;
  p.temperature = 2.0f;
  p.seed = 77;
  std::vector<int32_t> first, second;
  for (int i = 0; i < 20; ++i) first.push_back(sample(logits, p, i).id);
  for (int i = 0; i < 20; ++i) second.push_back(sample(logits, p, i).id);
  EXPECT_EQ(first, second);
  std::sort(first.begin(), first.end());
  EXPECT_GT(std::unique(first.begin(), first.end()) - first.begin(), 10);
}

TEST(Sampler, bias_mask_and_min_tokens) {
  std::vector<float> logits(100, 0.0f);
  logits[10] = 4, logits[20] = 3, logits[30] = 2;
  SamplingParams p = greedy();
  p.logit_bias = {{30, 5.0f}};
  EXPECT_EQ(sample(logits, p).id, 30);
  p.logit_bias = {{10, -100.0f}};
  EXPECT_EQ(sample(logits, p).id, 20);
  p = greedy();
  p.stop_ids = {10};
  p.min_tokens = 3;
  EXPECT_EQ(sample(logits, p, 2).id, 20);
  EXPECT_EQ(sample(logits, p, 3).id, 10);
  const std::vector<uint32_t> mask = {1u << 30, 0, 1u, 0};
  Sampler sampler(100);
  p = greedy();
  EXPECT_EQ(
      sampler.sample({.logits = logits, .params = &p, .num_outputs = 0, .output_counts = {}, .seen = {}, .mask = mask})
          .id,
      30);
  SamplingParams hot;
  hot.temperature = 100;
  for (int i = 0; i < 50; ++i) {
    const int32_t id =
        sampler
            .sample({.logits = logits, .params = &hot, .num_outputs = i, .output_counts = {}, .seen = {}, .mask = mask})
            .id;
    EXPECT_TRUE(id == 30 || id == 64) << id;
  }
  const std::vector<uint32_t> nothing(4, 0);
  EXPECT_FALSE(
      sampler
          .sample({.logits = logits, .params = &p, .num_outputs = 0, .output_counts = {}, .seen = {}, .mask = nothing})
          .finite);
}

TEST(Sampler, a_bias_is_added) {
  const std::vector<float> logits = {1, 5, 3};
  SamplingParams p = greedy();
  p.logit_bias = {{2, 1.5f}};
  EXPECT_EQ(sample(logits, p).id, 1) << "4.5 is less than 5";
  p.logit_bias = {{2, 2.5f}};
  EXPECT_EQ(sample(logits, p).id, 2);
  p.logit_bias = {{0, 2.5f}, {0, 2.0f}};
  EXPECT_EQ(sample(logits, p).id, 0) << "twice the same id: 5.5";
}

TEST(Sampler, a_single_occurrence_has_the_presence_penalty) {
  const std::vector<float> logits = {5, 4.5f, 0};
  SamplingParams p = greedy();
  p.presence_penalty = 1;
  std::vector<uint16_t> counts = {1, 0, 0};
  Sampler sampler(3);
  const auto sampled = [&] {
    return sampler
        .sample({.logits = logits, .params = &p, .num_outputs = 1, .output_counts = counts, .seen = {}, .mask = {}})
        .id;
  };
  EXPECT_EQ(sampled(), 1) << "4 is less than 4.5";
  counts = {3, 1, 0};
  EXPECT_EQ(sampled(), 0) << "once, however often: 4 and 3.5";
}

// Equal logits have weights of exactly 1, so the edges of top-p and min-p are met exactly.
TEST(Sampler, exact_edges_of_top_p_and_min_p) {
  const std::vector<float> logits = {2, 2, 2, 2};
  const auto kept = [&](const SamplingParams& params) {
    std::set<int32_t> ids;
    for (int32_t i = 0; i < 200; ++i) ids.insert(sample(logits, params, i).id);
    return ids;
  };
  SamplingParams p;
  p.top_p = 0.5f;
  EXPECT_EQ(kept(p), (std::set<int32_t>{0, 1})) << "half of the mass is reached, not passed";
  p.top_p = 1;
  p.min_p = 1;
  EXPECT_EQ(kept(p), (std::set<int32_t>{0, 1, 2, 3})) << "as likely as the most likely one is enough";
}

TEST(Sampler, penalties) {
  std::vector<float> logits(64, -1.0f);
  logits[1] = 4.0f, logits[2] = 3.0f, logits[3] = 2.5f;
  std::vector<uint16_t> counts(64);
  counts[1] = 2;
  std::vector<uint8_t> seen(8);
  seen[0] = 0b110;  // ids 1 and 2
  Sampler sampler(64);
  SamplingParams p = greedy();
  const auto pick = [&] {
    return sampler
        .sample({.logits = logits, .params = &p, .num_outputs = 2, .output_counts = counts, .seen = seen, .mask = {}})
        .id;
  };
  p.presence_penalty = 0.9f;
  EXPECT_EQ(pick(), 1);
  p.presence_penalty = 1.1f;
  EXPECT_EQ(pick(), 2);
  p = greedy();
  p.frequency_penalty = 0.6f;  // twice
  EXPECT_EQ(pick(), 2);
  p = greedy();
  p.repetition_penalty = 2.0f;  // 4 -> 2, 3 -> 1.5
  EXPECT_EQ(pick(), 3);
  logits.assign(64, -3.0f);
  logits[1] = -1.0f;
  p.repetition_penalty = 4.0f;  // -1 -> -4
  EXPECT_NE(pick(), 1);
}

// From the first time that an id was given; counts do not end at 255.
TEST(Sampler, penalties_by_count) {
  std::vector<float> logits(8, 0.0f);
  Sampler sampler(8);
  SamplingParams p = greedy();
  std::vector<uint16_t> counts(8);
  const auto pick = [&] {
    return sampler
        .sample({.logits = logits, .params = &p, .num_outputs = 1, .output_counts = counts, .seen = {}, .mask = {}})
        .id;
  };
  logits[3] = 1.0f, logits[5] = 0.5f;
  p.presence_penalty = 1.0f;
  EXPECT_EQ(pick(), 3);
  counts[3] = 1;
  EXPECT_EQ(pick(), 5);
  p = greedy();
  p.frequency_penalty = 0.0625f;
  counts[3] = 256, logits[3] = 16.25f;
  EXPECT_EQ(pick(), 5) << "256 / 16 is more than the lead of 15.75";
  counts[3] = 251;
  EXPECT_EQ(pick(), 3);
}

TEST(Sampler, bad_rows_are_reported_and_ids_stay_in_range) {
  const float odd[] = {kNan, kInf, -kInf, 0.0f, -0.0f, 3e38f, -3e38f, 1e-45f};
  Rng rng(5);
  for (int round = 0; round < 4000; ++round) {
    std::vector<float> logits(static_cast<size_t>(rng.between(1, 70)));
    bool bad = false, all_low = true;
    const bool wild = rng.chance(0.3);
    for (float& x : logits) {
      x = rng.chance(0.5) ? odd[wild ? rng.below(8) : 2 + rng.below(6)] : rng.unit() * 8;
      bad |= std::isnan(x) || x == kInf;
      all_low &= x == -kInf;
    }
    SamplingParams p;
    const float temperatures[] = {0, 1e-45f, 1e-6f, 0.7f, 1e30f};
    p.temperature = temperatures[rng.below(5)];
    p.top_k = static_cast<int32_t>(rng.below(100));
    p.top_p = rng.chance(0.5) ? 1.0f : std::max(rng.unit(), 1e-7f);
    p.min_p = rng.chance(0.5) ? 0.0f : rng.chance(0.1) ? 1.0f : rng.unit();
    p.logprobs = static_cast<int32_t>(rng.between(-1, 25));
    const SampledToken t = sample(logits, p, round);
    ASSERT_GE(t.id, 0);
    ASSERT_LT(t.id, static_cast<int32_t>(logits.size()));
    ASSERT_EQ(t.finite, !bad && !all_low);
    if (t.finite) {
      ASSERT_GT(logits[static_cast<size_t>(t.id)], -kInf);
    }
  }
}

TEST(Sampler, logprobs_are_log_softmax) {
  std::vector<float> logits = random_logits(3000, 2.0f, 6);
  logits[5] = logits[2500] = 40.0f;
  double total = 0;
  for (const float x : logits) total += std::exp(static_cast<double>(x) - 40.0);
  const auto want = [&](int32_t id) {
    return static_cast<double>(logits[static_cast<size_t>(id)]) - 40.0 - std::log(total);
  };
  Sampler sampler(3000);
  const TokenLogprobs out = sampler.token_logprobs(logits, 77, 20);
  EXPECT_NEAR(out.logprob, want(77), 1e-5);
  EXPECT_EQ(out.rank, 1 + std::count_if(logits.begin(), logits.end(), [&](float x) { return x > logits[77]; }));
  ASSERT_EQ(out.top.size(), 20u);
  EXPECT_EQ(out.top[0].first, 5);
  EXPECT_EQ(out.top[1].first, 2500);
  std::vector<int32_t> order(3000);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(out.top[i].first, order[i]);
    EXPECT_NEAR(out.top[i].second, want(order[i]), 1e-5);
  }
}

TEST(Sampler, top_logprobs_keep_the_lower_ids_of_a_tie) {
  const std::vector<float> logits = {1, 2, 1, 2, 3, 1, 2, 1};
  Sampler sampler(8);
  const auto ids = [&](int32_t top) {
    std::vector<int32_t> out;
    for (const auto& [id, logprob] : sampler.token_logprobs(logits, 4, top).top) out.push_back(id);
    return out;
  };
  EXPECT_EQ(ids(2), (std::vector<int32_t>{4, 1}));
  EXPECT_EQ(ids(3), (std::vector<int32_t>{4, 1, 3}));
  EXPECT_EQ(ids(5), (std::vector<int32_t>{4, 1, 3, 6, 0}));
  EXPECT_EQ(ids(6), (std::vector<int32_t>{4, 1, 3, 6, 0, 2}));
  EXPECT_EQ(ids(20), (std::vector<int32_t>{4, 1, 3, 6, 0, 2, 5, 7}));
  EXPECT_EQ(sampler.token_logprobs(logits, 6, 0).rank, 2) << "equal ones do not count";
}

TEST(Sampler, sampled_logprobs_ignore_penalties_and_temperature) {
  const std::vector<float> logits = random_logits(500, 1.0f, 7);
  SamplingParams p;
  p.temperature = 0.3f;
  p.logit_bias = {{9, 50.0f}};
  p.logprobs = 3;
  const SampledToken t = sample(logits, p);
  EXPECT_EQ(t.id, 9);
  Sampler sampler(500);
  const TokenLogprobs plain = sampler.token_logprobs(logits, 9, 3);
  EXPECT_EQ(t.logprobs.logprob, plain.logprob);
  EXPECT_EQ(t.logprobs.top, plain.top);
  p.logprobs = 0;
  EXPECT_TRUE(sample(logits, p).logprobs.top.empty());
}

TEST(Sampler, prints_its_speed) {
  constexpr int64_t kVocab = 163840;
  const std::vector<float> logits = random_logits(kVocab, 1.0f, 8);
  Sampler sampler(kVocab);
  SamplingParams hot, nucleus = hot;
  nucleus.top_p = 0.95f, nucleus.top_k = 50;
  const std::pair<const char*, SamplingParams> cases[] = {
      {"greedy", greedy()}, {"plain", hot}, {"top-k 50, top-p 0.95", nucleus}};
  for (const auto& [name, p] : cases) {
    double best = 1e9;
    for (int i = 0; i < 20; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      sampler.sample({.logits = logits, .params = &p, .num_outputs = i, .output_counts = {}, .seen = {}, .mask = {}});
      best =
          std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    std::printf("vocabulary 163840, %s: %.1f us\n", name, best);
    EXPECT_LT(best, 50000);
  }
}

}  // namespace
}  // namespace perigee

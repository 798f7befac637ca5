#include "exec/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/rng.h"

namespace perigee {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr int64_t kLanes = 32;            // independent lanes of a reduction, so that it becomes vector code
constexpr float kMinTemperature = 1e-5f;  // below: greedy, the distribution has collapsed within float's range

struct RowMax {
  float max = -kInfinity;
  bool finite = true;  // no NaN, no +inf, not all -inf
};

RowMax row_max(std::span<const float> x) {
  float high[kLanes];
  uint32_t bad[kLanes] = {};
  std::fill_n(high, kLanes, -kInfinity);
  const auto n = static_cast<int64_t>(x.size());
  const float* p = x.data();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const float v = p[i + j];
      high[j] = v > high[j] ? v : high[j];
      bad[j] |= v <= kMaxFloat ? 0u : 1u;  // true of NaN and +inf
    }
  }
  for (; i < n; ++i) {
    high[0] = p[i] > high[0] ? p[i] : high[0];
    bad[0] |= p[i] <= kMaxFloat ? 0u : 1u;
  }
  RowMax out;
  uint32_t any_bad = 0;
  for (int64_t j = 0; j < kLanes; ++j) {
    out.max = std::max(out.max, high[j]);
    any_bad |= bad[j];
  }
  out.finite = any_bad == 0 && out.max >= -kMaxFloat;
  return out;
}

int32_t first_of(std::span<const float> x, float value) {
  return static_cast<int32_t>(std::find(x.begin(), x.end(), value) - x.begin());
}

// e^t for t <= 0, relative error < 1e-6, 0 below -87; vectorises, unlike std::exp. Series of 2^r on [-1/2, 1/2].
inline float exp_negative(float t) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const float scaled = (t < -87.0f ? -87.0f : t) * 1.44269504f;
  const float shifted = scaled + kRound;
  const float r = scaled - (shifted - kRound);
  float p = 1.5403530e-4f;
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  const uint32_t exponent = (__builtin_bit_cast(uint32_t, shifted) + 127u) << 23;
  return t < -87.0f ? 0.0f : p * __builtin_bit_cast(float, exponent);
}

// log(sum exp(x - max)) with the sum in double.
double log_sum(std::span<const float> x, float max) {
  double total = 0;
  for (size_t i = 0; i < x.size(); i += kLanes) {
    const size_t count = std::min<size_t>(kLanes, x.size() - i);
    float e[kLanes];
    for (size_t j = 0; j < count; ++j) e[j] = exp_negative(x[i + j] - max);
    for (size_t j = 0; j < count; ++j) total += e[j];
  }
  return std::log(total);
}

}  // namespace

Sampler::Sampler(int64_t vocab) : vocab_(vocab), work_(static_cast<size_t>(vocab)) {
  CHECK(vocab > 0);
  sorted_.reserve(static_cast<size_t>(vocab));
}

SampledToken Sampler::sample(const SamplerRow& row) {
  CHECK(static_cast<int64_t>(row.logits.size()) == vocab_, row.logits.size(), " logits for a vocabulary of ", vocab_);
  const SamplingParams& params = *row.params;
  SampledToken out;
  RowMax top = row_max(row.logits);
  out.finite = top.finite;
  if (!out.finite) return out;
  const std::span<const float> logits = adjust(row);
  if (logits.data() != row.logits.data()) top = row_max(logits);
  out.finite = top.finite;
  if (!out.finite) return out;
  if (params.temperature < kMinTemperature) {
    out.id = first_of(logits, top.max);
  } else {
    const float scale = 1.0f / params.temperature;
    for (size_t i = 0; i < work_.size(); ++i) work_[i] = (logits[i] - top.max) * scale;
    out.id = draw(params, random_unit(mix64(params.seed), static_cast<uint64_t>(row.num_outputs)));
  }
  if (params.logprobs >= 0) out.logprobs = token_logprobs(row.logits, out.id, params.logprobs);
  return out;
}

// The row's logits with everything before temperature applied: the row itself when nothing is to do, else work_.
std::span<const float> Sampler::adjust(const SamplerRow& row) {
  const SamplingParams& params = *row.params;
  const bool too_short = row.num_outputs < params.min_tokens && !params.stop_ids.empty();
  if (params.logit_bias.empty() && row.mask.empty() && !too_short && !params.has_penalties()) return row.logits;
  std::copy(row.logits.begin(), row.logits.end(), work_.begin());
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= 0 && id < vocab_) work_[static_cast<size_t>(id)] += bias;
  }
  if (!row.mask.empty()) {
    CHECK(static_cast<int64_t>(row.mask.size()) * 32 >= vocab_);
    for (size_t i = 0; i < work_.size(); ++i) {
      work_[i] = (row.mask[i / 32] >> (i % 32) & 1u) != 0 ? work_[i] : -kInfinity;
    }
  }
  if (too_short) {
    for (const int32_t id : params.stop_ids) {
      if (id >= 0 && id < vocab_) work_[static_cast<size_t>(id)] = -kInfinity;
    }
  }
  if (params.has_penalties()) penalise(row);
  return work_;
}

// Repetition penalty: Keskar et al. 2019 (CTRL), section 4.1, with the sign rule of its common implementations.
// Frequency and presence: subtracted per occurrence and once.
void Sampler::penalise(const SamplerRow& row) {
  const SamplingParams& params = *row.params;
  if (params.repetition_penalty != 1.0f && !row.seen.empty()) {
    CHECK(static_cast<int64_t>(row.seen.size()) * 8 >= vocab_);
    const float penalty = params.repetition_penalty, reward = 1.0f / penalty;
    for (size_t i = 0; i < work_.size(); ++i) {
      if ((row.seen[i / 8] >> (i % 8) & 1u) != 0) work_[i] *= work_[i] > 0 ? reward : penalty;
    }
  }
  if (!row.output_counts.empty()) {
    CHECK(static_cast<int64_t>(row.output_counts.size()) == vocab_);
    for (size_t i = 0; i < work_.size(); ++i) {
      const auto count = static_cast<float>(row.output_counts[i]);
      work_[i] -= params.frequency_penalty * count + (count > 0 ? params.presence_penalty : 0.0f);
    }
  }
}

// work_ holds exponents. Top-k, top-p and min-p each keep a prefix of the walking order, and the draw is the inverse
// of the distribution function along it.
int32_t Sampler::draw(const SamplingParams& params, float uniform) {
  fill_buckets();
  constexpr double kAll = std::numeric_limits<double>::infinity();
  Limits keep{.mass = kAll, .count = vocab_ + 1, .exponent = -kMaxFloat};
  if (params.top_k > 0) keep.count = std::min<int64_t>(params.top_k, vocab_);
  const Walk all = walk(keep);
  if (params.top_p < 1.0f) keep.mass = all.mass * static_cast<double>(params.top_p);
  if (params.min_p > 0.0f) keep.exponent = std::log(params.min_p);
  const bool narrower = params.top_p < 1.0f || params.min_p > 0.0f;
  const Walk kept = narrower ? walk(keep) : all;
  const Walk drawn =
      walk({.mass = kept.mass * static_cast<double>(uniform), .count = kept.count, .exponent = -kMaxFloat});
  DCHECK(drawn.id >= 0 && drawn.id < vocab_);
  return drawn.id;
}

void Sampler::fill_buckets() {
  buckets_.fill({});
  constexpr auto kLast = static_cast<float>(kNumBuckets - 1);
  for (size_t i = 0; i < work_.size(); i += kLanes) {
    const size_t count = std::min<size_t>(kLanes, work_.size() - i);
    float weight[kLanes];
    int32_t bucket[kLanes];
    for (size_t j = 0; j < count; ++j) {
      const float t = work_[i + j];
      weight[j] = exp_negative(t);
      bucket[j] = static_cast<int32_t>(std::min(-t * kBucketsPerNat, kLast));
    }
    for (size_t j = 0; j < count; ++j) {
      if (work_[i + j] == -kInfinity) continue;  // not to be chosen
      Bucket& b = buckets_[static_cast<size_t>(bucket[j])];
      b.mass += weight[j];
      ++b.count;
    }
  }
}

Sampler::Walk Sampler::walk(const Limits& limits) {
  Walk out;
  const bool no_floor = limits.exponent == -kMaxFloat;
  const float floor = -limits.exponent * kBucketsPerNat;  // in buckets
  for (int b = 0; b < kNumBuckets; ++b) {
    const Bucket& bucket = buckets_[static_cast<size_t>(b)];
    if (bucket.count == 0) continue;
    // The last bucket has no lower end.
    const bool above_floor = no_floor || (b + 1 < kNumBuckets && static_cast<float>(b + 1) < floor);
    if (!above_floor || out.mass + bucket.mass >= limits.mass || out.count + bucket.count >= limits.count) {
      walk_bucket(b, limits, out);
      const bool at_floor = !no_floor && static_cast<float>(b + 1) >= floor;
      if (out.mass >= limits.mass || out.count >= limits.count || at_floor) return out;
      continue;
    }
    out.mass += bucket.mass;
    out.count += bucket.count;
  }
  return out;
}

void Sampler::walk_bucket(int bucket, const Limits& limits, Walk& walk) {
  gather_bucket(bucket);
  for (const int32_t id : sorted_) {
    const float t = work_[static_cast<size_t>(id)];
    if (t < limits.exponent && walk.count > 0) return;
    walk.mass += static_cast<double>(exp_negative(t));
    ++walk.count;
    walk.id = id;
    if (walk.mass >= limits.mass || walk.count >= limits.count) return;
  }
}

void Sampler::gather_bucket(int bucket) {
  sorted_.clear();
  constexpr auto kLast = static_cast<float>(kNumBuckets - 1);
  for (size_t i = 0; i < work_.size(); ++i) {
    const float t = work_[i];
    if (t == -kInfinity) continue;
    if (static_cast<int>(std::min(-t * kBucketsPerNat, kLast)) == bucket) sorted_.push_back(static_cast<int32_t>(i));
  }
  std::sort(sorted_.begin(), sorted_.end(), [this](int32_t a, int32_t b) {
    const float ta = work_[static_cast<size_t>(a)], tb = work_[static_cast<size_t>(b)];
    return ta > tb || (ta == tb && a < b);
  });
}

TokenLogprobs Sampler::token_logprobs(std::span<const float> logits, int32_t id, int32_t top) {
  CHECK(static_cast<int64_t>(logits.size()) == vocab_ && id >= 0 && id < vocab_);
  const float max = row_max(logits).max;
  const double log_total = log_sum(logits, max);
  const auto logprob = [&](float x) { return static_cast<float>(static_cast<double>(x) - max - log_total); };
  const float own = logits[static_cast<size_t>(id)];
  TokenLogprobs out{.id = id, .logprob = logprob(own), .rank = 1, .top = {}};
  for (const float x : logits) out.rank += x > own ? 1 : 0;
  const auto wanted = static_cast<size_t>(std::clamp<int64_t>(top, 0, vocab_));
  if (wanted == 0) return out;
  // A heap whose front is the least of the best so far; most logits fail the one comparison with it.
  const auto better = [](const std::pair<int32_t, float>& a, const std::pair<int32_t, float>& b) {
    return a.second > b.second || (a.second == b.second && a.first < b.first);
  };
  top_.clear();
  for (int32_t i = 0; i < vocab_; ++i) {
    const float x = logits[static_cast<size_t>(i)];
    if (top_.size() == wanted) {
      if (!(x > top_.front().second)) continue;
      std::pop_heap(top_.begin(), top_.end(), better);
      top_.pop_back();
    }
    top_.emplace_back(i, x);
    std::push_heap(top_.begin(), top_.end(), better);
  }
  std::sort_heap(top_.begin(), top_.end(), better);
  for (auto& [token, x] : top_) x = logprob(x);
  out.top = top_;
  return out;
}

}  // namespace perigee

#include "exec/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/rng.h"

namespace perigee {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr float kMaxTemperature = 1e30f;
constexpr float kMinTemperature = 1e-5f;  // below: greedy, the distribution has collapsed within float's range

bool is_greedy(const SamplingParams& params) {
  return params.temperature < kMinTemperature;
}

// Whether stop ids are not allowed yet.
bool is_too_short(const SamplingParams& params, int32_t num_outputs) {
  return num_outputs < params.min_tokens && !params.stop_ids.empty();
}

struct RowMax {
  float max = -kInfinity;
  bool good = true;                                          // no NaN, no +inf
  bool finite() const { return good && max >= -kMaxFloat; }  // and not all -inf
};

// Four floats, written out because a maximum and a branch-free search are not turned into vector code by themselves.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;

F4 load4(const float* p) {
  F4 out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}

// x[i ... i + 3], -inf beyond the end.
F4 load4_tail(std::span<const float> x, size_t i) {
  F4 out = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  std::memcpy(&out, x.data() + i, std::min(x.size() - i, kLanes) * sizeof(float));
  return out;
}

// f(i, four values from i on) over a row, the last of them padded with -inf.
template <typename F>
void for_fours(std::span<const float> x, F&& f) {
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) f(i, load4(x.data() + i));
  if (i < x.size()) f(i, load4_tail(x, i));
}

RowMax row_max(std::span<const float> x) {
  constexpr size_t kWays = 4;  // independent chains, as many as hide the latency of a comparison
  const F4 none = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  F4 a = none, b = none, c = none, d = none;
  I4 good = {-1, -1, -1, -1};
  const auto raise = [&good](F4& best, F4 v) {
    best = v > best ? v : best;
    good &= v <= kMaxFloat;  // false of NaN and +inf
  };
  size_t i = 0;
  for (; i + kWays * kLanes <= x.size(); i += kWays * kLanes) {
    raise(a, load4(x.data() + i));
    raise(b, load4(x.data() + i + kLanes));
    raise(c, load4(x.data() + i + 2 * kLanes));
    raise(d, load4(x.data() + i + 3 * kLanes));
  }
  for_fours(x.subspan(i), [&](size_t, F4 v) { raise(a, v); });
  RowMax out;
  bool all_good = true;
  for (size_t j = 0; j < kLanes; ++j) {
    out.max = std::max({out.max, a[j], b[j], c[j], d[j]});
    all_good &= good[j] != 0;
  }
  out.good = all_good;
  return out;
}

constexpr size_t kBits = 32;  // of a mask's word

bool is_open(std::span<const uint32_t> mask, size_t i) {
  return (mask[i / kBits] >> (i % kBits) & 1u) != 0;
}

// x, -inf where the four bits of `word` from `bit` on allow no id.
F4 open4(F4 x, uint32_t word, size_t bit) {
  const F4 none = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  const auto bits = static_cast<int32_t>(word >> bit & 15u);
  return (I4{bits, bits, bits, bits} & I4{1, 2, 4, 8}) != 0 ? x : none;
}

// The maximum of the ids that the mask allows; good if all are. Grammars allow few ids or nearly all, so most words say
// the same of all their ids. In one pass, so that a masked row costs what a free one does.
RowMax row_max(std::span<const float> x, std::span<const uint32_t> mask) {
  const F4 none = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  std::array<F4, kBits / kLanes> best;
  best.fill(none);
  I4 good = {-1, -1, -1, -1};
  size_t i = 0;
  for (; i + kBits <= x.size(); i += kBits) {
    const uint32_t word = mask[i / kBits];
    for (size_t j = 0; j < best.size(); ++j) {
      const F4 v = load4(x.data() + i + kLanes * j);
      good &= v <= kMaxFloat;  // false of NaN and +inf
      const F4 open = word == ~0u ? v : word == 0 ? none : open4(v, word, kLanes * j);
      best[j] = open > best[j] ? open : best[j];
    }
  }
  RowMax out;
  for (const F4& b : best) out.max = std::max({out.max, b[0], b[1], b[2], b[3]});
  out.good = (good[0] & good[1] & good[2] & good[3]) != 0;
  for (; i < x.size(); ++i) {
    out.good &= x[i] <= kMaxFloat;
    if (is_open(mask, i)) out.max = std::max(out.max, x[i]);
  }
  return out;
}

// Index of the first element equal to `value`, which is there.
int32_t first_of(std::span<const float> x, float value) {
  constexpr size_t kChunk = 256;
  size_t i = 0;
  for (; i + kChunk <= x.size(); i += kChunk) {
    I4 hits = {0, 0, 0, 0};
    for (size_t j = 0; j < kChunk; j += kLanes) hits |= load4(x.data() + i + j) == value;
    if ((hits[0] | hits[1] | hits[2] | hits[3]) != 0) break;
  }
  return static_cast<int32_t>(std::find(x.begin() + static_cast<int64_t>(i), x.end(), value) - x.begin());
}

// Of those that the mask allows.
int32_t first_of(std::span<const float> x, float value, std::span<const uint32_t> mask) {
  auto i = static_cast<size_t>(first_of(x, value));
  while (!is_open(mask, i)) {
    ++i;
    i += static_cast<size_t>(first_of(x.subspan(i), value));
  }
  return static_cast<int32_t>(i);
}

// e^t for t <= 0, relative error < 1e-6, 0 below -87. Series of 2^r on [-1/2, 1/2].
F4 exp_negative(F4 t) {
  constexpr float kLowest = -87.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const I4 gone = t < kLowest;
  const F4 scaled = (gone ? F4{kLowest, kLowest, kLowest, kLowest} : t) * 1.44269504f;
  const F4 shifted = scaled + kRound;
  const F4 r = scaled - (shifted - kRound);
  F4 p = 1.5403530e-4f * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  using U4 = uint32_t __attribute__((vector_size(16)));
  const U4 exponent = (__builtin_bit_cast(U4, shifted) + 127u) << 23;
  return gone ? F4{0, 0, 0, 0} : p * __builtin_bit_cast(F4, exponent);
}

float exp_negative(float t) {
  return exp_negative(F4{t, t, t, t})[0];
}

// log(sum exp(x - max)) with the sum in double.
double log_sum(std::span<const float> x, float max) {
  double total = 0;
  for_fours(x, [&](size_t, F4 v) {
    const F4 e = exp_negative(v - max);
    total += static_cast<double>((e[0] + e[1]) + (e[2] + e[3]));
  });
  return std::log(total);
}

// x[i] = -inf where the mask does not allow i.
void apply_mask(std::span<const uint32_t> mask, std::span<float> x) {
  size_t i = 0;
  for (; i + kBits <= x.size(); i += kBits) {
    const uint32_t word = mask[i / kBits];
    if (word == ~0u) continue;
    if (word == 0) {
      std::fill_n(x.data() + i, kBits, -kInfinity);
      continue;
    }
    for (size_t j = 0; j < kBits; j += kLanes) {
      const F4 open = open4(load4(x.data() + i + j), word, j);
      std::memcpy(x.data() + i + j, &open, sizeof(open));
    }
  }
  for (; i < x.size(); ++i)
    if (!is_open(mask, i)) x[i] = -kInfinity;
}

// Bucket of an exponent t <= 0; the last one has no lower end.
I4 bucket_of(F4 t, float per_nat, float last) {
  const F4 depth = t * -per_nat;
  return __builtin_convertvector(depth < last ? depth : F4{last, last, last, last}, I4);
}

}  // namespace

Sampler::Sampler(int64_t vocab) : vocab_(vocab), work_(static_cast<size_t>(vocab)) {
  CHECK(vocab > 0);
  sorted_.reserve(static_cast<size_t>(vocab));
}

bool Sampler::takes_largest(const SamplingParams& params, int32_t num_outputs) {
  return is_greedy(params) && params.logprobs < 0 && params.logit_bias.empty() && !params.has_penalties() &&
         !is_too_short(params, num_outputs);
}

LargestLogit Sampler::largest(std::span<const float> logits) {
  const RowMax top = row_max(logits);
  return {.logit = top.max, .id = first_of(logits, top.max), .good = top.good};
}

SampledToken Sampler::sample(const SamplerRow& row) {
  CHECK(static_cast<int64_t>(row.logits.size()) == vocab_, row.logits.size(), " logits for a vocabulary of ", vocab_);
  CHECK(row.mask.empty() || static_cast<int64_t>(row.mask.size()) * 32 >= vocab_, "a mask of ", row.mask.size(),
        " words");
  const SamplingParams& params = *row.params;
  SampledToken out;
  std::span<const float> logits = row.logits;
  std::span<const uint32_t> mask = row.mask;  // still to be applied to `logits`
  if (is_adjusted(row)) {
    out.finite = row_max(logits).finite();
    if (!out.finite) return out;
    adjust(row);
    logits = work_;
    mask = {};
  }
  const RowMax top = mask.empty() ? row_max(logits) : row_max(logits, mask);
  out.finite = top.finite();
  if (!out.finite) return out;
  if (is_greedy(params)) {
    out.id = mask.empty() ? first_of(logits, top.max) : first_of(logits, top.max, mask);
  } else {
    const float scale = 1.0f / std::min(params.temperature, kMaxTemperature);
    for (size_t i = 0; i < work_.size(); ++i) work_[i] = (logits[i] - top.max) * scale;
    if (!mask.empty()) apply_mask(mask, work_);
    out.id = draw(params, random_unit(mix64(params.seed), static_cast<uint64_t>(row.num_outputs)));
  }
  if (params.logprobs >= 0) out.logprobs = token_logprobs(row.logits, out.id, params.logprobs);
  return out;
}

// Whether anything but a mask comes before the temperature.
bool Sampler::is_adjusted(const SamplerRow& row) {
  const SamplingParams& params = *row.params;
  return !params.logit_bias.empty() || params.has_penalties() || is_too_short(params, row.num_outputs);
}

// work_: the row's logits with everything before temperature applied.
void Sampler::adjust(const SamplerRow& row) {
  const SamplingParams& params = *row.params;
  std::copy(row.logits.begin(), row.logits.end(), work_.begin());
  for (const auto& [id, bias] : params.logit_bias) {
    if (id >= 0 && id < vocab_) work_[static_cast<size_t>(id)] += bias;
  }
  if (!row.mask.empty()) apply_mask(row.mask, work_);
  if (is_too_short(params, row.num_outputs)) {
    for (const int32_t id : params.stop_ids) {
      if (id >= 0 && id < vocab_) work_[static_cast<size_t>(id)] = -kInfinity;
    }
  }
  if (params.has_penalties()) penalise(row);
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
  for_fours(work_, [this](size_t, F4 t) {
    const F4 weight = exp_negative(t);
    const I4 bucket = bucket_of(t, kBucketsPerNat, kNumBuckets - 1);
    for (size_t j = 0; j < kLanes; ++j) {
      if (t[j] == -kInfinity) continue;  // not to be chosen
      Bucket& b = buckets_[static_cast<size_t>(bucket[j])];
      b.mass += static_cast<double>(weight[j]);
      ++b.count;
    }
  });
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
      const bool at_floor = !no_floor && static_cast<float>(b + 1) > floor;  // the floor itself is in the next bucket
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
  for_fours(work_, [this, bucket](size_t i, F4 t) {
    const I4 hit = bucket_of(t, kBucketsPerNat, kNumBuckets - 1) == bucket;
    if ((hit[0] | hit[1] | hit[2] | hit[3]) == 0) return;
    for (size_t j = 0; j < kLanes; ++j) {
      if (hit[j] != 0 && t[j] != -kInfinity) sorted_.push_back(static_cast<int32_t>(i + j));
    }
  });
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

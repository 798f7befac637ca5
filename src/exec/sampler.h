// Sampler: one row of logits in, one id out, by the rules of control/sampling.h.
//
// It keeps scratch arrays of the vocabulary's size and nothing else: all state of a sequence (counts, outputs so far)
// is given with the row. The id is always in [0, vocab), whatever the row holds. One thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "control/sampling.h"

namespace perigee {

struct SamplerRow {
  std::span<const float> logits;  // [vocab], left as they are
  const SamplingParams* params = nullptr;
  int32_t num_outputs = 0;                  // ids sampled so far for this sequence: the random number's counter
  std::span<const uint16_t> output_counts;  // [vocab], or empty: none
  std::span<const uint8_t> seen;            // [ceil(vocab / 8)] bitmap of prompt and output ids, or empty: none
  std::span<const uint32_t> mask;           // [ceil(vocab / 32)] bitmap of allowed ids, or empty: all
};

struct SampledToken {
  int32_t id = 0;
  bool finite = true;      // false: a NaN or +inf, or no id left to choose from; the id then means nothing
  TokenLogprobs logprobs;  // filled when params->logprobs >= 0 and the row is finite
};

// Of some of a row's logits: those of a rank's share of the vocabulary.
struct LargestLogit {
  float logit = 0;
  int32_t id = 0;    // among them, the lowest of equal ones
  bool good = true;  // no NaN, no +inf
};

class Sampler {
 public:
  explicit Sampler(int64_t vocab);

  // Whether the row's largest logit as it is decides what is sampled, and nothing else is reported. Of unmasked rows.
  static bool takes_largest(const SamplingParams& params, int32_t num_outputs);
  static LargestLogit largest(std::span<const float> logits);

  SampledToken sample(const SamplerRow& row);
  // Of the plain softmax of `logits` [vocab]: id's log-probability and rank (1 + the number of larger logits), and the
  // `top` most likely ids in descending order, the lower id first on a tie.
  TokenLogprobs token_logprobs(std::span<const float> logits, int32_t id, int32_t top);

 private:
  // Ids ordered by descending weight, the lower id first on a tie, are walked bucket by bucket: bucket b holds the ids
  // whose exponent t = (logit - max) / temperature lies in (-(b + 1), -b] / kBucketsPerNat, so that only the bucket in
  // which a walk ends has to be sorted.
  static constexpr int kNumBuckets = 1024;
  static constexpr float kBucketsPerNat = 32.0f;
  struct Bucket {
    double mass = 0;  // sum of exp(t)
    int64_t count = 0;
  };
  struct Limits {
    double mass;     // stop once this much has been walked
    int64_t count;   // or this many ids
    float exponent;  // or before the first id with a smaller t
  };
  struct Walk {
    double mass = 0;
    int64_t count = 0;
    int32_t id = 0;  // the last id walked; 0 when the walk ended between buckets
  };

  static bool is_adjusted(const SamplerRow& row);
  void adjust(const SamplerRow& row);
  void penalise(const SamplerRow& row);
  int32_t draw(const SamplingParams& params, float uniform);
  void fill_buckets();
  Walk walk(const Limits& limits);
  void gather_bucket(int bucket);
  void walk_bucket(int bucket, const Limits& limits, Walk& walk);

  int64_t vocab_;
  std::vector<float> work_;      // [vocab] adjusted logits, then exponents t
  std::vector<int32_t> sorted_;  // ids of one bucket in walking order
  std::array<Bucket, kNumBuckets> buckets_;
  std::vector<std::pair<int32_t, float>> top_;
};

}  // namespace perigee

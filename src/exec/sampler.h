// Sampler: one row of logits in, one id out, by the rules of control/sampling.h.
//
// It keeps scratch arrays of the vocabulary's size and nothing else: all state of a sequence (counts, outputs so far)
// is given with the row. The id is always in [0, vocab), whatever the row holds. One thread at a time.
#pragma once

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
  bool finite = true;  // false: a NaN or +inf, or nothing left to choose from; the id is then meaningless but in range
  TokenLogprobs logprobs;  // filled when params->logprobs >= 0
};

class Sampler {
 public:
  explicit Sampler(int64_t vocab);

  SampledToken sample(const SamplerRow& row);
  // Of the plain softmax of `logits` [vocab]: id's log-probability and rank (1 + the number of larger logits), and the
  // `top` most likely ids in descending order, the lower id first on a tie.
  TokenLogprobs token_logprobs(std::span<const float> logits, int32_t id, int32_t top);

 private:
  struct Candidate {
    float weight;  // exp(logit - max), unnormalised
    int32_t id;
  };

  void adjust(const SamplerRow& row);
  void penalise(const SamplerRow& row);
  int32_t draw(const SamplerRow& row, float max);
  void keep_top_k(int32_t top_k);
  size_t keep_top_p(float top_p, float min_p);

  int64_t vocab_;
  std::vector<float> work_;            // adjusted logits of the row at hand
  std::vector<Candidate> candidates_;  // kept ids, in no order until sorted
  std::vector<std::pair<float, int32_t>> top_;
};

}  // namespace perigee

// What a client asked of sampling, validated; plain values that travel inside a plan (a "value" header:
// control/plan.h).
//
// The order in which they act on a row of logits is the field's usual one: logit_bias, allowed-token mask, min_tokens
// (stop ids at -inf), repetition / frequency / presence penalties, temperature, top-k, top-p, min-p, draw.
// temperature 0 means greedy: the highest logit, the lowest id on a tie. Logprobs are of the distribution before
// penalties and temperature (the model's own), as vLLM reports them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace perigee {

struct SamplingParams {
  float temperature = 1.0f;         // >= 0
  int32_t top_k = 0;                // 0: all
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1]
  float presence_penalty = 0.0f;    // [-2, 2], over output tokens
  float frequency_penalty = 0.0f;   // [-2, 2], over output tokens
  float repetition_penalty = 1.0f;  // > 0, over prompt and output tokens
  uint64_t seed = 0;                // always set: the server draws one when the request has none
  std::vector<std::pair<int32_t, float>> logit_bias;

  int32_t max_tokens = 16;        // outputs, >= 1
  int32_t min_tokens = 0;         // no stop id before that many outputs
  std::vector<int32_t> stop_ids;  // end of sequence ids and the request's own; empty under ignore_eos without own ids

  int32_t logprobs = -1;         // top entries to report per output token; -1: none, 0: only the sampled token's
  int32_t prompt_logprobs = -1;  // the same for prompt tokens 1 ... len-1

  bool operator==(const SamplingParams&) const = default;
  bool has_penalties() const {
    return presence_penalty != 0.0f || frequency_penalty != 0.0f || repetition_penalty != 1.0f;
  }
};

// Log-probabilities of one token: its own, its rank (1 = the most likely), and the most likely tokens in order.
struct TokenLogprobs {
  int32_t id = 0;
  float logprob = 0.0f;
  int32_t rank = 0;
  std::vector<std::pair<int32_t, float>> top;
  bool operator==(const TokenLogprobs&) const = default;
};

}  // namespace perigee

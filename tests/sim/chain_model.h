// The hash-chain model: bytes prove provenance.
//
// A "cache entry" of position p is a hash of its token, of p and of all entries before it as they were read; the next
// token is a hash of all entries. So a stale, foreign, missing or doubled block changes every token after it, and
// "the cache is right" becomes "the ids are equal".
//
// A recurrent model has a state beside them, one value for each state page: a hash of all tokens before, which entries
// and next token depend on as well. So a state that lacks a token, has one twice, or is another's, shows in the same
// way.
#pragma once

#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "control/constraint.h"
#include "control/plan.h"

namespace perigee::sim {

inline constexpr int32_t kVocabulary = 1000;
inline constexpr uint64_t kPoison = 0x7FF8DEADDEADDEADull;  // what a page holds before its new owner writes it

// All entries read so far, in order.
struct Reading {
  uint64_t value = 0x243F6A8885A308D3ull;
  void read(uint64_t entry) { value = (value ^ entry) * 0x9E3779B97F4A7C15ull + (value >> 29); }
};

// The recurrent state, by state page; zeros before the first token, empty for attention alone.
struct State {
  std::vector<uint64_t> values;
  void read(int32_t token) {
    for (size_t page = 0; page < values.size(); ++page)
      values[page] = mix64(values[page] * 5 + page * 1000003 + static_cast<uint64_t>(token) + 1);
  }
};

// All that a token is computed from.
struct Context {
  Reading cache;
  State state;
  uint64_t value() const {
    uint64_t sum = cache.value;
    for (const uint64_t value : state.values) sum = (sum ^ value) * 0xD6E8FEB86659FD93ull + (sum >> 31);
    return sum;
  }
};

// The cache entry of a token; `before` has everything before it.
inline uint64_t entry_of(int32_t token, int32_t position, const Context& before) {
  return mix64(before.value() + (static_cast<uint64_t>(position) << 32) + static_cast<uint64_t>(token) + 1) &
         ~(1ull << 62);
}

inline int32_t next_id(const Context& all, uint64_t seed, int32_t output_index) {
  return static_cast<int32_t>(mix64(all.value() + seed * 3 + static_cast<uint64_t>(output_index)) % kVocabulary);
}

// Of the ids that a mask allows the next one from there on, which in a mask of all is itself.
template <typename IsAllowed>
int32_t next_allowed(int32_t id, IsAllowed&& is_allowed) {
  for (int32_t i = 0; i < kVocabulary; ++i)
    if (const int32_t candidate = (id + i) % kVocabulary; is_allowed(candidate)) return candidate;
  return id;
}

inline float prompt_logprob(const Context& before) {
  return -static_cast<float>(before.value() >> 44);
}

// One sequence in fifty meets a logit that is not finite, at one of its first outputs.
inline bool is_finite(uint64_t seed, int32_t output_index) {
  return seed % 50 != 0 || output_index != static_cast<int32_t>((seed / 50) % 8);
}

// What a request gives when it runs alone, on a model with that many state pages.
struct Expected {
  std::vector<int32_t> ids;
  FinishReason finish = FinishReason::kLength;
  std::vector<float> prompt_logprobs;  // of positions 1 ... len-1
};
Expected run_alone(const std::vector<int32_t>& prompt, const SamplingParams& sampling, int32_t max_outputs,
                   int32_t num_state_pages, const Constraint* constraint = nullptr);

}  // namespace perigee::sim

// When two runs of one greedy request count as equal (DESIGN D10): the same tokens with nearly the same
// log-probabilities, or another token where the two most likely are nearly as likely as each other. From there on the
// contexts differ, and the caller may compare what follows with a run that is given the other token.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "control/sampling.h"

namespace perigee {

inline constexpr float kTie = 0.05f;  // between the two log-probabilities
// Between the log-probabilities of one token in two runs that round differently, activations and cache in bf16. The
// largest that was seen in replies of the bundled models, up to their end ids, is 0.048.
inline constexpr float kMostApart = 0.1f;

// A reply as far as the rule reads it.
struct GreedyReply {
  std::vector<int32_t> ids;
  std::vector<TokenLogprobs> logprobs;  // one per id, each with at least two in `top`
  std::string error;
};

// What two replies have in common.
struct Likeness {
  size_t tokens = 0;   // from the first one on
  bool parts = false;  // at a tie, after that many
  float most_apart = 0;
};

inline Likeness compare_greedy(const GreedyReply& a, const GreedyReply& b, float most_apart = kMostApart) {
  Likeness likeness;
  EXPECT_EQ(a.error + b.error, "");
  const auto [left, other] = std::mismatch(a.ids.begin(), a.ids.end(), b.ids.begin(), b.ids.end());
  likeness.tokens = static_cast<size_t>(left - a.ids.begin());
  const size_t token = likeness.tokens;
  for (size_t t = 0; t < token; ++t) {
    const float apart = std::fabs(a.logprobs.at(t).logprob - b.logprobs.at(t).logprob);
    likeness.most_apart = std::isnan(apart) ? INFINITY : std::max(likeness.most_apart, apart);
  }
  EXPECT_LE(likeness.most_apart, most_apart) << "log-probabilities of the same tokens differ";
  if (left == a.ids.end() || other == b.ids.end()) {
    EXPECT_EQ(a.ids.size(), b.ids.size()) << "a reply is cut";
    return likeness;
  }
  if (token >= a.logprobs.size() || a.logprobs[token].top.size() < 2) {
    ADD_FAILURE() << "token " << token << " differs and has no two alternatives";
    return likeness;
  }
  const auto &first = a.logprobs[token].top[0], &second = a.logprobs[token].top[1];
  EXPECT_LT(first.second - second.second, kTie) << "token " << token << " differs without a tie";
  EXPECT_EQ(std::minmax({*left, *other}), std::minmax({first.first, second.first}))
      << "token " << token << " is none of the two at the tie";
  likeness.parts = true;
  return likeness;
}

}  // namespace perigee

// When two runs of one greedy request count as equal (DESIGN D10): the same tokens, or another one where the most
// likely two are nearly as likely as each other. From there on each goes its own way.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "control/sampling.h"

namespace perigee {

inline constexpr float kTie = 0.05f;  // between the two log-probabilities

// A reply as far as the rule reads it.
struct GreedyReply {
  std::vector<int32_t> ids;
  std::vector<TokenLogprobs> logprobs;  // one per id, each with at least two in `top`
  std::string error;
};

// Whether `b` leaves `a` at a tie: its token is the other one of the two that `a` found the most likely. Anything else
// that tells the two apart fails the test, a length above all. Nothing is compared behind an id of `ends`.
inline bool leaves_at_tie(const GreedyReply& a, const GreedyReply& b, const std::vector<int32_t>& ends = {}) {
  EXPECT_EQ(a.error + b.error, "");
  const auto [left, other] = std::mismatch(a.ids.begin(), a.ids.end(), b.ids.begin(), b.ids.end());
  if (std::find_first_of(a.ids.begin(), left, ends.begin(), ends.end()) != left || left == a.ids.end() ||
      other == b.ids.end()) {
    EXPECT_EQ(a.ids.size(), b.ids.size()) << "a reply is cut";
    return false;
  }
  const auto token = static_cast<size_t>(left - a.ids.begin());
  if (token >= a.logprobs.size() || a.logprobs[token].top.size() < 2) {
    ADD_FAILURE() << "token " << token << " differs and has no two alternatives";
    return false;
  }
  const auto &first = a.logprobs[token].top[0], &second = a.logprobs[token].top[1];
  EXPECT_LT(first.second - second.second, kTie) << "token " << token << " flips without a tie";
  // Under penalties the one taken may be the second.
  EXPECT_EQ(std::minmax({*left, *other}), std::minmax({first.first, second.first}))
      << "token " << token << " is none of the two at the tie";
  return true;
}

}  // namespace perigee

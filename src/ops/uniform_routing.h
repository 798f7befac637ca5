// Routing for measurements: made-up weights send most tokens to the same few experts, trained ones do not.
#pragma once

#include "base/rng.h"

namespace perigee {

// What experts are chosen by in place of their scores (RouterWeight::uniform): the largest k are a uniform draw of k of
// them, and those of two tokens are independent. `token` is its row in the step. constexpr: for device code too.
constexpr float uniform_choice(int64_t token, int64_t expert) {
  return random_unit(mix64(static_cast<uint64_t>(token) + 1), static_cast<uint64_t>(expert));
}

}  // namespace perigee

// A constraint for the hash-chain model: about half of all ids may follow, which half depends on every id before and,
// near the end, on how many are left. So masks of another place, step or sequence allow other ids, and give others.
#pragma once

#include <algorithm>
#include <memory>

#include "base/rng.h"
#include "control/constraint.h"
#include "sim/chain_model.h"

namespace perigee::sim {

struct ChainConstraintState final : ConstraintState {
  explicit ChainConstraintState(uint64_t the_hash) : hash(the_hash) {}

  bool may_follow(int32_t id) const { return mix64(hash + static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) % 2 == 0; }
  bool allows(int32_t id, int32_t ids_left) const {
    const auto left = static_cast<uint64_t>(std::min(ids_left, 12));
    return may_follow(id) && mix64(hash * 7 + static_cast<uint64_t>(id) + (left << 40)) % 8 != 0;
  }
  bool accept(int32_t id) override {
    if (!may_follow(id)) return false;
    hash = mix64(hash * 3 + static_cast<uint64_t>(id));
    return true;
  }
  void masks(std::span<const int32_t> drafts, int32_t ids_left, int64_t words, uint32_t* out) override {
    ChainConstraintState at = *this;
    bool counts = true;
    for (size_t place = 0; place <= drafts.size(); ++place, out += words) {
      std::fill_n(out, words, counts ? 0u : ~0u);
      for (int32_t id = 0; counts && id < kVocabulary; ++id)
        if (at.allows(id, ids_left - static_cast<int32_t>(place))) out[id / 32] |= 1u << (id % 32);
      if (place < drafts.size()) counts = counts && at.accept(drafts[place]);
    }
  }

  uint64_t hash;
};

struct ChainConstraint final : Constraint {
  explicit ChainConstraint(uint64_t the_seed) : seed(the_seed) {}
  std::unique_ptr<ConstraintState> begin() const override { return std::make_unique<ChainConstraintState>(seed); }
  int32_t shortest() const override { return 1; }

  uint64_t seed;
};

}  // namespace perigee::sim

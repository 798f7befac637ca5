// Test only: a small constraint. Each id and the one before it have a sum that three divides, before the first one
// stands `seed`; from `at_least` ids on the end may follow, and does when no more ids are left than it takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "control/constraint.h"

namespace perigee {

struct SumConstraint final : Constraint {
  SumConstraint(int32_t the_vocab, int32_t the_end, int32_t the_seed = 0, int32_t the_at_least = 4)
      : vocab(the_vocab), end(the_end), seed(the_seed), at_least(the_at_least) {}

  struct State final : ConstraintState {
    explicit State(const SumConstraint& the_of) : of(the_of), last(the_of.seed) {}

    bool may_follow(int32_t id) const {
      if (ended || id < 0 || id >= of.vocab) return false;
      return id == of.end ? count >= of.at_least : (last + id) % 3 == 0;
    }
    int32_t shortest() const { return std::max(0, of.at_least - count) + 1; }
    bool allows(int32_t id, int32_t ids_left) const {
      const bool closes = ids_left <= shortest() + Constraint::kSpareIds;
      return may_follow(id) && (id == of.end || !closes || count < of.at_least);
    }
    bool accept(int32_t id) override {
      if (!may_follow(id)) return false;
      ended = id == of.end;
      last = id;
      ++count;
      return true;
    }
    void masks(std::span<const int32_t> drafts, int32_t ids_left, int64_t words, uint32_t* out) override {
      State at = *this;
      bool counts = true;
      for (size_t place = 0; place <= drafts.size(); ++place, out += words) {
        std::fill_n(out, words, counts ? 0u : ~0u);
        for (int32_t id = 0; counts && id < of.vocab; ++id)
          if (at.allows(id, ids_left - static_cast<int32_t>(place))) out[id / 32] |= 1u << (id % 32);
        if (place < drafts.size()) counts = counts && at.accept(drafts[place]);
      }
    }

    const SumConstraint& of;
    int32_t last, count = 0;
    bool ended = false;
  };

  std::unique_ptr<ConstraintState> begin() const override { return std::make_unique<State>(*this); }
  int32_t shortest() const override { return at_least + 1; }

  // The first id that breaks it, or that lacks since the end has not come; -1: none.
  int32_t first_fault(const std::vector<int32_t>& ids) const {
    State state(*this);
    for (size_t i = 0; i < ids.size(); ++i)
      if (!state.accept(ids[i])) return static_cast<int32_t>(i);
    return state.ended ? -1 : static_cast<int32_t>(ids.size());
  }

  int32_t vocab, end, seed, at_least;
};

}  // namespace perigee

// Constraint: what the ids of a reply must obey: a grammar (src/grammar), or what a test has in its place.
//
// The engine keeps one ConstraintState for each constrained choice, moves it by confirmed ids only, and asks it which
// ids may come next; ranks see bits alone (StepMasks). An id that ends the reply counts like any other: where the reply
// may end, and nowhere else, it is allowed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace perigee {

class ConstraintState {
 public:
  virtual ~ConstraintState() = default;

  // Moves by an id that was sampled. False: it is not allowed here, and the state is as before.
  virtual bool accept(int32_t id) = 0;

  // For the client: why accept() refused an id that masks() had allowed. Empty if that would be a bug.
  virtual std::string_view fault() const { return {}; }

  // Which ids may follow, and which after each of `drafts` if those before it are accepted: 1 + drafts.size() masks of
  // `words` words, back to back at `out`: bit id % 32 of word id / 32. Places after a draft that is not allowed are all
  // ones: nobody reads them. `ids_left` >= 1 is how many ids the reply may still have, from the first place on. Where
  // they would not suffice for more than the shortest way to an end and kSpareIds, only that way is allowed. The state
  // is as before.
  virtual void masks(std::span<const int32_t> drafts, int32_t ids_left, int64_t words, uint32_t* out) = 0;
};

class Constraint {
 public:
  static constexpr int32_t kSpareIds = 8;

  virtual ~Constraint() = default;
  // At the reply's beginning. Thread-safe.
  virtual std::unique_ptr<ConstraintState> begin() const = 0;
  // Ids of the shortest reply, with the one that ends it.
  virtual int32_t shortest() const = 0;
};

}  // namespace perigee

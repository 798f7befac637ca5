// Admission: whether a waiting sequence can start now, and from which cached prefix.
//
// It can when all pages of its input, of its state and one for its next tokens are at hand, and those that run keep
// what they are about to need (ADR 0006). Changes nothing before take().
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "control/prefix_match.h"
#include "control/state_book.h"

namespace perigee {

// The cached prefix that a sequence would start from; holds nothing yet.
struct Hit {
  int32_t num_blocks = 0;
  int32_t num_matched = 0;     // blocks that are cached, whether or not a checkpoint lets a hit end there
  int32_t num_idle_pages = 0;  // of its pages, its checkpoint's too, those that are available to others
  CheckpointRef checkpoint;

  int32_t num_tokens() const { return num_blocks * kBlockTokens; }
};

class Admission {
 public:
  Admission(const SchedulerRules& rules, PrefixCache& cache, const StateBook& states)
      : rules_(rules), cache_(cache), states_(states), match_(cache.index()) {}

  // The hit that it can start from; nothing while pages are short. `alone`: nothing runs and nothing is in flight, so
  // no page will come back.
  std::optional<Hit> find_room(const Sequence& sequence, std::span<Sequence* const> running, bool alone);

  // `run` holds the blocks of the hit that find_room() gave last; returns handles of its checkpoint.
  std::vector<PageHandle> take(const Hit& hit, Running& run);

 private:
  void match_prefix(const Sequence& sequence);
  Hit find_hit() const;

  const SchedulerRules& rules_;
  PrefixCache& cache_;
  const StateBook& states_;
  PrefixMatch match_;  // of the sequence that was last considered
};

}  // namespace perigee

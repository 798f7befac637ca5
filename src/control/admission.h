// Admission: whether a waiting sequence can start now, and from which cached prefix.
//
// It can when all pages of its input, of its state and one for its next tokens are at hand, and those that run keep
// what they are about to need (ADR 0006). Blocks may lie at any dcp index, or dealt in turn each at its own, while a
// state has its pages at every one: a full index has room for none. Changes nothing before take().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "control/prefix_index.h"
#include "control/sequence.h"
#include "control/state_book.h"

namespace perigee {

// The published blocks that one sequence's input begins with, kept from step to step.
//
// The head of the queue is looked at before every step for as long as it waits. Between two looks blocks are published
// and evicted, so its match is continued where it ended and cut where a block went: the input is hashed once, however
// long the wait. Knows tokens and blocks; which of them make a hit is Admission's business.
class PrefixMatch {
 public:
  explicit PrefixMatch(const PrefixIndex& index) : index_(index) {}

  // Makes blocks() the match of this sequence's input with the index as it is now, max_blocks at most.
  void update(const Sequence& sequence, int32_t max_blocks);

  const std::vector<PrefixNode>& blocks() const { return blocks_; }
  const PrefixNode& root() const { return root_; }

 private:
  const PrefixIndex& index_;
  SequenceId sequence_;
  std::shared_ptr<const std::vector<int32_t>> input_;
  int32_t max_blocks_ = 0;
  PrefixNode root_;
  std::vector<PrefixNode> blocks_;
  int64_t num_published_ = -1, num_erased_ = -1;  // of the index, at the last update
};

// The cached prefix that a sequence would start from; holds nothing yet.
struct Hit {
  int32_t num_blocks = 0;
  int32_t num_matched = 0;           // blocks that are cached, whether or not a checkpoint lets a hit end there
  CountAtIndex num_idle_pages = {};  // of its pages, its checkpoint's too, those that are available to others
  CheckpointRef checkpoint;
  int32_t tail_tokens = 0;  // after the blocks, in a tail whose pages the sequence has already

  int32_t num_tokens() const { return num_blocks * kBlockTokens + tail_tokens; }
};

class Admission {
 public:
  Admission(const SchedulerRules& rules, PrefixCache& cache, const StateBook& states)
      : rules_(rules), cache_(cache), states_(states), match_(cache.index()) {}

  // The hit that it can start from; nothing while pages are short. `alone`: nothing runs and nothing is in flight, so
  // no page will come back. `has_tail`: it has one, which is of use after all the full blocks before it.
  std::optional<Hit> find_room(const Sequence& sequence, std::span<Sequence* const> running, bool alone, bool has_tail);

  // Pages for the first num_blocks blocks of the sequence's prompt, of which num_cached are cached here already, for a
  // checkpoint after them, and for a tail. No blocks: what is cached is enough, or even empty pools have no room.
  struct ImportRoom {
    bool waits = false;  // for pages
    int32_t num_blocks = 0, num_cached = 0;
    bool has_tail = false;
  };
  ImportRoom find_import_room(const Sequence& sequence, std::span<Sequence* const> running, bool alone);
  // Handles of the cached blocks of the room that was found last, and the chain that ends with them.
  std::vector<PageHandle> take(const ImportRoom& room, PrefixNode& chain);

  // `run` holds the blocks of the hit that find_room() gave last; returns handles of its checkpoint.
  std::vector<PageHandle> take(const Hit& hit, Running& run);

 private:
  void match_prefix(const Sequence& sequence);
  Hit find_hit(int32_t tail_tokens) const;
  bool has_room(const Hit& hit, int32_t num_blocks, int32_t num_states, int32_t reserve) const;

  const SchedulerRules& rules_;
  PrefixCache& cache_;
  const StateBook& states_;
  PrefixMatch match_;  // of the sequence that was last considered
};

}  // namespace perigee

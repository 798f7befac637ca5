// PrefixMatch: the published blocks that one sequence's input begins with, kept from step to step.
//
// The head of the queue is looked at before every step for as long as it waits. Between two looks blocks are published
// and evicted, so its match is continued where it ended and cut where a block went: the input is hashed once, however
// long the wait. Knows tokens and blocks; which of them make a hit is the scheduler's business.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "control/prefix_index.h"
#include "control/sequence.h"

namespace perigee {

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

}  // namespace perigee

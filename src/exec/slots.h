// Slots: what a rank knows of each sequence it runs: length, newest id, block table, penalty counts (DESIGN D4).
//
// Plans only carry deltas. Touched by the rank's thread alone. A GPU has arrays of its own that its steps read and
// write; beside them this is what the host must know, without ids and counts (DESIGN D4).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "control/plan.h"
#include "model/shard.h"

namespace perigee {

// The rank of a tensor-parallel group that samples a slot's rows and counts its penalties.
constexpr int32_t rank_of_slot(SlotId slot, int64_t num_ranks) {
  return static_cast<int32_t>(slot.value % num_ranks);
}

// Of a rank: which blocks and which pages of states lie with it, of those that its dcp group shares.
struct DcpShare {
  int32_t index = 0, size = 1;
  bool keeps_all = false;  // a draft's cache has all blocks: Slot::draft_blocks

  // In that cache; see PagePool::draft_base.
  int32_t draft_block(const Placement& place) const { return place.page.value * size + place.dcp_index; }
};

struct Slot {
  SequenceId sequence;
  std::shared_ptr<const std::vector<int32_t>> tokens;  // as started: prompt, then former outputs
  std::shared_ptr<const SamplingParams> sampling;
  int32_t num_tokens = 0;    // of `tokens`
  int32_t num_logprobs = 0;  // of `sampling`; so that a step reads neither
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;
  // Tokens whose cache entries exist or are being written. Exact where this thread computes them; a GPU knows better
  // than its host, for which it is an upper bound.
  int32_t length = 0;
  int32_t num_outputs = 0;  // sampled ids, former ones included
  int32_t newest_id = -1;   // the id that the next decode row runs
  DraftIds drafts;          // ids that may follow it: a verify row runs them, too
  int32_t num_blocks = 0;
  std::vector<int32_t> pages;  // of the blocks that lie here
  // Of a dcp group alone, see SharedBlocks:
  std::vector<int32_t> blocks_here;
  std::vector<uint8_t> block_owners;
  std::vector<int32_t> draft_blocks;  // of a draft's own cache: the block for each block
  std::vector<int32_t> state_pages;   // of a recurrent model
  int32_t committed = 0;              // tokens that the state in them has seen; the rest up to length is in the ring
  // Kept only under penalties, by the rank of the slot:
  std::vector<uint16_t> output_counts;  // [vocab]
  std::vector<uint8_t> seen;            // [ceil(vocab / 8)] prompt or output
};

class Slots {
 public:
  // vocab 0: of a GPU's host. Penalties are counted on the GPU, and what a row's drafts are is known there alone: here
  // there are always enough, all of them -1.
  Slots(int32_t num_slots, int64_t vocab, int32_t max_blocks, const TensorParallel& ranks = {}, DcpShare dcp = {});

  void start(const SequenceStart& start);
  void append(const BlockAppend& append);
  // A row of num_tokens tokens has run; its recurrent state stands at its end, or where it began (commit_all false).
  void advance(SlotId slot, int32_t num_tokens, bool commit_all);
  // The sampled id becomes the slot's newest and is counted.
  void accept(SlotId slot, int32_t id);
  // The last num_tokens tokens that have run were drafts that the model did not give: they count no more.
  void reject(SlotId slot, int32_t num_tokens);
  // Of a GPU's host, where rows may have run since: the length was so many tokens too high.
  void lower(SlotId slot, int32_t num_tokens);
  bool on_device() const { return vocab_ == 0; }
  Slot& operator[](SlotId slot) { return slots_[static_cast<size_t>(slot.value)]; }
  const Slot& operator[](SlotId slot) const { return slots_[static_cast<size_t>(slot.value)]; }
  DcpShare dcp() const { return dcp_; }
  // Of a block that lies here: its place among those of the slot that do.
  int32_t place_here(SlotId slot, int32_t block) const;

 private:
  int64_t vocab_;
  int32_t max_blocks_;
  TensorParallel ranks_;
  DcpShare dcp_;
  std::vector<Slot> slots_;
};

}  // namespace perigee

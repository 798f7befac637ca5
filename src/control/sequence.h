// Sequence: the scheduler's books of one sequence. Plain data and the arithmetic on it; it decides nothing.
//
// `input` is what prefill computes in this life: the prompt, then, after a preemption, the outputs of the former lives.
// Ids sampled in this life follow in `generated`; each is computed by the decode row after the one that sampled it, so
// that with nothing in flight num_tokens() is the confirmed position + 1.
//
// What a sequence has depends on its state: slot, pages and positions exist only while it runs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "control/checkpoints.h"
#include "control/plan.h"
#include "control/prefix_index.h"
#include "control/scheduler.h"

namespace perigee {

constexpr int32_t num_blocks(int32_t num_tokens) {
  return (num_tokens + kBlockTokens - 1) / kBlockTokens;
}

// Holds nothing but its place in the queue.
struct Waiting {};

// Another node's cache entries are on their way into pages that the HandoverBook holds for it.
struct Awaiting {};

// Positions [0, num_confirmed) have their cache entries written and the result that says so is in; [num_confirmed,
// scheduled) are in plans in flight, whose rows may keep fewer tokens than they run: so that end is a range.
struct Running {
  SlotId slot;
  std::vector<PageHandle> pages;        // by block index; grows by add_block()
  CountAtIndex num_blocks_at = {};      // of them
  std::vector<PageHandle> state_pages;  // of the recurrent state: as many at every dcp index

  PositionRange scheduled;
  int32_t chunks_end = 0;   // chunks run the input up to here; a last token that they leave out a decode row runs
  PositionRange committed;  // where the latest row planned leaves the recurrent state (deferred commit, D7)
  int32_t num_confirmed = 0;
  int32_t ids_in_flight = 0;  // that rows in flight may add at most
  uint32_t plans = 0;         // bits of the plans in flight that have a row of it
  DraftIds drafts;            // under a constraint: what its next row may verify

  // The chain of its confirmed blocks in the prefix index; broken when a parent was evicted.
  PrefixNode chain;
  int32_t num_chained = 0;
  bool chain_broken = false;

  // The checkpoint that it started from or wrote last, and whether that is one that its next replaces.
  CheckpointRef newest_checkpoint;
  bool newest_is_rolling = false;
  int32_t junction = 0;  // CheckpointPolicy::junction

  void add_block(PageHandle page) {
    ++num_blocks_at[static_cast<size_t>(page.placement().dcp_index)];
    pages.push_back(std::move(page));
  }
};

struct Sequence {
  Submit request;
  std::shared_ptr<const std::vector<int32_t>> input;
  std::vector<int32_t> generated;
  int32_t max_outputs = 0;  // of all lives: max_tokens, and what max_model_len leaves
  std::variant<Waiting, Awaiting, Running> state;

  // Facts that outlive a preemption.
  int32_t num_cached_tokens = -1;     // hit at the first admission; -1 before
  int32_t prompt_logprobs_known = 0;  // positions [1, n] are delivered
  bool prompt_confirmed = false;      // once
  int32_t num_preemptions = 0;
  bool has_followers = false;

  // Under a constraint: where its outputs stand in it, from the first start on; and min_tokens, which its masks keep.
  std::unique_ptr<ConstraintState> constraint;
  int32_t min_outputs = 0;

  SequenceId id() const { return request.sequence; }
  bool is_awaiting() const { return std::holds_alternative<Awaiting>(state); }
  bool is_running() const { return std::holds_alternative<Running>(state); }
  Running& running() { return const_cast<Running&>(std::as_const(*this).running()); }
  const Running& running() const {
    const Running* running = std::get_if<Running>(&state);
    CHECK(running != nullptr, "sequence ", id(), " does not run");
    return *running;
  }
  const SamplingParams& sampling() const { return *request.sampling; }
  int32_t num_prompt() const { return static_cast<int32_t>(request.prompt->size()); }
  int32_t num_input() const { return static_cast<int32_t>(input->size()); }
  int32_t num_tokens() const { return num_input() + static_cast<int32_t>(generated.size()); }
  int32_t num_outputs() const { return num_tokens() - num_prompt(); }
  bool in_prefill() const { return running().scheduled.most < running().chunks_end; }

  // A further sampled id would still be wanted if nothing in flight ends the sequence early.
  bool wants_sample() const { return num_samples_left() > 0; }
  int32_t num_samples_left() const { return max_outputs - num_outputs() - running().ids_in_flight; }

  bool wants_prompt_logprobs() const {
    return sampling().prompt_logprobs >= 0 && prompt_logprobs_known < num_prompt() - 1;
  }

  // Blocks that the sequence can ever fill: the last output is never computed.
  int32_t max_blocks() const { return num_blocks(std::max(num_input(), num_prompt() + max_outputs - 1)); }

  int32_t token(int32_t position) const {
    return position < num_input() ? (*input)[static_cast<size_t>(position)]
                                  : generated[static_cast<size_t>(position - num_input())];
  }

  // Token ids of a block, all of them known; `scratch` is used where input and generated ids meet.
  BlockTokens block_tokens(int32_t block, std::array<int32_t, kBlockTokens>& scratch) const {
    const int32_t first = block * kBlockTokens;
    if (first + kBlockTokens <= num_input()) return BlockTokens(input->data() + first, kBlockTokens);
    for (int32_t i = 0; i < kBlockTokens; ++i) scratch[static_cast<size_t>(i)] = token(first + i);
    return scratch;
  }

  ExtraKey extra_key(int32_t block) const {
    const auto index = static_cast<size_t>(block);
    return index < request.extra_keys.size() ? request.extra_keys[index] : ExtraKey();
  }

  // Order of service: priority, then arrival, then id.
  bool before(const Sequence& other) const {
    if (request.priority != other.request.priority) return request.priority < other.request.priority;
    if (request.arrival_s != other.request.arrival_s) return request.arrival_s < other.request.arrival_s;
    return id() < other.id();
  }
};

}  // namespace perigee

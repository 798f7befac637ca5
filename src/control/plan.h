// StepPlan and StepResult: everything that brain and hands say to each other, as plain data.
//
// The scheduler emits a plan, every rank executes it, and a result comes back one step later. Both are self-contained:
// they can be logged, replayed and sent to another process (control/plan_codec.h). Neither side calls the other for
// anything else.
//
// There is one kind of work: "run n new tokens of the sequence in slot s from position p" (DESIGN D3). A prefill chunk
// carries its token ids; a decode or verify row takes its ids, its length and its penalty counts from the device.
//
// The device alone owns lengths (D4): with two plans in flight the host does not know yet how many tokens of the first
// were accepted. So a row gives its position as a range, which whoever knows better checks and nobody relies on to be
// exact.
//
// A slot (0 ... max_sequences-1) is a sequence's place in a rank's arrays. A page is the unit of a rank's memory pool;
// a block is 64 tokens of one cache group; for the latent group one block fills one page (D5, D7). A sequence of a
// recurrent model also has a state, a fixed number of pages from admission to its end; a checkpoint is a saved state of
// as many pages.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/inline_vector.h"
#include "control/plan_ids.h"
#include "control/sampling.h"

namespace perigee {

// Checkpoints of a step's rows at most: a row of n tokens reaches n / 64 block boundaries, or one more.
constexpr int32_t max_checkpoint_writes(int32_t num_rows, int32_t num_tokens) {
  return num_rows + num_tokens / kBlockTokens;
}

// Tokens of a step under prompt_logprobs, at most. Each needs a row of logits: [256, 163840] f32 is 168 MB.
inline constexpr int32_t kPromptLogprobTokens = 256;
// Rows of logits of a step, at most: those that are sampled, one for each sequence and each draft, and those.
constexpr int32_t max_logit_rows(int32_t num_sampled) {
  return num_sampled + kPromptLogprobTokens;
}

// A sequence enters a slot (first time, or again after preemption, when its former outputs count as tokens to compute
// but stay outputs for penalties, seeds and min_tokens). Resets the slot's block table, length and counts.
struct SequenceStart {
  SlotId slot;
  SequenceId sequence;
  std::shared_ptr<const std::vector<int32_t>> tokens;  // prompt, then former outputs
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;  // positions [0, n) are already in the pages appended below (a prefix hit)
  std::shared_ptr<const SamplingParams> sampling;

  // Recurrent models. Before its first row a rank makes state_pages the state after num_cached_tokens tokens: a copy of
  // the checkpoint's pages, which may be these, or zeros where there is none. A state has as many pages at every dcp
  // index, index after index, and so has a checkpoint: a rank takes those of its own.
  std::vector<Placement> state_pages = {};
  std::vector<Placement> checkpoint = {};

  bool operator==(const SequenceStart& other) const;  // of what the pointers point to
};

// Block `block_index` of the slot's sequence lies there. Block tables are append-only: indices of one slot arrive in
// ascending order.
struct BlockAppend {
  SlotId slot;
  int32_t block_index = 0;
  Placement place;
  bool operator==(const BlockAppend&) const = default;
};

// What a row runs. Prefill: tokens of the prompt, or of former outputs after a preemption.
struct Prefill {
  int32_t tokens_offset = 0;  // index of the ids in StepPlan::tokens
  int32_t num_tokens = 0;
  bool sample = false;           // the last token's logits are wanted: sample one id
  bool prompt_logprobs = false;  // logits of every new token are wanted
  bool operator==(const Prefill&) const = default;
};
// The slot's newest id; samples the next one.
struct Decode {
  bool operator==(const Decode&) const = default;
};
// The slot's newest id and after it its drafts, which the rank made after the row before: as many as there are, up to
// num_drafts. Samples after each; keeps ids up to the first that is not its draft.
struct Verify {
  int32_t num_drafts = 0;  // k <= kMaxDrafts
  bool operator==(const Verify&) const = default;
};
using RowWork = std::variant<Prefill, Decode, Verify>;

// New tokens of the slot's sequence.
struct PlanRow {
  SlotId slot;
  SequenceId sequence;
  PositionRange position;  // of the first new token; exact for Prefill
  RowWork work;
  bool masked = false;  // sampling waits for this row's StepMasks entry

  const Prefill* prefill() const { return std::get_if<Prefill>(&work); }
  int32_t num_drafts() const {
    const Verify* verify = std::get_if<Verify>(&work);
    return verify == nullptr ? 0 : verify->num_drafts;
  }
  int32_t num_tokens() const { return prefill() != nullptr ? prefill()->num_tokens : 1 + num_drafts(); }  // at most
  bool samples() const { return prefill() == nullptr || prefill()->sample; }
  bool scores_prompt() const { return prefill() != nullptr && prefill()->prompt_logprobs; }
  int32_t max_ids() const { return samples() ? 1 + num_drafts() : 0; }  // of its result
  // By how much it moves the position at least; at most it is num_tokens(). Every row that samples keeps one id.
  int32_t min_tokens() const { return prefill() != nullptr ? prefill()->num_tokens : 1; }
  bool operator==(const PlanRow&) const = default;
};

// The state after exactly boundary() tokens is also written to these pages if the slot's row commits it: if the
// committed position passes the boundary in this step. A prefill chunk commits all its tokens. A decode or verify row
// commits the position that it starts from, since the newest tokens' inputs wait in the device's ring until they are
// certain (deferred commit, D7).
struct CheckpointWrite {
  SlotId slot;
  int32_t lower = 0, upper = 0;  // (lower, upper] has one block boundary
  std::vector<Placement> pages;

  int32_t boundary() const { return upper / kBlockTokens * kBlockTokens; }
  bool is_valid() const { return lower >= 0 && boundary() > lower && boundary() - kBlockTokens <= lower; }
  bool operator==(const CheckpointWrite&) const = default;
};

struct StepPlan {
  StepId step;
  std::vector<SequenceStart> starts;
  std::vector<BlockAppend> appends;
  std::vector<PlanRow> rows;                 // decode and verify rows first, then prefill chunks
  std::vector<int32_t> tokens;               // ids of the prefill chunks, back to back
  std::vector<CheckpointWrite> checkpoints;  // in the order of the rows; those of a row ascending
  int32_t num_decode_rows = 0;
  bool eager = false;  // runs outside of graphs: a traced step

  int32_t num_tokens() const {
    int32_t sum = 0;
    for (const PlanRow& row : rows) sum += row.num_tokens();
    return sum;
  }
  bool operator==(const StepPlan&) const = default;
};

// Allowed-token bits for sampled rows of one step (grammars): bit id%32 of word id/32. A separate message, because a
// grammar advances on the host while the forward pass already runs (D11).
struct RowMask {
  SlotId slot;
  std::vector<uint32_t> words;  // ceil(vocab / 32) of each place, one after the other: a verify row has 1 + its drafts
  bool operator==(const RowMask&) const = default;
};
struct StepMasks {
  StepId step;
  std::vector<RowMask> rows;  // in the order of the plan's rows
  bool operator==(const StepMasks&) const = default;
};

using RowIds = InlineVector<int32_t, kMaxDrafts + 1>;  // of one row
using DraftIds = InlineVector<int32_t, kMaxDrafts>;

struct RowResult {
  SlotId slot;
  SequenceId sequence;
  RowIds ids;                                  // accepted and sampled ids; empty when the row did not sample
  std::vector<TokenLogprobs> logprobs;         // one per id when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // for positions position+1 ... position+num_tokens when asked for
  std::vector<int32_t> checkpoints;            // boundaries of those that were written, ascending
  bool finite = true;      // false: a logit of the id after `ids` was NaN or infinite; the sequence ends with an error
  int32_t num_drafts = 0;  // that it verified
  DraftIds drafts = {};    // of a masked row: what the sequence's next row may verify, for its masks
  bool operator==(const RowResult&) const = default;
};

struct StepResult {
  StepId step;
  std::vector<RowResult> rows;  // one per plan row, in the plan's order
  // Not empty: the device is lost, with what was being done where. There are no rows, and no result follows.
  std::string device_lost = {};

  // Nothing yet of each of the plan's rows, in the memory of another.
  void begin(const StepPlan& plan) {
    step = plan.step;
    rows.clear();
    for (const PlanRow& row : plan.rows) rows.push_back({.slot = row.slot, .sequence = row.sequence});
    device_lost.clear();
  }
  bool operator==(const StepResult&) const = default;
};

inline bool SequenceStart::operator==(const SequenceStart& other) const {
  const auto same = [](const auto& a, const auto& b) { return a == b || (a && b && *a == *b); };
  return slot == other.slot && sequence == other.sequence && same(tokens, other.tokens) &&
         num_prompt_tokens == other.num_prompt_tokens && num_cached_tokens == other.num_cached_tokens &&
         same(sampling, other.sampling) && state_pages == other.state_pages && checkpoint == other.checkpoint;
}

enum class FinishReason { kStop, kLength, kCancelled, kDeadline, kError };

}  // namespace perigee

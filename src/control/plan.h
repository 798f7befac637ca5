// StepPlan and StepResult: everything that brain and hands say to each other, as plain data.
//
// The scheduler emits a plan, a worker on every rank executes it, and a result comes back one step later. A plan can be
// logged, replayed and sent to another process. Neither side calls the other for anything else.
//
// There is one kind of work: "run n new tokens of the sequence in slot s from position p" (DESIGN D3). A prefill chunk
// carries its token ids; a decode row takes its id, length and penalty counts from the worker, which owns them (D4),
// because with two plans in flight the host does not know them yet.
//
// A slot (0 ... max_sequences-1) is a sequence's place in the worker's arrays. A page is the unit of a rank's memory
// pool; a block is 64 tokens of one cache group; for the latent group one block fills one page (D5, D7). A sequence of
// a recurrent model also has a state, a fixed number of pages from admission to its end; a checkpoint is a saved state
// of as many pages.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "control/sampling.h"

namespace perigee {

inline constexpr int32_t kBlockTokens = 64;
inline constexpr int32_t kMaxPlansInFlight = 2;

// Checkpoints of a step's rows at most: a row of n tokens reaches n / 64 block boundaries, or one more.
constexpr int32_t max_checkpoint_writes(int32_t num_rows, int32_t num_tokens) {
  return num_rows + num_tokens / kBlockTokens;
}

// Tokens of a step under prompt_logprobs, at most. Each needs a row of logits: [256, 163840] f32 is 168 MB.
inline constexpr int32_t kPromptLogprobTokens = 256;
// Rows of logits of a step, at most: one for each sequence that samples, and those.
constexpr int32_t max_logit_rows(int32_t num_sequences) {
  return num_sequences + kPromptLogprobTokens;
}

using SequenceId = Id<struct SequenceTag, int64_t>;
using SlotId = Id<struct SlotTag>;
using PageId = Id<struct PageTag>;
using StepId = Id<struct StepTag, int64_t>;

// A sequence enters a slot (first time, or again after preemption, when its former outputs count as tokens to compute
// but stay outputs for penalties, seeds and min_tokens). Resets the slot's block table, length and counts.
struct SequenceStart {
  SlotId slot;
  SequenceId sequence;
  std::shared_ptr<const std::vector<int32_t>> tokens;  // prompt, then former outputs
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;  // positions [0, n) are already in the pages appended below (a prefix hit)
  std::shared_ptr<const SamplingParams> sampling;

  // Recurrent models. Before its first row the worker makes state_pages the state after num_cached_tokens tokens: a
  // copy of the checkpoint's pages, or zeros where there is none.
  std::vector<PageId> state_pages = {};
  std::vector<PageId> checkpoint = {};
};

// Block `block_index` of the slot's sequence lives in `page` of the rank's pool. Block tables are append-only: indices
// of one slot arrive in ascending order.
struct BlockAppend {
  SlotId slot;
  int32_t block_index = 0;
  PageId page;
};

// Run `num_tokens` new tokens of the slot's sequence.
struct PlanRow {
  SlotId slot;
  SequenceId sequence;
  int32_t num_tokens = 0;
  int32_t position = 0;  // of the first new token; for decode rows what the host expects, the worker's length rules
  int32_t tokens_offset = -1;    // prefill: index of the ids in StepPlan::tokens; -1: decode, the id is the worker's
  bool sample = false;           // the last token's logits are wanted: sample one id
  bool prompt_logprobs = false;  // logits of every new token are wanted
  bool masked = false;           // sampling waits for this row's StepMasks entry

  bool is_decode() const { return tokens_offset < 0; }
};

// The state of this slot after exactly `position` tokens is also written to these pages, in the step that commits it or
// a later position. A prefill chunk commits all its tokens, so `position` lies in it or at its end. A decode row at
// position p commits p, since the newest token's inputs wait in the worker's ring until they are certain (deferred
// commit, D7).
struct CheckpointWrite {
  SlotId slot;
  int32_t position = 0;  // a block boundary
  std::vector<PageId> pages;
};

struct StepPlan {
  StepId step;
  std::vector<SequenceStart> starts;
  std::vector<BlockAppend> appends;
  std::vector<PlanRow> rows;                 // decode rows first, then prefill chunks
  std::vector<int32_t> tokens;               // ids of the prefill chunks, back to back
  std::vector<CheckpointWrite> checkpoints;  // in the order of the rows; those of a row ascending
  int32_t num_decode_rows = 0;

  int32_t num_tokens() const {
    int32_t sum = 0;
    for (const PlanRow& row : rows) sum += row.num_tokens;
    return sum;
  }
};

// Allowed-token bits for sampled rows of one step (grammars): bit id%32 of word id/32. A separate message, because a
// grammar advances on the host while the forward pass already runs (D11).
struct RowMask {
  SlotId slot;
  std::vector<uint32_t> words;  // ceil(vocab / 32)
};
struct StepMasks {
  StepId step;
  std::vector<RowMask> rows;
};

struct RowResult {
  SlotId slot;
  SequenceId sequence;
  std::vector<int32_t> ids;                    // sampled (later: accepted) ids; empty when the row did not sample
  std::vector<TokenLogprobs> logprobs;         // one per id when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // for positions position+1 ... position+num_tokens when asked for
  bool finite = true;  // false: a sampled logit was NaN or infinite; the sequence ends with an error
};

struct StepResult {
  StepId step;
  std::vector<RowResult> rows;  // one per plan row, in the plan's order
  // Not empty: the device is lost, with what was being done where. There are no rows, and no result follows.
  std::string device_lost = {};
};

enum class FinishReason { kStop, kLength, kCancelled, kDeadline, kError };

}  // namespace perigee

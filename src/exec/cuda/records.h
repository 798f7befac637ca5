// What a step brings to the GPU and takes back: plain records, packed by the worker, read and written by its kernels.
#pragma once

#include <cstdint>

#include "control/plan_ids.h"

namespace perigee {

inline constexpr int32_t kMaxListed = 2048;  // entries of logit_bias (at most 1,024) and stop ids of one sequence
inline constexpr int32_t kMaxTopLogprobs = 20;

// SamplingParams as the kernels read them; lists lie in SlotArrays.
struct SlotParams {
  float temperature, top_p, min_p, presence, frequency, repetition;
  uint64_t random_key;
  int32_t top_k, min_tokens, num_bias, num_stops, logprobs, penalties;
};

struct StartRecord {
  int32_t slot, length, num_outputs, num_tokens;  // `length` tokens are in the cache and in the state
  int32_t newest;                                 // the last of the tokens, which a decode row may run
  SlotParams params;
};

// Block `block` of the slot: entry `index` of its block table, of a dcp group of the blocks that lie here (< 0: another
// rank has it); and in a draft's own cache.
struct AppendRecord {
  int32_t slot, index, page, block, draft_block;
};

// A plan row: the ids of decode and verify rows (tokens_offset < 0) are the worker's.
struct RowRecord {
  int32_t slot, num_tokens, tokens_offset, first_row;
  int32_t commit_all;                         // of a recurrent model
  int32_t first_checkpoint, num_checkpoints;  // of PlanArrays
  int32_t num_blocks;                         // of the sequence
  int32_t blocks_here;                        // entries of the slot's block table
  int32_t next_token;                         // after a chunk that samples nothing; -1: the id that is sampled
};

// Ranks share the vocabulary: a row is sampled by one rank, which gets all its logits, or by all of them, where only
// the largest logit matters.
inline constexpr int32_t kEveryRank = -1;

struct SampleRecord {
  int32_t slot, logit_row, mask_row;  // slot < 0: nothing is sampled; mask_row < 0: all ids allowed
  int32_t rank;                       // whose row it is; logit_row counts among its whole rows, else among shares
};

// What a rank says of a row that it has sampled.
struct alignas(16) Pick {
  float logit;  // the largest of its share
  int32_t id, finite;
};

// A row of logits whose probabilities a prompt asks for.
struct ScoreRecord {
  int32_t logit_row, id, top;
};

struct TokenScore {
  float logprob;
  int32_t rank, num_top;
  int32_t top_ids[kMaxTopLogprobs];
  float top_logprobs[kMaxTopLogprobs];
};

struct SampleResult {
  int32_t id, finite;
  TokenScore score;
};

// RankConfig::synthetic_rates; no count: drafts are accepted if they are what is sampled.
struct SyntheticRates {
  int32_t count = 0;
  float rates[kMaxDrafts] = {};
};

// What became of a row that samples at several places.
struct RowOutcome {
  int32_t num_ids;              // the last one may be one that is not finite
  int32_t num_drafts;           // that it verified
  int32_t committed, position;  // tokens that the recurrent state had seen before it, and after it
};

// What the GPU knows of each slot (DESIGN D4), device pointers.
struct SlotArrays {
  int32_t* newest = nullptr;        // [slots] the id that the next decode row runs
  int32_t* drafts = nullptr;        // [slots][kMaxDrafts] ids that may follow it; -1: there is none from here on
  int32_t* length = nullptr;        // [slots] of what is certain
  int32_t* num_outputs = nullptr;   // [slots]
  int32_t* block_tables = nullptr;  // [slots][max_blocks] pages of the blocks that lie here
  int32_t* block_index = nullptr;   // [slots][max_blocks] which these are, ascending; none: all lie here
  // [slots][max_blocks] of each block the one in a draft's own cache, which has those of all ranks of a dcp group;
  // none: those of block_tables, or no such cache
  int32_t* draft_tables = nullptr;
  int32_t* committed = nullptr;     // [slots] tokens that the recurrent state has seen
  int32_t* state_tables = nullptr;  // [slots][state_width] pages of the recurrent state
  SlotParams* params = nullptr;     // [slots]
  int32_t* listed_ids = nullptr;    // [slots][kMaxListed] ids of logit_bias, then stop ids
  float* listed_bias = nullptr;     // [slots][kMaxListed]
  // Under penalties, of the slots that this rank samples, by kept():
  uint32_t* counts = nullptr;  // [ceil(slots / ranks)][ceil(vocab / 2)] two 16-bit counts of sampled ids a word
  uint32_t* seen = nullptr;    // [ceil(slots / ranks)][ceil(vocab / 32)] bits of prompt and sampled ids
  // For prompt lookup:
  int32_t* history = nullptr;    // [slots][max_history] prompt and outputs; null: it is not wanted
  int32_t* num_known = nullptr;  // [slots] of them
  int32_t max_blocks = 0, vocab = 0, state_width = 0, max_history = 0;
  int32_t rank = 0, ranks = 1;

  // As rank_of_slot() deals them.
  constexpr bool is_mine(int32_t slot) const { return slot % ranks == rank; }
  constexpr int64_t kept(int32_t slot) const { return slot / ranks; }

  constexpr int64_t count_words() const { return (vocab + 1) / 2; }
  constexpr int64_t bit_words() const { return (vocab + 31) / 32; }
};

// The passes of a draft model, device pointers: the first over a step's rows, the others over one row a sequence, of
// which a sequence without one is padding.
struct DraftPasses {
  int32_t num_drafts = 0, slots = 0;
  const int32_t* target_ids = nullptr;  // of each id that is drafted the target's; null: the same
  int32_t* first_tokens = nullptr;      // [rows of the step] the token after each
  int32_t* last_rows = nullptr;         // [sequences] of the first pass: the row whose logits give the first draft
  // [num_drafts][slots], of pass i from i * slots on; nothing of the first:
  int32_t* tokens = nullptr;
  int32_t* positions = nullptr;
  int32_t* lengths = nullptr;
  int32_t* row_page = nullptr;
  int32_t* local_blocks = nullptr;
  int32_t* numbers = nullptr;             // [slots + 1] 0, 1, 2, ...
  unsigned long long* largest = nullptr;  // [slots] order_key() of each sequence's largest logit so far
  Pick* picks = nullptr;                  // of several ranks: [slots] this rank's; ...
  Pick* all_picks = nullptr;              // ... [ranks][rows of the pass]
};

// The arrays of a batch in device memory; DeviceSequences and the spans of Batch point into them. A sequence is sampled
// at `places`: one, and one for each draft.
struct BatchArrays {
  int32_t places = 1;
  int32_t* tokens = nullptr;               // [rows]
  int32_t* positions = nullptr;            // [rows]
  int32_t* row_sequence = nullptr;         // [rows]
  int32_t* row_page = nullptr;             // [rows]
  int32_t* first_row = nullptr;            // [sequences + 1]
  int32_t* lengths = nullptr;              // [sequences]
  int32_t* block_tables = nullptr;         // [sequences][SlotArrays::max_blocks]
  int32_t* block_index = nullptr;          // the same shape, of a dcp group as the next
  int32_t* local_blocks = nullptr;         // [sequences]
  int32_t* draft_tables = nullptr;         // as block_tables, of SlotArrays::draft_tables ...
  int32_t* draft_row_page = nullptr;       // [rows] ... and from these
  SampleRecord* samples = nullptr;         // [sequences][places]
  int32_t* sampled_by = nullptr;           // the same shape: the rank that gets the row's logits whole; -1: none
  int32_t* next_token = nullptr;           // [sequences] as RowRecord, these and the next for drafters
  int32_t* chunk_tokens = nullptr;         // [sequences] of a prefill chunk; 0: a decode or verify row, or padding
  int32_t* num_blocks = nullptr;           // [sequences] of the whole sequence
  int32_t* blocks_here = nullptr;          // [sequences] of those, entries of block_tables
  int32_t* slots = nullptr;                // [sequences], these and the rest for recurrent models
  int32_t* committed = nullptr;            // [sequences]
  int32_t* commit = nullptr;               // [sequences]
  int32_t* state_pages = nullptr;          // [sequences][SlotArrays::state_width]
  int32_t* first_checkpoint = nullptr;     // [sequences + 1]
  int32_t* checkpoint_position = nullptr;  // [checkpoints]
  int32_t* checkpoint_pages = nullptr;     // [checkpoints][SlotArrays::state_width]
};

}  // namespace perigee

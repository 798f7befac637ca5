// What a step brings to the GPU and takes back: plain records, packed by the worker, read and written by its kernels.
#pragma once

#include <cstdint>

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
  int32_t slot, length, num_outputs, reserved;  // `length` tokens are in the cache and in the state
  SlotParams params;
};

// Entry `index` of the slot's block table: of a dcp group, of the blocks that lie here.
struct AppendRecord {
  int32_t slot, index, page, block;
};

// A plan row: the ids of decode rows (tokens_offset < 0) are the worker's.
struct RowRecord {
  int32_t slot, num_tokens, tokens_offset, first_row;
  int32_t commit_all;                         // of a recurrent model
  int32_t first_checkpoint, num_checkpoints;  // of PlanArrays
  int32_t blocks_here;                        // of a dcp group: entries of the slot's block table
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

// What the GPU knows of each slot (DESIGN D4), device pointers.
struct SlotArrays {
  int32_t* newest = nullptr;        // [slots] the id that the next decode row runs
  int32_t* length = nullptr;        // [slots]
  int32_t* num_outputs = nullptr;   // [slots]
  int32_t* block_tables = nullptr;  // [slots][max_blocks] pages of the blocks that lie here
  int32_t* block_index = nullptr;   // [slots][max_blocks] which these are, ascending; none: all lie here
  int32_t* committed = nullptr;     // [slots] tokens that the recurrent state has seen
  int32_t* state_tables = nullptr;  // [slots][state_width] pages of the recurrent state
  SlotParams* params = nullptr;     // [slots]
  int32_t* listed_ids = nullptr;    // [slots][kMaxListed] ids of logit_bias, then stop ids
  float* listed_bias = nullptr;     // [slots][kMaxListed]
  // Under penalties, of the slots that this rank samples, by kept():
  uint32_t* counts = nullptr;  // [ceil(slots / ranks)][ceil(vocab / 2)] two 16-bit counts of sampled ids a word
  uint32_t* seen = nullptr;    // [ceil(slots / ranks)][ceil(vocab / 32)] bits of prompt and sampled ids
  int32_t max_blocks = 0, vocab = 0, state_width = 0;
  int32_t rank = 0, ranks = 1;

  // As rank_of_slot() deals them.
  constexpr bool is_mine(int32_t slot) const { return slot % ranks == rank; }
  constexpr int64_t kept(int32_t slot) const { return slot / ranks; }

  constexpr int64_t count_words() const { return (vocab + 1) / 2; }
  constexpr int64_t bit_words() const { return (vocab + 31) / 32; }
};

// The arrays of a batch in device memory; DeviceSequences and the spans of Batch point into them.
struct BatchArrays {
  int32_t* tokens = nullptr;               // [rows]
  int32_t* positions = nullptr;            // [rows]
  int32_t* row_sequence = nullptr;         // [rows]
  int32_t* row_page = nullptr;             // [rows]
  int32_t* first_row = nullptr;            // [sequences + 1]
  int32_t* lengths = nullptr;              // [sequences]
  int32_t* block_tables = nullptr;         // [sequences][SlotArrays::max_blocks]
  int32_t* block_index = nullptr;          // the same shape, of a dcp group as the next
  int32_t* local_blocks = nullptr;         // [sequences]
  SampleRecord* samples = nullptr;         // [sequences]
  int32_t* sampled_by = nullptr;           // [sequences] the rank that gets the row's logits whole; -1: none
  int32_t* slots = nullptr;                // [sequences], these and the rest for recurrent models
  int32_t* committed = nullptr;            // [sequences]
  int32_t* commit = nullptr;               // [sequences]
  int32_t* state_pages = nullptr;          // [sequences][SlotArrays::state_width]
  int32_t* first_checkpoint = nullptr;     // [sequences + 1]
  int32_t* checkpoint_position = nullptr;  // [checkpoints]
  int32_t* checkpoint_pages = nullptr;     // [checkpoints][SlotArrays::state_width]
};

}  // namespace perigee

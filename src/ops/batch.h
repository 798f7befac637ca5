// Batch: what one step computes, as flat arrays; built by exec from a plan, read by ops. No ids of requests in here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ops/latent_format.h"

namespace perigee {

// How a sequence's attention is computed (DESIGN D3). Equal in exact arithmetic, so the choice is one of speed.
enum class MlaForm : uint8_t {
  kAbsorbed,  // queries are mapped into latent space; one 576-wide key head shared by all heads
  kExpanded,  // cached latents are up-projected to per-head keys and values, piece by piece
};

// Whether a token came with the request or was sampled for it.
enum class TokenKind : uint8_t { kPrompt, kOutput };

// Where checkpoints of new tokens that move the state lie: at multiples of this many, so that none cuts a chunk of the
// recurrence in two, and a chunk's bits do not depend on what is saved.
inline constexpr int32_t kCheckpointTokens = 64;

// The state after `position` tokens is also written to these pages.
struct StateCheckpoint {
  int32_t position = 0;
  const int32_t* pages = nullptr;
};

inline constexpr int32_t kRowsOfBlock = 64;  // cached tokens

// Where the blocks of a sequence lie when a group of ranks shares them (decode context parallelism, DESIGN D6). The
// owner of a block is one rank of the group. No owners: every block lies here.
struct SharedBlocks {
  std::span<const int32_t> here;    // index of each block that lies here, ascending
  const uint8_t* owners = nullptr;  // of block b the owner's rank, for all blocks up to the last new token
};

// Run num_tokens tokens at positions position ... of one sequence; they are batch rows first_row ....
struct SequenceRows {
  int32_t first_row = 0;
  int32_t num_tokens = 0;
  int32_t position = 0;
  // Of the blocks that lie here, in their order: where all do, of block b = position / 64, up to the last new token.
  const int32_t* pages = nullptr;
  SharedBlocks shared = {};
  MlaForm form = MlaForm::kAbsorbed;
  // Recurrent state with deferred commit (DESIGN D7); see StateLayer.
  const int32_t* state_pages = nullptr;  // pages of this sequence's units
  int32_t slot = 0;                      // its place in the ring
  int32_t committed = 0;                 // tokens the state has seen; [committed, position) are in the ring
  bool commit_all = false;               // prefill: the state goes to the end of this run
  // Ascending. Written by the step that takes the state there or past it; those it does not reach are left alone. At
  // most one lies among the tokens in the ring; see kCheckpointTokens for the others.
  std::span<const StateCheckpoint> checkpoints = {};
};

// How many of the sequence's first `length` tokens lie here. They come first among all that do: blocks ascend, and none
// but the last is partly filled.
inline int64_t tokens_here(const SequenceRows& s, int64_t length) {
  if (s.shared.owners == nullptr) return length;
  const std::span<const int32_t> here = s.shared.here;
  const auto block = std::lower_bound(here.begin(), here.end(), length / kRowsOfBlock);
  const bool has_last = block != here.end() && *block == length / kRowsOfBlock;
  return (block - here.begin()) * kRowsOfBlock + (has_last ? length % kRowsOfBlock : 0);
}

// Page of the token at `position`; -1: another rank has it.
inline int32_t page_here(const SequenceRows& s, int64_t position) {
  const int64_t block = position / kRowsOfBlock;
  if (s.shared.owners == nullptr) return s.pages[block];
  const std::span<const int32_t> here = s.shared.here;
  const auto at = std::lower_bound(here.begin(), here.end(), block);
  return at != here.end() && *at == block ? s.pages[at - here.begin()] : -1;
}

inline bool checkpoints_are_valid(const SequenceRows& s) {
  int32_t last = -1, in_ring = 0;
  for (const StateCheckpoint& checkpoint : s.checkpoints) {
    const int32_t position = checkpoint.position;
    if (position <= last) return false;
    if (position > s.position && s.commit_all && position % kCheckpointTokens != 0) return false;
    if (position > s.committed && position <= s.position) ++in_ring;
    last = position;
  }
  return in_ring <= 1;
}

// Sequences as device backends read them, all arrays in device memory (DESIGN D4): their lengths may be newer than what
// the host knows.
struct DeviceSequences {
  const int32_t* first_row = nullptr;     // [sequences + 1]
  const int32_t* lengths = nullptr;       // [sequences] tokens, the new ones included; 0: padding
  const int32_t* block_tables = nullptr;  // [sequences][table_width] page of each block that lies here
  int32_t table_width = 0;
  // Where a group of ranks shares the blocks; none: all lie here.
  const int32_t* block_index = nullptr;   // [sequences][table_width] number of each block in block_tables, ascending
  const int32_t* local_blocks = nullptr;  // [sequences] how many those are
  const int32_t* row_sequence = nullptr;  // [n]
  const int32_t* row_page = nullptr;      // [n] page of each row's token; -1: padding or another rank's, not stored

  // Recurrent models, see SequenceRows and StateLayer; undefined for padding. A sequence's position is its length less
  // its rows.
  const int32_t* state_pages = nullptr;  // [sequences][state_width] pages of its units
  int32_t state_width = 0;
  const int32_t* slots = nullptr;             // [sequences] place in the ring
  const int32_t* committed = nullptr;         // [sequences] tokens the state has seen before this step ...
  const int32_t* commit = nullptr;            // [sequences] ... and after it: the position, or the length (commit_all)
  const int32_t* first_checkpoint = nullptr;  // [sequences + 1]
  const int32_t* checkpoint_position = nullptr;  // [checkpoints], of each sequence ascending
  const int32_t* checkpoint_pages = nullptr;     // [checkpoints][state_width]
};

// On device backends tokens, positions and logit_rows point to device memory and `device` is set; `sequences` then
// tells the host how many rows and which form, and its positions may lag.
struct Batch {
  std::span<const int32_t> tokens;          // [n]; < 0: a padding row, whose outputs nobody reads
  std::span<const int32_t> positions;       // [n]
  std::span<const SequenceRows> sequences;  // ascending first_row, covering [0, n)
  std::span<const int32_t> logit_rows;      // rows whose logits are wanted, ascending, each once
  const DeviceSequences* device = nullptr;

  // Whether the cache is shared by a group of ranks: that of all sequences then.
  bool is_shared() const {
    if (device != nullptr) return device->block_index != nullptr;
    return !sequences.empty() && sequences.front().shared.owners != nullptr;
  }
};

// One layer of the latent group in the page pool: row s of page p is at base + p * page_bytes + s * row_bytes.
struct LatentLayer {
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  int64_t row_bytes = 0;
  LatentFormat format = LatentFormat::kBF16;
  float scale = 1;  // kF8E4M3 alone
};

// One layer of full attention in the page pool: a page holds the keys and then the values of each of its heads, of
// kRowsOfBlock tokens `dim` numbers each.
struct FullLayer {
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  DType dtype = DType::kBF16;  // kF32, kBF16, kF8E4M3
  int64_t heads = 0, dim = 0;  // those that lie here

  constexpr int64_t head_bytes() const {
    return kRowsOfBlock * dim * (dtype == DType::kF32 ? 4 : dtype == DType::kBF16 ? 2 : 1);
  }
  constexpr uint8_t* keys(int64_t page, int64_t head) const { return base + page * page_bytes + head * head_bytes(); }
  constexpr uint8_t* values(int64_t page, int64_t head) const { return keys(page, heads + head); }
};

// One recurrent layer's state. Unit u, a (layer, head), of a sequence lies in page state_pages[u / units_per_page] at
// (u % units_per_page) * unit_bytes; a sequence begins with units of zeros. What a unit and a ring's token are:
// KdaShape.
//
// Running n tokens from `position` on with the state at `committed` first takes the tokens in between from the ring
// and leaves the state at `position`. With commit_all the new tokens then move the state too, to position + n. Without
// (decode, verify: n <= ring_tokens) they leave it alone and go into the ring, at position % ring_tokens, until a
// later step says by its `position` how many of them count; rejected ones are overwritten.
struct StateLayer {
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  int64_t unit_bytes = 0;
  int32_t units_per_page = 1;
  int32_t first_unit = 0;  // of this layer: index among recurrent layers * heads
  uint8_t* ring = nullptr;
  int64_t ring_slot_bytes = 0;   // all units of one sequence
  int64_t ring_token_bytes = 0;  // one token of one unit
  int32_t ring_tokens = 0;       // K + 1

  // constexpr: for device code too
  constexpr uint8_t* unit(const int32_t* pages, int64_t head) const {
    const int32_t u = first_unit + static_cast<int32_t>(head);
    return base + pages[u / units_per_page] * page_bytes + u % units_per_page * unit_bytes;
  }
  constexpr uint8_t* ring_token(int32_t slot, int64_t head, int32_t position) const {
    return ring + slot * ring_slot_bytes +
           ((first_unit + head) * ring_tokens + position % ring_tokens) * ring_token_bytes;
  }
};

}  // namespace perigee

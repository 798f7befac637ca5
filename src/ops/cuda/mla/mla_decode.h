// Multi-head latent attention over the paged latent cache, absorbed form (DeepSeek-V2 2024, section 2.1.2): queries are
// already in latent space, and one key row [c | k_rope] serves all heads, as key and (its first 512 columns) as value.
//
// One family serves decode, verify and extend: a sequence brings num_tokens * heads query rows, cut into row tiles that
// each read the sequence's keys once. The keys of a row tile may be cut further, over the slots (thread blocks) of the
// grid; partial results then join in a second kernel by their log-sum-exp. Which slot reads what is a work list made
// on the device from the lengths there, once a step (mla_plan), so a captured graph stays valid at any length.
//
// An fp8 cache has one scale, by value: decode, verify and extend take it here, the cache write in MlaWriteArgs; the
// expanded form (mla_prefill.h) sees latents that were gathered to bf16 with it. Records of 656 bytes (kF8Tiles) are
// read on Hopper alone.
//
// A step calls mla_plan once, then mla_decode for each layer. Nothing here allocates or synchronises.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/cuda/choose.h"
#include "ops/cuda/mla/result_row.h"
#include "ops/latent_format.h"

namespace perigee {

inline constexpr int kMlaLatent = 512;
inline constexpr int kMlaWidth = 576;  // latent and rope columns of a key
inline constexpr int kMlaBlock = 64;   // tokens of a page
inline constexpr int kMlaMaxSequences = 1024;
inline constexpr int kMlaResult = static_cast<int>(result_columns(kMlaLatent));

// The pieces of fixed lists: eight of 512 tokens, eight of 1,024, eight of 2,048 ... from a sequence's first token. So
// they are few, 65 of 1,048,576 tokens, and none holds up the others: 512 tokens and an eighth of what lies in front.
inline constexpr int kMlaPieceBlocks = 8;  // of the first pieces
inline constexpr int kMlaPiecesOfALength = 8;

// The block that a piece begins with.
constexpr int mla_piece_begin(int piece) {
  const int blocks = kMlaPieceBlocks << piece / kMlaPiecesOfALength;
  return blocks * (kMlaPiecesOfALength + piece % kMlaPiecesOfALength) - kMlaPieceBlocks * kMlaPiecesOfALength;
}
// How many pieces the first `blocks` blocks of a sequence fall into.
constexpr int mla_pieces(int blocks) {
  int piece_blocks = kMlaPieceBlocks, pieces = 1 - kMlaPiecesOfALength;
  const int last = blocks - 1 + kMlaPieceBlocks * kMlaPiecesOfALength;
  for (; last >= 2 * kMlaPiecesOfALength * piece_blocks; piece_blocks *= 2) pieces += kMlaPiecesOfALength;
  return pieces + last / piece_blocks;
}

enum class MlaLists : uint8_t {
  kBalanced,  // equal numbers of key blocks for every slot
  kFixed,     // one kernel, pieces at fixed places: a row's bits do not depend on what else is in the batch
};

// What is known when the buffers are made; upper bounds of every later call.
struct MlaDecodeShape {
  int heads = 0;
  int max_sequences = 0;                      // <= kMlaMaxSequences
  int max_tokens = 0;                         // query tokens of a batch
  int max_query = 1;                          // query tokens of one sequence
  int64_t max_pieces = 0;                     // fixed lists: pieces of all row tiles of a batch, at least one a tile
  LatentFormat format = LatentFormat::kBF16;  // kBF16, kF8E4M3, kF8Tiles
  bool results = false;                       // see MlaDecodeArgs
  MlaLists lists = MlaLists::kBalanced;
  int multiprocessors = 0;
  int compute_capability = 0;  // 80, 90, 120, ...
};

struct MlaDecodeConfig {
  MlaKernel kernel = MlaKernel::kMma16;
  MlaLists lists = MlaLists::kBalanced;
  int heads = 0;
  LatentFormat format = LatentFormat::kBF16;
  bool results = false;
  int rows = 0;        // of a row tile
  int slots = 0;       // grid of the attention kernel
  int key_halves = 0;  // half key tiles in shared memory, of the portable kernel
  int multiprocessors = 0;
  int max_sequences = 0, max_tokens = 0, max_tiles = 0;
  int64_t max_partials = 0;

  size_t workspace_bytes() const;
  std::string name() const;  // e.g. "mla_decode mma16 bf16 balanced, 264 slots"
};

// The kernel (choose.h) and its sizes: a pure function.
MlaDecodeConfig mla_decode_config(const MlaDecodeShape& shape);
// What batches of at most as many sequences and tokens need, whatever their longest run.
size_t mla_most_workspace_bytes(MlaDecodeShape shape);

// Device pointers. A batch smaller than its bounds has empty sequences (first_row[s] == first_row[s + 1]) at its end.
struct MlaBatch {
  const int32_t* first_row = nullptr;    // [sequences + 1]: query tokens of sequence s are rows first_row[s] ...
  const int32_t* lengths = nullptr;      // [sequences] tokens of the whole sequence, the new ones included
  const int32_t* block_table = nullptr;  // [sequences][table_width] pages
  const int32_t* block_index =
      nullptr;  // the same shape: place of each block in the sequence, ascending; null: 0, 1 ...
  const int32_t* local_blocks = nullptr;  // [sequences] entries of the table; null: all, ceil(lengths / 64)
  int sequences = 0;
  int table_width = 0;
  int row_begin = 0, row_end = INT32_MAX;  // the query tokens in these batch rows alone
  int query_row = 0;                       // the batch row that q and the outputs begin with
};

struct MlaDecodeArgs {
  const void* q = nullptr;   // bf16 [tokens, heads, 576]
  const void* kv = nullptr;  // row r of page p at kv + p * page_bytes + r * the bytes of a row; 16-byte aligned
  int64_t page_bytes = 0;
  float softmax_scale = 0;
  float kv_scale = 1;           // fp8: a cached number is e4m3 * kv_scale, one scale for all of kv
  void* out = nullptr;          // bf16 [tokens, heads, 512]: sum of p_s c_s
  float* lse = nullptr;         // [tokens, heads] natural log; -inf (and out 0) where no key is visible. May be null
  uint16_t* results = nullptr;  // instead of both, of a config with results: [tokens, heads, kMlaResult], result_row.h
};

// Once per device, before the first call: loads the kernels and raises their limits.
cudaError_t mla_decode_prepare();

// Makes the work lists in `workspace` (config.workspace_bytes(), 256-byte aligned).
cudaError_t mla_plan(const MlaDecodeConfig& config, const MlaBatch& batch, void* workspace, cudaStream_t stream);

// Queries of token i of a sequence see the keys whose position is at most lengths - num_tokens + i. `batch` as planned.
cudaError_t mla_decode(const MlaDecodeConfig& config, const MlaBatch& batch, const MlaDecodeArgs& args, void* workspace,
                       cudaStream_t stream);

}  // namespace perigee

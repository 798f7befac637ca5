// Kimi Delta Attention (Kimi Linear 2025, section 3) of the CUDA backend: heads of 128, convolutions of 4 taps, the
// state f32.
//
// Decode and verify rows run the recurrence itself, one block a (sequence, head), one read and one write of the state a
// step; a row's result, and the state it leaves, are the same bits whatever runs beside it, and whether a token's
// inputs come from the batch or are replayed from the ring. Prefill rows (commit_all) run the chunk form in three
// kernels: what the tokens of each chunk are to each other, all chunks at once; the state through the chunks, one after
// the other; the output norm. Chunks are cut at absolute multiples of kKdaChunk positions. Only decays between a token
// and a later one are formed, as products of numbers <= 1: nothing overflows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "ops/batch.h"
#include "tensor/tensor.h"

namespace perigee {

inline constexpr int kKdaDim = 128;
inline constexpr int kKdaTaps = 4;
inline constexpr int kKdaMaxRing = 8;     // tokens of a ring at most, so new tokens of a decode or verify run too
inline constexpr int kKdaChunk = 32;      // tokens of one application of the chunk form
inline constexpr int kKdaMaxPieces = 64;  // of one launch
inline constexpr int kKdaMaxChunks = 64;  // of one launch: bounds its scratch memory

// All pointers are device pointers; n = rows of the batch. Which sequences there are, what of their tokens counts and
// which of them are prefills the kernels read from `sequences`.
struct KdaCall {
  Tensor qkv, a, b, z;             // as KdaInputs, b bf16
  Tensor y;                        // [n, heads * 128] bf16
  const float* conv = nullptr;     // [4][3 * heads * 128]
  const float* rate = nullptr;     // [heads] exp(A_log)
  const float* dt_bias = nullptr;  // [heads * 128]
  const float* o_norm = nullptr;   // [128]
  float eps = 0;
  int32_t heads = 0;
  int32_t num_sequences = 0;
  StateLayer state;
  DeviceSequences sequences;
};

// Some chunks of one prefill, in units of KdaChunks' first slot on.
struct KdaPiece {
  int32_t sequence = 0;
  int32_t first_chunk = 0, num_chunks = 0;  // those that are not there are passed over
  int32_t first_slot = 0;                   // in the scratch memory
};

// Pieces of different sequences.
struct KdaPieces {
  int32_t count = 0, num_slots = 0;
  KdaPiece pieces[kKdaMaxPieces];
  void* scratch = nullptr;  // kda_scratch_bytes(num_slots, heads)
  // The kernel before in the stream is the kda_carry of other pieces of this call, with other scratch memory:
  // kda_relate does not wait for it.
  bool beside_carry = false;
  float* out = nullptr;  // [n, heads * 128], before the norm
};

int64_t kda_scratch_bytes(int64_t num_slots, int64_t heads);
// Chunks that a run of num_tokens tokens may have, wherever it begins.
constexpr int64_t kda_max_chunks(int64_t num_tokens) {
  return (num_tokens + 2 * kKdaChunk - 2) / kKdaChunk;
}

// Once per device, before the first launch.
cudaError_t kda_load_kernels();
// Decode and verify rows of all sequences; of prefills, the replay of their ring. Padding rows' outputs become zeros.
cudaError_t kda_step(const KdaCall& call, cudaStream_t stream);
// Prefill rows, after kda_step: the chunks' relations, then the state through the chunks; pieces of one sequence in
// order. Besides, kda_relate finishes pieces that are through: y = RMSNorm(out) * weight * sigmoid(z).
cudaError_t kda_relate(const KdaCall& call, const KdaPieces& pieces, const KdaPieces& carried, cudaStream_t stream);
cudaError_t kda_carry(const KdaCall& call, const KdaPieces& pieces, cudaStream_t stream);

}  // namespace perigee

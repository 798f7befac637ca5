// Multi-head latent attention, expanded form (DeepSeek-V2 2024, section 2.1): every head has keys and values of its
// own, made from the latents by a matrix product before. Causal, over a batch of sequences of different lengths; cached
// context goes through in pieces that join by their log-sum-exp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/choose.h"

namespace perigee {

// Device pointers. Heads are nope + 64 wide for keys; supported (nope, value): (128, 128), (192, 256).
struct MlaPrefillArgs {
  int heads = 0, nope = 0, value = 0;
  int sequences = 0;
  int max_query = 0;                     // upper bound of a sequence's new tokens
  int keys = 0;                          // rows that `up` and `k_rope` have room for, at least first_key[sequences]
  const int32_t* first_query = nullptr;  // [sequences + 1] rows of q
  const int32_t* first_key = nullptr;    // [sequences + 1] rows of this call's keys
  // A query of row i of its sequence sees keys j <= i + offset of this call's; null: offset = keys - queries, which is
  // right when the keys end with the new tokens. A piece of earlier context: any offset >= keys - 1.
  const int32_t* offset = nullptr;  // [sequences]
  const void* q = nullptr;          // bf16 [queries, heads, nope + 64], rotated
  const void* up = nullptr;         // bf16 [keys, heads, nope + value]: key part and value of each head
  const void* k_rope = nullptr;     // bf16 [keys, k_rope_stride], 64 columns shared by all heads
  int64_t k_rope_stride = 64;
  float softmax_scale = 0;
  bool join = false;         // out_f32 and lse hold the result over earlier pieces
  float* out_f32 = nullptr;  // [queries, heads, value]; needed when pieces are joined, else null
  void* out = nullptr;       // bf16, the same shape; null: not wanted yet
  float* lse = nullptr;      // [queries, heads] natural log, -inf where nothing was seen; null: not wanted
};

cudaError_t mla_prefill_prepare();
cudaError_t mla_prefill(PrefillKernel kernel, const MlaPrefillArgs& args, cudaStream_t stream);

}  // namespace perigee

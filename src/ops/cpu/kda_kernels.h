// The inner loops of kda.cc, compiled once for each instruction set. All matrices are f32 and row-major; a head's keys
// and values have kKdaDim elements; S is [keys][values].
//
// Every loop works on each token's channels, or on each value column of S, by itself: results depend on neither the
// instruction set's slab width nor the number of tokens that run together (the chunk form excepted, in its chunks).
#pragma once

#include <cstdint>

#include "ops/cpu/isa.h"

namespace perigee::cpu {

inline constexpr int64_t kKdaDim = 128;
inline constexpr int64_t kKdaTaps = 4;
inline constexpr int64_t kKdaChunk = 16;  // tokens of one application of the chunk form

// out[t] = SiLU(sum over taps j of weights[j] * rows[t + j]), for num_tokens tokens of kKdaDim channels.
struct KdaConvolution {
  const float* const* rows = nullptr;  // [kKdaTaps - 1 + num_tokens] inputs, oldest first
  const float* weights = nullptr;      // [kKdaTaps][kKdaDim], rows `stride` apart
  int64_t stride = 0;
  int64_t num_tokens = 0;
  float* out = nullptr;  // [num_tokens][kKdaDim]
};

// The recurrence, token by token: S = decay S + k (beta (v - k^T decay S))^T, out = q^T S.
struct KdaSteps {
  int64_t num_tokens = 0;
  int64_t num_commit = 0;    // after this many, 0 for none, `state` is written
  int64_t first_output = 0;  // tokens before give none
  const float* q = nullptr;  // q, k, v, decay: [num_tokens][kKdaDim]
  const float* k = nullptr;
  const float* v = nullptr;
  const float* decay = nullptr;
  const float* beta = nullptr;  // [num_tokens]
  float* decayed_q = nullptr;   // working memory, decayed_k and work too: [num_tokens][kKdaDim]
  float* decayed_k = nullptr;
  float* state = nullptr;   // [kKdaDim][kKdaDim]
  float* work = nullptr;    // the same size
  int64_t checkpoint = -1;  // <= num_commit; after this many tokens (> 0) the state is copied to ...
  float* checkpoint_state = nullptr;
  const float* ahead = nullptr;  // the state that is likely next, to be brought near meanwhile; null: none
  float* out = nullptr;          // [num_tokens][kKdaDim]
};

// What one chunk's tokens are to each other; rows of tokens that are not there: k = q = 0, decay = 1.
struct KdaRelations {
  float q[kKdaChunk][kKdaDim];     // q_i * decay from the chunk's begin through i
  float k[kKdaChunk][kKdaDim];     // k_i * the same
  float decay[kKdaDim];            // of the whole chunk
  float left[kKdaDim][kKdaChunk];  // k_j * decay after j to the chunk's end, transposed
  float qk[kKdaChunk][kKdaChunk];  // q_i . k_j * decay after j through i, for j <= i
  float kk[kKdaChunk][kKdaChunk];  // k_i . k_j * the same, for j < i
};

// Rows that the next chunk will touch, to be brought near while this one is computed: they lie so far apart that no
// hardware prefetcher finds them.
struct KdaAhead {
  static constexpr int64_t kStreams = 6;
  const float* begin[kStreams] = {};  // of the first token, kKdaDim numbers
  int64_t stride[kStreams] = {};      // from token to token
  int64_t num_tokens = 0;
};

struct KdaChunk {
  const KdaRelations* relations = nullptr;
  const float* v = nullptr;     // [kKdaChunk][kKdaDim]
  const float* beta = nullptr;  // [kKdaChunk]; 0 for tokens that are not there
  float* slabs = nullptr;       // S as to_slabs() gives it, moved to the chunk's end
  float* out = nullptr;         // [kKdaChunk][kKdaDim]
  KdaAhead ahead;
};

struct KdaKernels {
  void (*convolve)(const KdaConvolution& c);
  void (*normalise)(float* rows, int64_t num_rows, float gain);  // each row x *= gain / sqrt(x . x + 1e-6)
  // g = -rate * softplus(a + bias), [kKdaDim]
  void (*log_decay)(const float* a, const float* bias, float rate, float* g);
  void (*exponential)(const float* x, float* y);  // y = e^x, [kKdaDim]; x <= 0
  void (*steps)(const KdaSteps& steps);
  void (*to_slabs)(const float* state, float* slabs);
  void (*from_slabs)(const float* slabs, float* state);
  // q, k, decay [kKdaChunk][kKdaDim]
  void (*relate)(const float* q, const float* k, const float* decay, KdaRelations& out);
  void (*apply)(const KdaChunk& chunk);
  // out = RMSNorm(o) * weight * sigmoid(z), [kKdaDim]
  void (*gated_norm)(const float* o, const float* weight, const float* z, float eps, float* out);
};

extern const KdaKernels kKdaAvx2;
extern const KdaKernels kKdaAvx512;

}  // namespace perigee::cpu

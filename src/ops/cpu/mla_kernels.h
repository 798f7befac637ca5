// The inner loops of mla_absorbed.cc and mla_expanded.cc, compiled once for each instruction set.
//
// Product: A row-major bf16 as it lies in memory (weights, expanded keys) times B in column panels of 16
// (up-projections, queries). Element (k, c) of a panel is half k % 2 of word [k / 2][c]: what AMX calls VNNI and
// vdpbf16ps takes as it is. Scores are computed transposed, keys by queries.
//
// Scores and Values are the two products of the absorbed form, whose one operand is the cache as it lies in its pages.
// Their queries are few, the heads of a rank for each token, so nothing there may cost a panel of 16 where 4 are asked
// for.
//
// Every element of a product is summed in one order, whatever the number of rows and columns; every other loop here
// works on each query column or row by itself. That is what makes results independent of the batch.
#pragma once

#include <cstdint>
#include <limits>

#include "ops/cpu/isa.h"

namespace perigee::cpu {

inline constexpr int64_t kPanel = 16;  // columns of a panel, rows of a tile
inline constexpr int64_t kDepth = 32;  // k is a multiple of this
inline constexpr float kLog2E = 1.44269504f;

inline int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// c [m, columns] = or += a [m, k] b [k, columns]; k a multiple of 32. Rows and columns beyond, up to multiples of 16,
// are there too: those of a and b may be read, those of c may become anything. One operand may be given as two terms,
// high + low, laid out alike.
struct Product {
  const uint16_t* a = nullptr;
  const uint16_t* a_low = nullptr;
  int64_t a_stride = 0;  // elements
  const uint32_t* b = nullptr;
  const uint32_t* b_low = nullptr;
  int64_t panel_stride = 0;  // words, >= k / 2 * 16
  float* c = nullptr;
  int64_t c_stride = 0;  // elements
  int64_t m = 0, k = 0, columns = 0;
  bool accumulate = false;
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
};

// Softmax of one panel of scores s [num_keys, 16], where key j counts for query column q if j < limit[q] only: a
// select, so that a masked score may be anything.
struct SoftmaxPanel {
  const float* scores = nullptr;
  int64_t stride = 0;              // of a key's row, elements
  int64_t num_keys = 0;            // a multiple of 32
  const int32_t* limit = nullptr;  // [16]
  float scale = 0;                 // softmax scale * log2(e)
  float* max = nullptr;            // [16] in: running maximum of scaled scores (-inf: none yet), out: the new one
  float* sum = nullptr;            // [16] running sum, scaled to the new maximum
  float* fade = nullptr;           // [16] out: 2^(old max - new max), what earlier outputs are to be multiplied by
  uint32_t* weights = nullptr;     // out: [num_keys / 2][16] the panel of bf16 weights
};

// Cached rows of one block of kBlockKeys keys, in bf16. All of a block may be read, whatever it holds.
struct BlockRows {
  const uint16_t* rows = nullptr;
  int64_t stride = 0;  // elements
};
inline constexpr int64_t kBlockKeys = 64;  // rows of a page

// out [num_keys, num_queries] = keys [num_keys, depth] times queries transposed, up to multiples of 16 of both; what is
// beyond them may become anything.
struct Scores {
  BlockRows keys;
  int64_t num_keys = 0;
  const uint32_t* queries = nullptr;  // of pack_queries(), 16 after the other
  int64_t num_queries = 0;
  int64_t depth = 0;  // a multiple of 32
  float* out = nullptr;
  int64_t out_stride = 0;  // of a key's row, elements
};

// out [num_queries, columns] = or += weights [num_queries, num_keys] times values [num_keys, columns]. Values from
// num_keys on may be anything, NaN too; weights from there to the next multiple of 32 are zero.
struct Values {
  const uint16_t* weights = nullptr;
  int64_t weight_stride = 0;          // elements
  const BlockRows* blocks = nullptr;  // kBlockKeys keys each
  int64_t num_keys = 0;               // at most kStepKeys
  int64_t columns = 0;                // a multiple of 32
  int64_t num_queries = 0;
  float* out = nullptr;
  int64_t out_stride = 0;  // elements
  bool accumulate = false;
};
inline constexpr int64_t kStepKeys = 256;

// Result of some keys for one query row: sum_j 2^(s_j - max) v_j and its parts.
struct Partial {
  float max = 0, sum = 0;
};

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Of no keys. Keys whose scores are all NaN have no largest either, but a sum, which is NaN.
// static: one for each instruction set that it is compiled for.
static inline bool is_empty(const Partial& part) {
  return part.max == kNoScore && part.sum == 0;
}

struct MlaKernels {
  void (*multiply)(const Product& p);
  // 16 rows of `k` bf16 (null: zeros), zero up to padded_k, become the columns of one panel [padded_k / 2][16].
  void (*pack_rows)(const uint16_t* const* rows, int64_t k, int64_t padded_k, uint32_t* panel);
  // Words of 16 packed queries of `depth` numbers.
  int64_t (*query_words)(int64_t depth);
  // Like pack_rows(), in the order that scores() wants.
  void (*pack_queries)(const uint16_t* const* rows, int64_t k, int64_t depth, uint32_t* queries);
  void (*scores)(const Scores& p);
  void (*values)(const Values& p);
  void (*softmax)(const SoftmaxPanel& p);
  // [num_pairs][16] words -> [16][num_pairs] words, rows `stride` words apart; num_pairs a multiple of 16.
  void (*transpose)(const uint32_t* in, int64_t num_pairs, int64_t stride, uint32_t* out);
  // v [num_keys, dims] f32 -> out [dims][num_keys] bf16 (rows `stride` apart); keys from num_valid on become zero.
  void (*transpose_values)(const float* v, int64_t num_keys, int64_t num_valid, int64_t dims, int64_t stride,
                           uint16_t* out);
  void (*fade)(float* o, int64_t rows, int64_t stride, const float* factors);  // o[row][0..15] *= factors
  void (*scale)(float* x, float factor, int64_t n);
  // into (max, sum, o[n]) += next, in this order; an empty part is the exact identity.
  void (*merge)(Partial& into, float* o, const Partial& next, const float* next_o, int64_t n);
  void (*narrow)(const float* x, float factor, int64_t n, uint16_t* out);   // bf16(x * factor)
  void (*widen)(const uint8_t* x, float factor, int64_t n, uint16_t* out);  // bf16(e4m3 * factor); NaN stays NaN
  // Two terms of y = x * factor: high = bf16(y), low = bf16(y - high).
  void (*split)(const float* x, float factor, int64_t n, uint16_t* high, uint16_t* low);
};

extern const MlaKernels kMlaAvx2;
extern const MlaKernels kMlaAvx512;
extern const MlaKernels kMlaAmx;

inline const MlaKernels& mla_kernels(Isa isa) {
  return isa == Isa::kAmx ? kMlaAmx : isa == Isa::kAvx512 ? kMlaAvx512 : kMlaAvx2;
}

}  // namespace perigee::cpu

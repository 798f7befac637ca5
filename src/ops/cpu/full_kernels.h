// The inner loops of full_attention.cc, compiled once for each vector width and chosen by Isa.
#pragma once

#include <cstdint>

namespace perigee::cpu {

// A query and what it has of the keys before; `dim` numbers, padded with zeros to a multiple of 16.
struct FullQuery {
  const float* q = nullptr;
  float* out = nullptr;    // sum_j 2^(s_j - max) v_j
  float max = 0, sum = 0;  // of scores s_j = scale * (q . k_j); sum 0: no keys yet
};

struct FullKernels {
  // Rows of n numbers -> rows `stride` apart; what lies between them is left alone.
  void (*widen_bf16)(const uint16_t* x, int64_t rows, int64_t n, int64_t stride, float* out);
  void (*widen_f8)(const uint8_t* x, int64_t rows, int64_t n, int64_t stride, float* out);
  // The query meets the first num_keys (1 to 64) of these keys and values, rows of `dim`.
  void (*attend)(FullQuery& query, const float* keys, const float* values, int64_t num_keys, int64_t dim, float scale);
};

extern const FullKernels kFullAvx2;
extern const FullKernels kFullAvx512;

}  // namespace perigee::cpu

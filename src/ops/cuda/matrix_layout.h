// The layout of weights that the CUDA backend packs (packed.h), from shapes alone. No CUDA header: what a model takes
// on a GPU is computed on any machine, by the functions that the backend reserves its memory by.
#pragma once

#include <cstdint>
#include <span>

#include "ops/weights.h"

namespace perigee {

// `count` matrices of one shape, one after the other: those of the experts of a layer, or one.
struct MatrixLayout {
  WeightFormat format = WeightFormat::kBF16;  // kBF16, kInt4Group32 or kF8Block128
  int64_t out = 0, in = 0, padded_in = 0;
  int64_t count = 1;

  int64_t row_bytes() const {
    return format == WeightFormat::kBF16         ? 2 * padded_in
           : format == WeightFormat::kF8Block128 ? padded_in
                                                 : padded_in / 2;
  }
  // Of one matrix.
  int64_t matrix_bytes() const { return out * row_bytes(); }
  int64_t scale_elements() const {
    if (format == WeightFormat::kBF16) return 0;
    return format == WeightFormat::kInt4Group32 ? out * (padded_in / 32) : (out + 7) / 8 * (padded_in / 128);
  }
  int64_t scale_bytes() const { return scale_elements() * (format == WeightFormat::kInt4Group32 ? 2 : 4); }
  // Of all.
  int64_t data_bytes() const { return count * matrix_bytes(); }
  int64_t all_scale_bytes() const { return count * scale_bytes(); }
  int64_t all_bytes() const { return data_bytes() + all_scale_bytes(); }
};

struct ExpertLayout {
  MatrixLayout gate_up, down;
};
struct MlaUpLayout {
  MatrixLayout kv_b, keys;
};

MatrixLayout linear_layout(std::span<const RawMatrix> stacked);
MatrixLayout gate_up_layout(const RawMatrix& gate, const RawMatrix& up);
ExpertLayout expert_layout(std::span<const RawExpert> experts);  // all are as the first
MlaUpLayout mla_up_layout(const RawMatrix& kv_b, const MlaShape& shape);
MatrixLayout embed_layout(const RawMatrix& table);

}  // namespace perigee

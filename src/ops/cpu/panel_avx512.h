// The AVX-512 kernels by name, for the AMX set, which shares all but most of the multiplication. See panel_kernels.h.
#pragma once

#include <cstdint>

#include "ops/cpu/panel_kernels.h"

namespace perigee::cpu {

// A job of INT4 weights; fix_avx512, which does without `rows`, made its inputs.
void multiply_int4_avx512(const PanelJob& job);
void fix_avx512(uint16_t* a, int64_t groups, int64_t rows, FixedGroup* fixed);
// INT8 k tiles: their whole numbers as bf16.
void expand_int8_avx512(const uint8_t* packed, int64_t k_tiles, uint16_t* tiles);
void tile_to_bf16_avx512(const float* c, int64_t rows, int64_t cols, uint16_t* out, int64_t out_stride);
void to_f32_avx512(const uint16_t* in, float* out, int64_t n);
void split_avx512(const float* x, uint16_t* high, uint16_t* low);
void add_scaled_avx512(const float* part, const float* scale, int64_t rows, const PanelSums& in, const PanelSums& out);
void silu_mul_tile_avx512(const float* gate, const float* up, int64_t rows, uint16_t* out, int64_t out_stride);
void weighted_sum_avx512(const float* y, int64_t stride, const float* weights, int64_t count, float* out, int64_t n);
void dots_avx512(const float* x, const float* w, int64_t n, int64_t num_rows, float* out);

}  // namespace perigee::cpu

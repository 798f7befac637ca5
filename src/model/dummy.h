// Dummy weights: values computed from the tensor's name and the element's index (DESIGN D14), so that sizing runs and
// goldens need no stored weights. The Python side computes the same bits.
//
//   x(name, i) = (2 * (random_u64(fnv1a(name), i) >> 41) + 1) / 2^23 - 1, in (-1, 1), exact in f32
//
// i is the flat row-major index in the full tensor, name the full hub name. Each float step below rounds once:
//   matrices    bf16(x * s),  s = f32(sqrt(3 / fan_in)), fan_in = product of the dimensions after the first
//   norms       bf16(1 + 0.25 x)
//   router bias f32(0.1) * x
//   log decay   f32(ln 16) * (x + 1) * 0.5
//   time bias   -4.5 + 2.5 x
//   INT4        word i = low 32 bits of random_u64(fnv1a(name), i)
//               scale bf16(s * (1 + 0.25 x)), s = f32(1 / (4.6097722 sqrt(in)))
//   FP8         e4m3(448 x), nearest even, saturating; scale s * (1 + 0.25 x), s = f32(sqrt(3 / in) / 448)
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "model/weights.h"

namespace perigee {

// Fill elements [first, first + out.size()) of tensor `name`.
void dummy_matrix(std::string_view name, int64_t fan_in, int64_t first, std::span<uint16_t> out);
void dummy_norm(std::string_view name, int64_t first, std::span<uint16_t> out);
void dummy_bias(std::string_view name, int64_t first, std::span<float> out);
void dummy_log_decay(std::string_view name, int64_t first, std::span<float> out);
void dummy_time_bias(std::string_view name, int64_t first, std::span<float> out);
void dummy_int4(std::string_view name, int64_t first, std::span<uint32_t> words);
void dummy_int4_scale(std::string_view name, int64_t in, int64_t first, std::span<uint16_t> out);
void dummy_fp8(std::string_view name, int64_t first, std::span<uint8_t> out);
void dummy_fp8_scale(std::string_view name, int64_t in, int64_t first, std::span<float> out);

// Parts of tensors are made when asked for, by `num_threads` threads, and live as long as the RawWeight. Storage
// follows the config's quantisation: INT4: routed experts; FP8: all projections; else bf16.
std::unique_ptr<TensorSource> make_dummy_source(int num_threads);

}  // namespace perigee

// What attention over a part of the keys leaves of a (token, head), for others to join: a mean of latents and its
// log-sum-exp, f32. Ranks that share a cache exchange rows [mean | log-sum-exp | 12 unused bytes], aligned to 16 bytes;
// pieces of one kernel lie as mla_plan.cuh says.
//
// Means are f16 of a sixteenth, as terms of reduce points are (comm/cuda/term.h): half the bytes of f32. That loses at
// most 2^-12 of a mean (2^-21 if that is below 2^-10), an eighth of what the joined mean loses as bf16. A mean beyond
// 1,048,064 becomes an infinity and NaN stays NaN, so both show in the joined mean. Attention rounds as it writes the
// row: its bits are the same whoever takes it.
#pragma once

#include <cstdint>

namespace perigee {

constexpr float kMeanUnit = 16;

// Of a row, in numbers of 16 bits.
constexpr int64_t result_columns(int64_t latent) {
  return latent + 8;
}

}  // namespace perigee

// What attention over a rank's part of a shared cache leaves of a (token, head), and ranks exchange: a row [mean of
// latents, f16 | log-sum-exp, f32 | 12 unused bytes], aligned to 16 bytes.
//
// f16 takes half the bytes over the links. It loses at most 2^-12 of a mean (2^-25 if that is below 2^-14), an eighth
// of what the merged mean loses as bf16. A mean beyond its range becomes an infinity and NaN stays NaN, so both show in
// the merged mean. Attention rounds as it writes the row: its bits are the same whichever exchange takes it.
#pragma once

#include <cstdint>

namespace perigee {

// In numbers of 16 bits.
constexpr int64_t result_columns(int64_t latent) {
  return latent + 8;
}

}  // namespace perigee

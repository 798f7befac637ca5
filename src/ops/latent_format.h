// LatentFormat: how the row [c | k_rope] of a cached token lies in memory, c being its latent of L numbers. The one
// value that cache layouts, plans and ops follow; everything else copies rows as bytes.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "tensor/tensor.h"

namespace perigee {

enum class LatentFormat : uint8_t {
  kF32,      // ref
  kBF16,     // cpu, cuda
  kF8E4M3,   // each number is an element times LatentLayer::scale
  kF8Tiles,  // DeepSeek's record: L e4m3 | a f32 scale for each 128 of them | k_rope in bf16; 656 bytes for 512 + 64
};

inline constexpr int64_t kLatentTile = 128;
inline constexpr float kLargestE4M3 = 448;

// Of a cache whose numbers are those that a backend computes with.
inline LatentFormat latent_format(DType activation) {
  CHECK(activation == DType::kF32 || activation == DType::kBF16, "cache of ", dtype_name(activation));
  return activation == DType::kF32 ? LatentFormat::kF32 : LatentFormat::kBF16;
}

constexpr int64_t latent_row_bytes(LatentFormat format, int64_t latent, int64_t rope) {
  switch (format) {
    case LatentFormat::kF32: return 4 * (latent + rope);
    case LatentFormat::kBF16: return 2 * (latent + rope);
    case LatentFormat::kF8E4M3: return latent + rope;
    case LatentFormat::kF8Tiles: return latent + latent / kLatentTile * 4 + 2 * rope;
  }
  return 0;
}

// As --kv-cache-dtype has it.
constexpr const char* latent_format_name(LatentFormat format) {
  switch (format) {
    case LatentFormat::kF32: return "f32";
    case LatentFormat::kBF16: return "bf16";
    case LatentFormat::kF8E4M3: return "fp8";
    case LatentFormat::kF8Tiles: return "fp8_ds_mla";
  }
  return "?";
}

// The parts of a kF8Tiles row.
template <typename Byte>  // uint8_t or const uint8_t
struct LatentTiles {
  Byte* numbers;                                    // [L] e4m3
  Byte* scales;                                     // [L / 128] f32
  Byte* k_rope;                                     // [dr] bf16
  constexpr LatentTiles(Byte* row, int64_t latent)  // constexpr: for device code too
      : numbers(row), scales(row + latent), k_rope(row + latent + latent / kLatentTile * 4) {}
};

}  // namespace perigee

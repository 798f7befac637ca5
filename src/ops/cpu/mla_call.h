// What both forms of MLA attention share: packed up-projections, padded sizes, access to the cached rows.
#pragma once

#include <cstring>

#include "ops/batch.h"
#include "ops/cpu/context.h"
#include "ops/cpu/mla_kernels.h"
#include "ops/weights.h"
#include "tensor/tensor.h"

namespace perigee::cpu {

// Sizes as the products want them: depths rounded up to 32, columns to 16; all padding is zero.
struct MlaDims {
  explicit MlaDims(const MlaShape& s)
      : heads(s.heads),
        nope(s.nope),
        rope(s.rope),
        value(s.value),
        latent(s.latent),
        nope_depth(round_up(s.nope, kDepth)),
        nope_columns(round_up(s.nope, kPanel)),
        value_columns(round_up(s.value, kPanel)),
        latent_depth(round_up(s.latent, kDepth)),
        row_depth(round_up(s.latent + s.rope, kDepth)),
        query_depth(round_up(s.nope + s.rope, kDepth)) {}
  int64_t heads, nope, rope, value, latent;
  int64_t nope_depth, nope_columns, value_columns, latent_depth;
  // Of all heads' panels of one PackedMlaUp, bf16.
  int64_t absorb_bytes() const { return heads * nope_depth * latent_depth * 2; }
  int64_t keys_bytes() const { return heads * latent_depth * nope_columns * 2; }
  int64_t values_bytes() const { return heads * latent_depth * value_columns * 2; }
  int64_t row_depth;    // of a cached row [c | k_rope]
  int64_t query_depth;  // of a head's [nope | rope]
};

// Panels of each head, one after the other (see mla_kernels.h).
struct PackedMlaUp final : PackedWeight {
  Buffer absorb;  // W_UK: depth nope, latent columns: q_nope -> latent
  Buffer keys;    // W_UK transposed: depth latent, nope columns: c -> k_nope
  Buffer values;  // W_UV transposed: depth latent, value columns: c -> v, and the attended c -> output
  int64_t bytes() const override { return static_cast<int64_t>(absorb.size() + keys.size() + values.size()); }

  static const uint32_t* head(const Buffer& panels, int64_t head, int64_t depth, int64_t columns) {
    return reinterpret_cast<const uint32_t*>(panels.data()) + head * (depth / 2) * columns;
  }
};

struct MlaCall {
  const CpuContext& cpu;
  const MlaKernels& kernels;
  const MlaDims dims;
  const PackedMlaUp* up = nullptr;
  Tensor q;
  const Batch& batch;
  LatentLayer cache;
  Tensor out;
  float scale = 0;  // softmax scale * log2(e)
};

inline int64_t block_scratch_elements(const MlaDims& d) {
  return kBlockKeys * d.row_depth;
}

// One cached row [c | k_rope] -> bf16.
inline void load_row(const MlaCall& call, const uint8_t* from, uint16_t* to) {
  const MlaDims& d = call.dims;
  switch (call.cache.format) {
    case LatentFormat::kF8E4M3: return call.kernels.widen(from, call.cache.scale, d.latent + d.rope, to);
    case LatentFormat::kF8Tiles: {
      const LatentTiles row(from, d.latent);
      for (int64_t tile = 0; tile < d.latent / kLatentTile; ++tile) {
        float scale = 0;
        std::memcpy(&scale, row.scales + tile * static_cast<int64_t>(sizeof(scale)), sizeof(scale));
        call.kernels.widen(row.numbers + tile * kLatentTile, scale, kLatentTile, to + tile * kLatentTile);
      }
      std::memcpy(to + d.latent, row.k_rope, static_cast<size_t>(d.rope) * sizeof(uint16_t));
      return;
    }
    default: std::memcpy(to, from, static_cast<size_t>(d.latent + d.rope) * sizeof(uint16_t));
  }
}

// Block b of those of the sequence that lie here, of which the first num_valid rows matter: in place, or copied with
// zero padding where the model's sizes need it, or widened from e4m3.
inline BlockRows block_rows(const MlaCall& call, const SequenceRows& s, int64_t b, int64_t num_valid,
                            uint16_t* scratch) {
  const MlaDims& d = call.dims;
  const uint8_t* page = call.cache.base + s.pages[b] * call.cache.page_bytes;
  if (call.cache.format == LatentFormat::kBF16 && d.latent_depth == d.latent && d.row_depth == d.latent + d.rope)
    return {.rows = reinterpret_cast<const uint16_t*>(page),
            .stride = call.cache.row_bytes / static_cast<int64_t>(sizeof(uint16_t))};
  std::memset(scratch, 0, static_cast<size_t>(block_scratch_elements(d)) * sizeof(uint16_t));
  for (int64_t r = 0; r < num_valid; ++r) load_row(call, page + r * call.cache.row_bytes, scratch + r * d.row_depth);
  return {.rows = scratch, .stride = d.row_depth};
}

// Asks for block b line by line: a product walks sixteen rows at a time, an order that no hardware prefetcher follows.
inline void prefetch_block(const MlaCall& call, const SequenceRows& s, int64_t b) {
  const uint8_t* page = call.cache.base + s.pages[b] * call.cache.page_bytes;
  for (int64_t at = 0; at < kBlockKeys * call.cache.row_bytes; at += 64) __builtin_prefetch(page + at, 0, 2);
}

// The sequences of the batch that are to be computed in the form of the name.
void attend_absorbed(const MlaCall& call);
void attend_expanded(const MlaCall& call);

// The parts of attend_absorbed(), each from q to out: see Ops::mla_absorb, attend_latents and mla_project.
void absorb_queries(const MlaCall& call);
void attend_latents(const MlaCall& call);
void project_latents(const MlaCall& call);

}  // namespace perigee::cpu

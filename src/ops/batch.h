// Batch: what one step computes, as flat arrays; built by exec from a plan, read by ops. No ids of requests in here.
#pragma once

#include <cstdint>
#include <span>

namespace perigee {

// How a sequence's attention is computed (DESIGN D3). Equal in exact arithmetic, so the choice is one of speed.
enum class MlaForm : uint8_t {
  kAbsorbed,  // queries are mapped into latent space; one 576-wide key head shared by all heads
  kExpanded,  // cached latents are up-projected to per-head keys and values, piece by piece
};

// Run num_tokens tokens at positions position ... of one sequence; they are batch rows first_row ....
struct SequenceRows {
  int32_t first_row = 0;
  int32_t num_tokens = 0;
  int32_t position = 0;
  const int32_t* pages = nullptr;  // page of block b = position / 64, for all blocks up to the last new token
  MlaForm form = MlaForm::kAbsorbed;
};

struct Batch {
  std::span<const int32_t> tokens;          // [n]
  std::span<const int32_t> positions;       // [n]
  std::span<const SequenceRows> sequences;  // ascending first_row, covering [0, n)
  std::span<const int32_t> logit_rows;      // rows whose logits are wanted
};

// One layer of the latent group in the page pool: row s of page p is at base + p * page_bytes + s * row_bytes.
struct LatentLayer {
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  int64_t row_bytes = 0;  // (L + dr) elements
  bool f32 = false;       // element type: f32 (ref) or bf16
};

}  // namespace perigee

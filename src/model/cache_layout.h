// CacheLayout: what a sequence keeps on one rank, as groups, and the pages that they take.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/check.h"
#include "ops/batch.h"

namespace perigee {

enum class CacheKind : uint8_t {
  kLatent,  // a page holds one block of 64 tokens of all layers, layer after layer
  kState,   // recurrent state: units, one for each layer and head; a page holds as many as fit
  kFull,    // a draft's keys and values by head: a page holds one block of one layer; see FullLayer
};

// Of arenas: 0 is the page pool, 1 what a draft keeps beside it.
inline constexpr int32_t kDraftArena = 1;

// One kind of cache (DESIGN D5, D7).
struct CacheGroup {
  CacheKind kind;
  int32_t arena = 0;        // where its pages come from; all pages of an arena are of one size
  int32_t block_ratio = 1;  // its blocks for each page of the pool, arena 0; 0: it does not grow with the tokens
  int64_t layers = 0;
  int64_t heads = 1;  // those of a layer that have memory of their own
  // kLatent
  int64_t latent_rank = 0, rope = 0;  // L and dr: of a token in a layer
  LatentFormat format = LatentFormat::kBF16;
  // kFull
  int64_t dim = 0;
  DType numbers = DType::kBF16;
  int32_t shards = 1;  // ranks that the heads are divided among; 1: each has all
  // kState
  int64_t unit_bytes = 0;        // a multiple of 128
  int64_t ring_token_bytes = 0;  // what a token leaves in the ring for one unit; see StateLayer

  static CacheGroup latent(int64_t layers, int64_t latent_rank, int64_t rope, LatentFormat format) {
    return {.kind = CacheKind::kLatent, .layers = layers, .latent_rank = latent_rank, .rope = rope, .format = format};
  }
  static CacheGroup state(int64_t layers, int64_t heads, int64_t unit_bytes, int64_t ring_token_bytes) {
    return {.kind = CacheKind::kState,
            .block_ratio = 0,
            .layers = layers,
            .heads = heads,
            .unit_bytes = unit_bytes,
            .ring_token_bytes = ring_token_bytes};
  }

  static CacheGroup full(int64_t heads, int64_t dim, DType numbers, int32_t shards = 1) {
    return {.kind = CacheKind::kFull, .layers = 1, .heads = heads, .dim = dim, .numbers = numbers, .shards = shards};
  }

  // Of a token in a layer.
  int64_t row_bytes() const {
    return kind == CacheKind::kFull ? 2 * heads * dim * dtype_bytes(numbers)
                                    : latent_row_bytes(format, latent_rank, rope);
  }
  int64_t layer_bytes() const { return (64 * row_bytes() + 127) / 128 * 128; }
  int64_t units() const { return layers * heads; }  // of a sequence's state
  // The least that a page of its arena must hold.
  int64_t least_page_bytes() const { return kind == CacheKind::kState ? unit_bytes : layers * layer_bytes(); }
};

class CacheLayout {
 public:
  CacheLayout() = default;
  CacheLayout(std::initializer_list<CacheGroup> groups) : num_groups_(groups.size()) {
    CHECK(groups.size() <= groups_.size(), groups.size(), " groups of caches");
    std::copy(groups.begin(), groups.end(), groups_.begin());
  }
  std::span<const CacheGroup> groups() const { return std::span(groups_).first(num_groups_); }
  // The model's of that kind; without layers where it has none.
  const CacheGroup& latent() const { return of(CacheKind::kLatent, kNoLatent); }
  const CacheGroup& state() const { return of(CacheKind::kState, kNoState); }
  // What a draft keeps beside the pages, latents or keys and values by head; without layers where there is nothing.
  const CacheGroup& draft() const {
    for (const CacheGroup& group : groups())
      if (group.arena == kDraftArena) return group;
    return kNoDraft;
  }

  // With more layers of latents: a draft's, at the end.
  CacheLayout with_latent_layers(int64_t layers) const {
    CacheLayout out = *this;
    for (CacheGroup& group : std::span(out.groups_).first(num_groups_))
      if (group.kind == CacheKind::kLatent) group.layers += layers;
    return out;
  }

  // With what a draft keeps in an arena of its own, where each page has so many blocks.
  CacheLayout with_draft(CacheGroup group, int32_t block_ratio) const {
    CacheLayout out = *this;
    CHECK(num_groups_ < groups_.size() && draft().layers == 0, num_groups_, " groups of caches");
    group.arena = kDraftArena;
    group.block_ratio = block_ratio;
    out.groups_[out.num_groups_++] = group;
    return out;
  }

  // What any of the arena's groups needs: few latent layers beside large heads waste the rest of a block's page.
  int64_t page_bytes(int32_t arena = 0) const {
    int64_t bytes = 0;
    for (const CacheGroup& group : groups())
      if (group.arena == arena) bytes = std::max(bytes, group.least_page_bytes());
    return bytes;
  }
  // What a page of the pool takes, with its blocks in other arenas.
  int64_t bytes_per_page() const {
    int64_t bytes = page_bytes();
    for (const CacheGroup& group : groups())
      if (group.arena > 0) bytes += group.block_ratio * group.least_page_bytes();
    return bytes;
  }
  int64_t units_per_page() const {
    return state().unit_bytes == 0 ? 0 : page_bytes(state().arena) / state().unit_bytes;
  }
  // Of one sequence's state, and of a checkpoint of it.
  int64_t state_pages() const {
    return state().units() == 0 ? 0 : (state().units() + units_per_page() - 1) / units_per_page();
  }
  int64_t ring_slot_bytes(int32_t ring_tokens) const {
    return state().units() * ring_tokens * state().ring_token_bytes;
  }

 private:
  static constexpr CacheGroup kNoLatent{.kind = CacheKind::kLatent}, kNoState{.kind = CacheKind::kState},
      kNoDraft{.kind = CacheKind::kFull};
  const CacheGroup& of(CacheKind kind, const CacheGroup& none) const {
    for (const CacheGroup& group : groups())
      if (group.kind == kind && group.arena != kDraftArena) return group;
    return none;
  }

  std::array<CacheGroup, 4> groups_{};
  size_t num_groups_ = 0;
};

// The page pool of one rank, as a model sees it, with the ring of each slot's newest tokens beside it.
struct PagePool {
  uint8_t* base = nullptr;
  CacheLayout layout;
  uint8_t* ring = nullptr;  // slots * layout.ring_slot_bytes(ring_tokens); null without recurrent layers
  int32_t ring_tokens = 1;  // K + 1: the most tokens of a step that a later step may still reject
  // Of a draft's arena: block p * block_ratio + dcp index is page p's.
  uint8_t* draft_base = nullptr;

  // i counts the latent layers alone; `scale` is of a kF8E4M3 cache.
  LatentLayer latent_layer(int64_t i, float scale = 1) const {
    return {.base = base + i * layout.latent().layer_bytes(),
            .page_bytes = layout.page_bytes(),
            .row_bytes = layout.latent().row_bytes(),
            .format = layout.latent().format,
            .scale = layout.latent().format == LatentFormat::kF8E4M3 ? scale : 1};
  }
  // A draft's own, of which the layout has one or the other.
  LatentLayer draft_latents() const {
    return {.base = draft_base,
            .page_bytes = layout.draft().least_page_bytes(),
            .row_bytes = layout.draft().row_bytes(),
            .format = layout.draft().format};
  }
  FullLayer draft_heads() const {
    return {.base = draft_base,
            .page_bytes = layout.draft().least_page_bytes(),
            .dtype = layout.draft().numbers,
            .heads = layout.draft().heads,
            .dim = layout.draft().dim};
  }
  // i counts the recurrent layers alone.
  StateLayer state_layer(int64_t i) const {
    return {.base = base,
            .page_bytes = layout.page_bytes(),
            .unit_bytes = layout.state().unit_bytes,
            .units_per_page = static_cast<int32_t>(layout.units_per_page()),
            .first_unit = static_cast<int32_t>(i * layout.state().heads),
            .ring = ring,
            .ring_slot_bytes = layout.ring_slot_bytes(ring_tokens),
            .ring_token_bytes = layout.state().ring_token_bytes,
            .ring_tokens = ring_tokens};
  }
};

}  // namespace perigee

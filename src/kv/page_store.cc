#include "kv/page_store.h"

#include <fmt/core.h>

#include <utility>

namespace perigee {
namespace {

int64_t block_bytes_of(const CacheLayout& layout) {
  return layout.latent().layers * layout.latent().layer_bytes();
}

// Units of a block in a draft's own cache: latents are one, heads have keys and values.
int64_t draft_parts_of(const CacheGroup& draft) {
  if (draft.layers == 0) return 0;
  return draft.kind == CacheKind::kFull ? 2 * draft.heads * draft.shards : draft.layers;
}
int64_t draft_unit_bytes_of(const CacheGroup& draft) {
  if (draft.layers == 0) return 0;
  return draft.kind == CacheKind::kFull ? kBlockTokens * draft.dim * dtype_bytes(draft.numbers) : draft.layer_bytes();
}
std::string draft_numbers_of(const CacheGroup& draft) {
  if (draft.layers == 0) return "";
  return draft.kind == CacheKind::kFull ? dtype_name(draft.numbers) : latent_format_name(draft.format);
}

template <typename T>
Error differ(const char* field, const T& here, const T& there) {
  return bad_input(fmt::format("the peer's {} is {}, here it is {}: both sides need the same", field, there, here),
                   field);
}

// Of the same draft. Latents with the numbers of their target lie beside the pages only where each rank has all of
// them, although blocks are divided (docs/adr/0030).
Error differing_drafts(const CacheShape& here, const CacheShape& there) {
  const bool is_beside = !here.draft_numbers.empty(), is_beside_there = !there.draft_numbers.empty();
  const bool by_layout = is_beside ? here.draft_numbers == here.numbers : there.draft_numbers == there.numbers;
  if (is_beside != is_beside_there && by_layout)
    return bad_input(
        fmt::format(
            "draft_tensor_parallel_size 1 with a --decode-context-parallel-size over 1 puts the draft's latents "
            "beside the pages {0}, and {1} they lie in the blocks: leave draft_tensor_parallel_size out {0}, or "
            "give both servers the same two values",
            is_beside ? "here" : "on the peer", is_beside ? "on the peer" : "here"),
        "draft_tensor_parallel_size");
  const auto name = [](const std::string& numbers) { return numbers.empty() ? "auto" : numbers; };
  return differ("draft_kv_cache_dtype", name(here.draft_numbers), name(there.draft_numbers));
}

}  // namespace

Status check_same(const CacheShape& here, const CacheShape& there) {
  if (here.model != there.model) return differ("model", here.model, there.model);
  if (here.numbers != there.numbers) return differ("kv-cache-dtype", here.numbers, there.numbers);
  if (here.draft != there.draft) return differ("speculative-config", here.draft, there.draft);
  if (here.draft_numbers != there.draft_numbers) return differing_drafts(here, there);
  if (here.deterministic != there.deterministic)
    return differ("deterministic", here.deterministic, there.deterministic);
  if (here.lease_ms != there.lease_ms)
    return bad_input(fmt::format("the peer's kv_lease_duration is {:g} s, here it is {:g} s: both sides need the same",
                                 static_cast<double>(there.lease_ms) / 1000, static_cast<double>(here.lease_ms) / 1000),
                     "kv_lease_duration");
  if (here.block_bytes != there.block_bytes) return differ("block size", here.block_bytes, there.block_bytes);
  if (here.draft_parts != there.draft_parts)
    return differ("number of draft units of a block", here.draft_parts, there.draft_parts);
  if (here.draft_unit_bytes != there.draft_unit_bytes)
    return differ("draft unit size", here.draft_unit_bytes, there.draft_unit_bytes);
  if (here.state_layers != there.state_layers)
    return differ("number of recurrent layers", here.state_layers, there.state_layers);
  if (here.state_heads != there.state_heads)
    return differ("number of heads of a recurrent layer", here.state_heads, there.state_heads);
  if (here.state_unit_bytes != there.state_unit_bytes)
    return differ("state unit size", here.state_unit_bytes, there.state_unit_bytes);
  return {};
}

PageStore::PageStore(std::vector<RankPages> ranks) : ranks_(std::move(ranks)) {}

int64_t PageStore::unit_bytes(UnitGroup group) const {
  const CacheLayout& layout = ranks_.front().layout;
  switch (group) {
    case UnitGroup::kBlocks: return block_bytes_of(layout);
    case UnitGroup::kDraft: return draft_unit_bytes_of(layout.draft());
    case UnitGroup::kState: break;
  }
  return layout.state().unit_bytes;
}

void PageStore::describe(CacheShape& shape) const {
  CHECK(!ranks_.empty(), "an engine without pages");
  const CacheLayout& layout = ranks_[0].layout;
  shape.numbers = latent_format_name(layout.latent().format);
  shape.block_bytes = block_bytes_of(layout);
  shape.draft_numbers = draft_numbers_of(layout.draft());
  shape.draft_parts = draft_parts_of(layout.draft());
  shape.draft_unit_bytes = draft_unit_bytes_of(layout.draft());
  shape.state_layers = layout.state().layers;
  shape.state_heads = layout.state().layers == 0 ? 0 : layout.state().heads * ranks_[0].num_shards;
  shape.state_unit_bytes = layout.state().unit_bytes;
}

// Where the rank has the unit; none: elsewhere.
std::optional<uint8_t*> PageStore::find(const RankPages& rank, const UnitPages& pages, UnitGroup group,
                                        int32_t unit) const {
  const int64_t page_bytes = rank.layout.page_bytes();
  if (group == UnitGroup::kBlocks) {
    const Placement& place = pages.blocks[static_cast<size_t>(unit - pages.first_block)];
    return place.dcp_index == rank.dcp_index ? rank.base + place.page.value * page_bytes : std::optional<uint8_t*>();
  }
  if (group == UnitGroup::kDraft) {
    const CacheGroup& draft = rank.layout.draft();
    const int64_t parts = draft_parts_of(draft), shard = draft.shards > 1 ? rank.shard : 0;
    const Placement& place = pages.blocks[static_cast<size_t>(unit / parts - pages.first_block)];
    int64_t part = unit % parts;
    if (draft.kind == CacheKind::kFull) {  // a rank has the keys of its heads, then their values
      const int64_t heads = draft.heads * draft.shards, head = part % heads - shard * draft.heads;
      if (head < 0 || head >= draft.heads) return std::nullopt;
      part = part / heads * draft.heads + head;
    }
    const int64_t block = int64_t{place.page.value} * draft.block_ratio + place.dcp_index;
    return rank.draft_base + block * draft.least_page_bytes() + part * draft_unit_bytes_of(draft);
  }
  const CacheGroup& state = rank.layout.state();
  const int64_t heads = state.heads * rank.num_shards, of_state = heads * state.layers;
  const auto& state_pages = unit < of_state ? pages.checkpoint : pages.tail_state;
  unit %= static_cast<int32_t>(of_state);
  const int64_t per_page = rank.layout.units_per_page();
  const int64_t head = unit % heads - rank.shard * state.heads;
  if (head < 0 || head >= state.heads) return std::nullopt;
  const int64_t local = unit / heads * state.heads + head;
  const auto index = static_cast<size_t>(rank.dcp_index * rank.layout.state_pages() + local / per_page);
  return rank.base + state_pages[index].page.value * page_bytes + local % per_page * state.unit_bytes;
}

std::vector<UnitRun> PageStore::runs_of(const RankPages& rank, const UnitPages& pages, UnitRange units,
                                        std::vector<bool>* taken) const {
  std::vector<UnitRun> runs;
  for (int32_t i = 0; i < units.count; ++i) {
    if (taken != nullptr && (*taken)[static_cast<size_t>(i)]) continue;
    const std::optional<uint8_t*> page = find(rank, pages, units.group, units.first + i);
    if (!page) continue;
    runs.push_back({.page = *page, .offset = i * unit_bytes(units.group)});
    if (taken != nullptr) (*taken)[static_cast<size_t>(i)] = true;
  }
  return runs;
}

Status PageStore::gather(const UnitPages& pages, UnitRange units, std::span<uint8_t> out) const {
  std::vector<bool> taken(static_cast<size_t>(units.count));
  for (const RankPages& rank : ranks_) {
    const std::vector<UnitRun> runs = runs_of(rank, pages, units, &taken);
    if (!runs.empty()) RETURN_IF_ERROR(rank.memory->gather(runs, unit_bytes(units.group), out));
  }
  return {};
}

Status PageStore::scatter(const UnitPages& pages, UnitRange units, std::span<const uint8_t> bytes) const {
  for (const RankPages& rank : ranks_) {
    const std::vector<UnitRun> runs = runs_of(rank, pages, units);
    if (!runs.empty()) RETURN_IF_ERROR(rank.memory->scatter(runs, unit_bytes(units.group), bytes));
  }
  return {};
}

Status PageStore::poison(const UnitPages& pages, UnitRange units) const {
  for (const RankPages& rank : ranks_) {
    const std::vector<UnitRun> runs = runs_of(rank, pages, units);
    if (!runs.empty()) RETURN_IF_ERROR(rank.memory->poison(runs, unit_bytes(units.group)));
  }
  return {};
}

Status PageStore::poison(const UnitPages& pages) const {
  CacheShape shape;
  describe(shape);
  const auto num_blocks = static_cast<int32_t>(pages.blocks.size());
  RETURN_IF_ERROR(poison(pages, {UnitGroup::kBlocks, pages.first_block, num_blocks}));
  RETURN_IF_ERROR(poison(pages, shape.draft_units(pages.first_block, num_blocks)));
  if (!pages.checkpoint.empty()) RETURN_IF_ERROR(poison(pages, shape.checkpoint_units()));
  return pages.tail_state.empty() ? Status() : poison(pages, shape.tail_units());
}

}  // namespace perigee

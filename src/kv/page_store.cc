#include "kv/page_store.h"

#include <fmt/core.h>

#include <cstring>
#include <utility>

#include "base/thread.h"

namespace perigee {
namespace {

int64_t block_bytes_of(const CacheLayout& layout) {
  return layout.latent().layers * layout.latent().layer_bytes();
}

}  // namespace

Status check_same(const CacheShape& here, const CacheShape& there) {
  const auto differ = [](const char* field, const auto& a, const auto& b) {
    return bad_input(fmt::format("the peer's {} is {}, here it is {}: both sides need the same", field, b, a), field);
  };
  if (here.model != there.model) return differ("model", here.model, there.model);
  if (here.numbers != there.numbers) return differ("kv-cache-dtype", here.numbers, there.numbers);
  if (here.draft != there.draft) return differ("speculative-config", here.draft, there.draft);
  if (here.deterministic != there.deterministic)
    return differ("deterministic", here.deterministic, there.deterministic);
  if (here.block_bytes != there.block_bytes) return differ("block size", here.block_bytes, there.block_bytes);
  if (here.state_layers != there.state_layers)
    return differ("number of recurrent layers", here.state_layers, there.state_layers);
  if (here.state_heads != there.state_heads)
    return differ("number of heads of a recurrent layer", here.state_heads, there.state_heads);
  if (here.state_unit_bytes != there.state_unit_bytes)
    return differ("state unit size", here.state_unit_bytes, there.state_unit_bytes);
  return {};
}

PageStore::PageStore(std::vector<RankPages> ranks) : ranks_(std::move(ranks)) {}

void PageStore::describe(CacheShape& shape) const {
  CHECK(!ranks_.empty(), "an engine without pages");
  const CacheLayout& layout = ranks_[0].layout;
  shape.numbers = latent_format_name(layout.latent().format);
  shape.block_bytes = block_bytes_of(layout);
  shape.state_layers = layout.state().layers;
  shape.state_heads = layout.state().layers == 0 ? 0 : layout.state().heads * ranks_[0].num_shards;
  shape.state_unit_bytes = layout.state().unit_bytes;
}

template <typename Visit>
void PageStore::for_each(const UnitPages& pages, UnitRange units, Visit&& visit) const {
  for (const RankPages& rank : ranks_) {
    const int64_t page_bytes = rank.layout.page_bytes();
    for (int32_t i = 0; i < units.count; ++i) {
      const int32_t unit = units.first + i;
      if (units.group == UnitGroup::kBlocks) {
        const Placement& place = pages.blocks[static_cast<size_t>(unit - pages.first_block)];
        uint8_t* const page = rank.base + place.page.value * page_bytes;
        if (place.dcp_index != rank.dcp_index) continue;
        about_to_touch(page);
        visit(page, i, block_bytes_of(rank.layout));
        continue;
      }
      const CacheGroup& state = rank.layout.state();
      const int64_t heads = state.heads * rank.num_shards;
      const int64_t head = unit % heads - rank.shard * state.heads;
      if (head < 0 || head >= state.heads) continue;
      const int64_t local = unit / heads * state.heads + head, per_page = rank.layout.units_per_page();
      const auto page = static_cast<size_t>(rank.dcp_index * rank.layout.state_pages() + local / per_page);
      uint8_t* const address =
          rank.base + pages.checkpoint[page].page.value * page_bytes + local % per_page * state.unit_bytes;
      about_to_touch(address);
      visit(address, i, state.unit_bytes);
    }
  }
}

void PageStore::gather(const UnitPages& pages, UnitRange units, std::span<uint8_t> out) const {
  for_each(pages, units, [&](const uint8_t* from, int32_t i, int64_t size) {
    CHECK((i + 1) * size <= std::ssize(out), "no room for unit ", i);
    std::memcpy(out.data() + i * size, from, static_cast<size_t>(size));
  });
}

void PageStore::scatter(const UnitPages& pages, UnitRange units, std::span<const uint8_t> bytes) const {
  for_each(pages, units, [&](uint8_t* to, int32_t i, int64_t size) {
    CHECK((i + 1) * size <= std::ssize(bytes), "no bytes for unit ", i);
    std::memcpy(to, bytes.data() + i * size, static_cast<size_t>(size));
  });
}

void PageStore::poison(const UnitPages& pages) const {
  const auto fill = [](uint8_t* to, int32_t, int64_t size) { std::memset(to, 0xff, static_cast<size_t>(size)); };
  for_each(pages, {UnitGroup::kBlocks, pages.first_block, static_cast<int32_t>(pages.blocks.size())}, fill);
  CacheShape shape;
  describe(shape);
  if (!pages.checkpoint.empty()) for_each(pages, {UnitGroup::kState, 0, shape.state_units()}, fill);
}

}  // namespace perigee

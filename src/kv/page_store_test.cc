// Units are the same bytes in any layout of ranks.
#include "kv/page_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "base/rng.h"

namespace perigee {
namespace {

constexpr int64_t kHeads = 4, kLayers = 3, kUnitBytes = 1024;
constexpr int32_t kPages = 40;

// The page pools of one engine, and pages in them for so many blocks and a checkpoint.
class Node {
 public:
  Node(int32_t tp, int32_t dcp, int32_t num_blocks, uint64_t seed) {
    const CacheLayout layout = {CacheGroup::latent(2, 48, 16, LatentFormat::kBF16),
                                CacheGroup::state(kLayers, kHeads / tp, kUnitBytes, 64)};
    std::vector<RankPages> ranks;
    for (int32_t r = 0; r < tp; ++r) {
      memory_.push_back(std::make_unique<std::vector<uint8_t>>(static_cast<size_t>(kPages * layout.page_bytes()), 7));
      ranks.push_back(
          {.base = memory_.back()->data(), .layout = layout, .shard = r, .num_shards = tp, .dcp_index = r % dcp});
    }
    store = PageStore(ranks);
    std::vector<int32_t> ids(kPages);
    std::iota(ids.begin(), ids.end(), 0);
    Rng rng(seed);
    for (size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[rng.below(i + 1)]);
    size_t next = 0;
    for (int32_t b = 0; b < num_blocks; ++b)
      blocks.push_back({PageId(ids[next++]), static_cast<int32_t>(rng.below(static_cast<uint64_t>(dcp)))});
    for (int32_t index = 0; index < dcp; ++index)
      for (int64_t i = 0; i < layout.state_pages(); ++i) checkpoint.push_back({PageId(ids[next++]), index});
    store.describe(shape);
  }
  UnitPages pages(int32_t first_block = 0) const {
    return {.first_block = first_block, .blocks = blocks, .checkpoint = checkpoint};
  }
  std::vector<uint8_t> gathered(UnitRange units, int32_t first_block = 0) const {
    std::vector<uint8_t> out(static_cast<size_t>(units.count * shape.unit_bytes(units.group)));
    EXPECT_TRUE(store.gather(pages(first_block), units, out).ok());
    return out;
  }
  size_t num_bytes_of(uint8_t value) const {
    size_t count = 0;
    for (const auto& memory : memory_) count += static_cast<size_t>(std::count(memory->begin(), memory->end(), value));
    return count;
  }

  PageStore store;
  CacheShape shape;
  std::vector<Placement> blocks, checkpoint;

 private:
  std::vector<std::unique_ptr<std::vector<uint8_t>>> memory_;
};

std::vector<uint8_t> random_bytes(size_t count) {
  Rng rng(3);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.below(255));  // none is 0xff
  return bytes;
}

TEST(PageStore, AnyLayoutToAnyLayout) {
  constexpr std::pair<int32_t, int32_t> kLayouts[] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};
  for (const auto& [tp, dcp] : kLayouts)
    for (const auto& [to_tp, to_dcp] : kLayouts) {
      SCOPED_TRACE(str_cat(tp, "/", dcp, " to ", to_tp, "/", to_dcp));
      const Node from(tp, dcp, 5, 1), to(to_tp, to_dcp, 5, 2);
      ASSERT_TRUE(check_same(from.shape, to.shape).ok());
      for (const UnitRange units :
           {UnitRange{UnitGroup::kBlocks, 0, 5}, UnitRange{UnitGroup::kState, 0, from.shape.state_units()}}) {
        const auto bytes = random_bytes(static_cast<size_t>(units.count * from.shape.unit_bytes(units.group)));
        ASSERT_TRUE(from.store.scatter(from.pages(), units, bytes).ok());
        ASSERT_TRUE(to.store.scatter(to.pages(), units, from.gathered(units)).ok());
        EXPECT_EQ(to.gathered(units), bytes);
        // In parts, too.
        const auto unit = static_cast<size_t>(from.shape.unit_bytes(units.group));
        for (int32_t i = 0; i < units.count; ++i) {
          const auto one = to.gathered({units.group, i, 1});
          EXPECT_TRUE(std::equal(one.begin(), one.end(), bytes.begin() + static_cast<std::ptrdiff_t>(i * unit)));
        }
      }
    }
}

TEST(PageStore, NeighboursAndOtherPagesStayAsTheyAre) {
  const Node node(2, 2, 3, 1);
  const size_t untouched = node.num_bytes_of(7);
  ASSERT_TRUE(node.store.poison(node.pages()).ok());
  const size_t poisoned = node.num_bytes_of(0xff);
  const auto expected = static_cast<size_t>(3 * node.shape.block_bytes + node.shape.state_units() * kUnitBytes);
  EXPECT_EQ(poisoned, expected) << "each block lies with one of these ranks, and each head";
  EXPECT_EQ(node.num_bytes_of(7), untouched - poisoned);
}

TEST(PageStore, BlocksAreNumberedFromTheFirstOfThePrompt) {
  const Node node(1, 1, 3, 1);
  const auto bytes = random_bytes(static_cast<size_t>(node.shape.block_bytes));
  ASSERT_TRUE(node.store.scatter(node.pages(10), {UnitGroup::kBlocks, 11, 1}, bytes).ok());
  EXPECT_EQ(node.gathered({UnitGroup::kBlocks, 1, 1}), bytes);
}

TEST(CacheShape, TheFirstDifferenceIsNamed) {
  const CacheShape shape{
      .model = "a", .numbers = "bf16", .block_bytes = 64, .state_layers = 2, .state_heads = 4, .state_unit_bytes = 128};
  EXPECT_TRUE(check_same(shape, shape).ok());
  const auto field_of = [&](auto change) {
    CacheShape other = shape;
    change(other);
    const Status status = check_same(shape, other);
    return status.ok() ? "none" : status.error().field;
  };
  EXPECT_EQ(field_of([](CacheShape& s) { s.model = "b"; }), "model");
  EXPECT_EQ(field_of([](CacheShape& s) { s.numbers = "fp8"; }), "kv-cache-dtype");
  EXPECT_EQ(field_of([](CacheShape& s) { s.draft = "d"; }), "speculative-config");
  EXPECT_EQ(field_of([](CacheShape& s) { s.deterministic = true; }), "deterministic");
  EXPECT_EQ(field_of([](CacheShape& s) { s.lease_ms = 1000; }), "kv_lease_duration");
  EXPECT_EQ(field_of([](CacheShape& s) { s.block_bytes = 65; }), "block size");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_heads = 8; }), "number of heads of a recurrent layer");
  EXPECT_EQ(field_of([](CacheShape& s) { std::swap(s.state_heads, s.state_layers); }), "number of recurrent layers");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_unit_bytes = 1; }), "state unit size");
}

}  // namespace
}  // namespace perigee

// The page pools of one engine for tests, with pages in them for so many blocks and a checkpoint.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "kv/page_store.h"

namespace perigee {

constexpr int64_t kTestHeads = 4, kTestLayers = 3, kTestUnitBytes = 1024;
constexpr int32_t kTestPages = 64;
constexpr std::pair<int32_t, int32_t> kTestLayouts[] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};  // tp, dcp

// Where the pools are. `copy` is between any memories.
struct TestMemory {
  std::shared_ptr<PageMemory> pages = host_memory();
  std::shared_ptr<uint8_t[]> (*make)(size_t bytes) = [](size_t bytes) {
    return std::shared_ptr<uint8_t[]>(new uint8_t[bytes]);
  };
  void (*copy)(void* to, const void* from, size_t bytes) = [](void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
  };
};

// What a draft keeps beside the pages of a test's node.
enum class TestDraft { kNone, kLatents, kHeads, kWholeHeads };

class TestNode {
 public:
  TestNode(int32_t tp, int32_t dcp, int32_t num_blocks, uint64_t seed, const TestMemory& where = {},
           TestDraft draft = TestDraft::kNone)
      : where_(where) {
    CacheLayout layout = {CacheGroup::latent(2, 48, 16, LatentFormat::kBF16),
                          CacheGroup::state(kTestLayers, kTestHeads / tp, kTestUnitBytes, 64)};
    if (draft == TestDraft::kLatents)
      layout = layout.with_draft(CacheGroup::latent(1, 48, 16, LatentFormat::kF8E4M3), dcp);
    if (draft == TestDraft::kHeads)
      layout = layout.with_draft(CacheGroup::full(kTestHeads / tp, 16, DType::kF8E4M3, tp), dcp);
    if (draft == TestDraft::kWholeHeads)
      layout = layout.with_draft(CacheGroup::full(kTestHeads, 16, DType::kF8E4M3), dcp);
    std::vector<RankPages> ranks;
    const std::vector<uint8_t> sevens(static_cast<size_t>(kTestPages * layout.bytes_per_page()), 7);
    pool_bytes_ = sevens.size();
    for (int32_t r = 0; r < tp; ++r) {
      memory_.push_back(where.make(sevens.size()));
      where.copy(memory_.back().get(), sevens.data(), sevens.size());
      ranks.push_back({.base = memory_.back().get(),
                       .draft_base = memory_.back().get() + kTestPages * layout.page_bytes(),
                       .memory = where.pages,
                       .layout = layout,
                       .shard = r,
                       .num_shards = tp,
                       .dcp_index = r % dcp});
    }
    store = PageStore(ranks);
    std::vector<int32_t> ids(kTestPages);
    std::iota(ids.begin(), ids.end(), 0);
    Rng rng(seed);
    for (size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[rng.below(i + 1)]);
    size_t next = 0;
    for (int32_t b = 0; b < num_blocks; ++b)
      blocks.push_back({PageId(ids[next++]), static_cast<int32_t>(rng.below(static_cast<uint64_t>(dcp)))});
    for (auto* state : {&checkpoint, &tail_state})
      for (int32_t index = 0; index < dcp; ++index)
        for (int64_t i = 0; i < layout.state_pages(); ++i) state->push_back({PageId(ids[next++]), index});
    CHECK(next <= ids.size());
    store.describe(shape);
  }
  UnitPages pages(int32_t first_block = 0) const { return {first_block, blocks, checkpoint, tail_state}; }
  std::vector<uint8_t> gathered(UnitRange units, int32_t first_block = 0) const {
    std::vector<uint8_t> out(static_cast<size_t>(units.count * shape.unit_bytes(units.group)));
    EXPECT_TRUE(store.gather(pages(first_block), units, out).ok());
    return out;
  }
  size_t num_bytes_of(uint8_t value) const {
    size_t count = 0;
    for (const auto& memory : memory_) {
      std::vector<uint8_t> bytes(pool_bytes_);
      where_.copy(bytes.data(), memory.get(), bytes.size());
      count += static_cast<size_t>(std::count(bytes.begin(), bytes.end(), value));
    }
    return count;
  }

  PageStore store;
  CacheShape shape;
  std::vector<Placement> blocks, checkpoint, tail_state;

 private:
  const TestMemory where_;
  size_t pool_bytes_ = 0;
  std::vector<std::shared_ptr<uint8_t[]>> memory_;
};

inline std::vector<uint8_t> random_bytes(size_t count) {
  Rng rng(3);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.below(255));  // none is 0xff
  return bytes;
}

inline std::vector<UnitRange> all_units(const TestNode& node) {
  const auto num_blocks = static_cast<int32_t>(node.blocks.size());
  std::vector<UnitRange> units = {
      {UnitGroup::kBlocks, 0, num_blocks}, node.shape.checkpoint_units(), node.shape.tail_units()};
  if (node.shape.draft_parts > 0) units.push_back(node.shape.draft_units(0, num_blocks));
  return units;
}

// Units are the same bytes in both nodes' layouts, whole ranges and single ones.
inline void expect_exchange(const TestNode& from, const TestNode& to) {
  ASSERT_TRUE(check_same(from.shape, to.shape).ok());
  for (const UnitRange units : all_units(from)) {
    const auto bytes = random_bytes(static_cast<size_t>(units.count * from.shape.unit_bytes(units.group)));
    ASSERT_TRUE(from.store.scatter(from.pages(), units, bytes).ok());
    ASSERT_TRUE(to.store.scatter(to.pages(), units, from.gathered(units)).ok());
    EXPECT_EQ(to.gathered(units), bytes);
    const auto unit = static_cast<size_t>(from.shape.unit_bytes(units.group));
    for (int32_t i = 0; i < units.count; ++i) {
      const auto one = to.gathered({units.group, units.first + i, 1});
      EXPECT_TRUE(std::equal(one.begin(), one.end(), bytes.begin() + static_cast<std::ptrdiff_t>(i * unit)));
    }
  }
}

inline void expect_poison_where_units_are(const TestNode& node) {
  const size_t untouched = node.num_bytes_of(7);
  ASSERT_TRUE(node.store.poison(node.pages()).ok());
  const size_t poisoned = node.num_bytes_of(0xff);
  size_t expected = 0;
  for (const UnitRange units : all_units(node))
    expected += static_cast<size_t>(units.count * node.shape.unit_bytes(units.group));
  EXPECT_EQ(node.num_bytes_of(7), untouched - poisoned);
  EXPECT_GE(poisoned, expected);
}

}  // namespace perigee

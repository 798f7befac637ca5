// Units are the same bytes in any layout of ranks.
#include "kv/page_store.h"

#include "kv/page_store_testing.h"

namespace perigee {
namespace {

TEST(PageStore, AnyLayoutToAnyLayout) {
  for (const auto& [tp, dcp] : kTestLayouts)
    for (const auto& [to_tp, to_dcp] : kTestLayouts) {
      SCOPED_TRACE(str_cat(tp, "/", dcp, " to ", to_tp, "/", to_dcp));
      expect_exchange(TestNode(tp, dcp, 5, 1), TestNode(to_tp, to_dcp, 5, 2));
    }
}

TEST(PageStore, WhatADraftKeepsGoesFromAnyLayoutToAnyLayout) {
  for (const auto& [tp, dcp] : kTestLayouts)
    for (const auto& [to_tp, to_dcp] : kTestLayouts) {
      SCOPED_TRACE(str_cat(tp, "/", dcp, " to ", to_tp, "/", to_dcp));
      const auto exchange = [&, from_tp = tp, from_dcp = dcp, onto_tp = to_tp, onto_dcp = to_dcp](TestDraft from,
                                                                                                  TestDraft to) {
        expect_exchange(TestNode(from_tp, from_dcp, 5, 1, {}, from), TestNode(onto_tp, onto_dcp, 5, 2, {}, to));
      };
      exchange(TestDraft::kLatents, TestDraft::kLatents);
      exchange(TestDraft::kHeads, TestDraft::kHeads);
      exchange(TestDraft::kHeads, TestDraft::kWholeHeads);
      exchange(TestDraft::kWholeHeads, TestDraft::kHeads);
    }
}

// Where a model reads them: keys of a rank's heads, then values, in the block of the page and its dcp index.
TEST(PageStore, KeysAndValuesLieWhereTheDraftReadsThem) {
  constexpr int64_t kDim = 16, kUnit = kBlockTokens * kDim;
  const CacheLayout layout = CacheLayout{CacheGroup::latent(2, 48, 16, LatentFormat::kBF16)}.with_draft(
      CacheGroup::full(2, kDim, DType::kF8E4M3, 2), 2);
  std::vector<uint8_t> memory(static_cast<size_t>(3 * layout.bytes_per_page()));
  const PagePool pool{.base = memory.data(), .layout = layout, .draft_base = memory.data() + 3 * layout.page_bytes()};
  const PageStore store({{.base = pool.base,
                          .draft_base = pool.draft_base,
                          .layout = layout,
                          .shard = 1,
                          .num_shards = 2,
                          .dcp_index = 0}});
  const Placement block{PageId(2), 1};  // another rank has its page, and this one its block of the draft
  const UnitPages pages{.first_block = 7, .blocks = {&block, 1}};
  std::vector<uint8_t> bytes(8 * kUnit);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / kUnit + 1);
  ASSERT_TRUE(store.scatter(pages, {UnitGroup::kDraft, 56, 8}, bytes).ok());
  for (int64_t head = 0; head < 2; ++head) {  // 2 and 3 of all four
    EXPECT_EQ(*pool.draft_heads().keys(5, head), 2 + head + 1);
    EXPECT_EQ(*pool.draft_heads().values(5, head), 4 + 2 + head + 1);
  }
  EXPECT_EQ(std::count(memory.begin(), memory.end(), 0), std::ssize(memory) - 4 * kUnit) << "nothing else was written";
}

TEST(PageStore, WithoutADraftThereAreNoUnitsOfOne) {
  const TestNode node(2, 1, 3, 1);
  EXPECT_EQ(node.shape.draft_units(0, 3).count, 0);
  EXPECT_EQ(node.shape.bytes_of_block(), node.shape.block_bytes);
}

TEST(PageStore, DraftsArePoisonedWithTheirBlocks) {
  for (const TestDraft draft : {TestDraft::kLatents, TestDraft::kHeads, TestDraft::kWholeHeads})
    expect_poison_where_units_are(TestNode(2, 2, 3, 1, {}, draft));
}

TEST(PageStore, NeighboursAndOtherPagesStayAsTheyAre) {
  const TestNode node(2, 2, 3, 1);
  expect_poison_where_units_are(node);
  const auto each = static_cast<size_t>(3 * node.shape.block_bytes + 2 * node.shape.state_units() * kTestUnitBytes);
  EXPECT_EQ(node.num_bytes_of(0xff), each) << "each block lies with one of these ranks, and each head";
}

TEST(PageStore, BlocksAreNumberedFromTheFirstOfThePrompt) {
  const TestNode node(1, 1, 3, 1);
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
  EXPECT_EQ(field_of([](CacheShape& s) { s.draft_numbers = "fp8"; }), "draft_kv_cache_dtype");
  EXPECT_EQ(field_of([](CacheShape& s) { s.draft_parts = 8; }), "number of draft units of a block");
  EXPECT_EQ(field_of([](CacheShape& s) { s.draft_unit_bytes = 1; }), "draft unit size");
  EXPECT_EQ(field_of([](CacheShape& s) { s.deterministic = true; }), "deterministic");
  EXPECT_EQ(field_of([](CacheShape& s) { s.lease_ms = 1000; }), "kv_lease_duration");
  EXPECT_EQ(field_of([](CacheShape& s) { s.block_bytes = 65; }), "block size");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_heads = 8; }), "number of heads of a recurrent layer");
  EXPECT_EQ(field_of([](CacheShape& s) { std::swap(s.state_heads, s.state_layers); }), "number of recurrent layers");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_unit_bytes = 1; }), "state unit size");
}

// The same draft, which keeps what it has in the blocks on one side and beside the pages on the other.
TEST(CacheShape, ADraftThatLiesElsewhereIsToldByWhatPlacesIt) {
  const CacheShape in_blocks{.model = "a", .numbers = "bf16", .block_bytes = 96, .draft = "d"};
  CacheShape beside = in_blocks;
  beside.block_bytes = 64;
  beside.draft_numbers = "bf16";
  beside.draft_parts = 1;
  beside.draft_unit_bytes = 32;
  const auto expect_named = [](const Status& status, const std::string& whose) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().field, "draft_tensor_parallel_size");
    for (const char* part :
         {"draft_tensor_parallel_size", "--decode-context-parallel-size", "leave draft_tensor_parallel_size out"})
      EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
    EXPECT_NE(status.error().message.find(whose), std::string::npos) << status.error().message;
  };
  expect_named(check_same(in_blocks, beside), "out on the peer");
  expect_named(check_same(beside, in_blocks), "out here");
  beside.draft_numbers = "fp8";  // it lies there because of its numbers
  const Status status = check_same(in_blocks, beside);
  EXPECT_EQ(status.error().field, "draft_kv_cache_dtype");
  EXPECT_NE(status.error().message.find("is fp8, here it is auto"), std::string::npos) << status.error().message;
}

}  // namespace
}  // namespace perigee

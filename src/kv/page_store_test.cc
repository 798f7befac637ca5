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

TEST(PageStore, NeighboursAndOtherPagesStayAsTheyAre) {
  const TestNode node(2, 2, 3, 1);
  expect_poison_where_units_are(node);
  const auto each = static_cast<size_t>(3 * node.shape.block_bytes + node.shape.state_units() * kTestUnitBytes);
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
  EXPECT_EQ(field_of([](CacheShape& s) { s.deterministic = true; }), "deterministic");
  EXPECT_EQ(field_of([](CacheShape& s) { s.lease_ms = 1000; }), "kv_lease_duration");
  EXPECT_EQ(field_of([](CacheShape& s) { s.block_bytes = 65; }), "block size");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_heads = 8; }), "number of heads of a recurrent layer");
  EXPECT_EQ(field_of([](CacheShape& s) { std::swap(s.state_heads, s.state_layers); }), "number of recurrent layers");
  EXPECT_EQ(field_of([](CacheShape& s) { s.state_unit_bytes = 1; }), "state unit size");
}

}  // namespace
}  // namespace perigee

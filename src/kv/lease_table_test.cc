// Leases: how they end, and that nothing is read afterwards.
#include "kv/lease_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>

#include "base/manual_clock.h"
#include "kv/transfer_testing.h"

namespace perigee {
namespace {

class Leases : public testing::Test {
 protected:
  LeaseName grant(int64_t sequence, int32_t num_blocks = 2) {
    auto lease = std::make_shared<Lease>(Lease{.sequence = SequenceId(sequence),
                                               .num_tokens = num_blocks * kBlockTokens,
                                               .blocks = pages_from(static_cast<int32_t>(sequence), num_blocks)});
    return table.grant(std::move(lease), tokens);
  }
  Status read(const LeaseName& name, UnitRange units = {UnitGroup::kBlocks, 0, 1}) {
    std::vector<uint8_t> out(static_cast<size_t>(std::max(units.count, 0) * pages.shape.block_bytes));
    return table.read(name, units, out);
  }

  TestPages pages{16};
  ManualClock clock;
  std::vector<SequenceId> freed;
  std::shared_ptr<const std::vector<int32_t>> tokens = std::make_shared<std::vector<int32_t>>(200, 5);
  LeaseTable table{pages.store, pages.shape, 77, 30, clock, [this](SequenceId id) { freed.push_back(id); }};
};

TEST_F(Leases, UntilTheyAreReleased) {
  const LeaseName name = grant(1);
  EXPECT_TRUE(read(name).ok());
  EXPECT_TRUE(freed.empty());
  table.release(name);
  table.release(name);
  EXPECT_EQ(freed, std::vector<SequenceId>{SequenceId(1)});
  EXPECT_EQ(read(name).error().code, Code::kNotFound);
  EXPECT_EQ(table.extend(name).error().code, Code::kNotFound);
}

TEST_F(Leases, EndAfterAReadThatHadNoMemory) {
  const LeaseName name = grant(1);
  const auto take = [](const PageStore&, const UnitPages&) -> Status { throw std::bad_alloc(); };
  EXPECT_EQ(table.read(name, {UnitGroup::kBlocks, 0, 1}, LeaseTable::Take(take)).error().code, Code::kExhausted);
  EXPECT_TRUE(read(name).ok());
  table.release(name);
  EXPECT_EQ(freed, std::vector<SequenceId>{SequenceId(1)});
  table.close();
}

// In whatever order their ends come to lie.
TEST_F(Leases, UntilNobodyHasExtendedThem) {
  const LeaseName a = grant(1), b = grant(2);
  clock.advance(20);
  const LeaseName c = grant(3);
  EXPECT_TRUE(table.extend(a).ok());
  clock.advance(11);
  table.expire();
  EXPECT_EQ(freed, std::vector<SequenceId>{SequenceId(2)});
  EXPECT_FALSE(read(b).ok());
  EXPECT_TRUE(read(a).ok());
  EXPECT_TRUE(read(c).ok());
  clock.advance(30);
  table.expire();
  EXPECT_EQ(freed.size(), 3u);
  EXPECT_EQ(table.counts().expired, 3);
  EXPECT_EQ(table.counts().held, 0);
}

TEST_F(Leases, OfThisLifeAlone) {
  LeaseName name = grant(1);
  ++name.incarnation;
  EXPECT_EQ(read(name).error().code, Code::kNotFound);
  table.release(name);
  EXPECT_TRUE(freed.empty());
}

TEST_F(Leases, OfTheirTokensAlone) {
  const LeaseName name = grant(1);
  std::vector<int32_t> wanted(128, 5);
  EXPECT_TRUE(table.open(name, wanted, 2).ok());
  EXPECT_FALSE(table.open(name, wanted, 1).ok());
  EXPECT_FALSE(table.open(name, std::span(wanted).first(64), 1).ok());
  wanted.back() = 6;
  EXPECT_EQ(table.open(name, wanted, 2).error().field, "tokens");
}

TEST_F(Leases, NoUnitThatTheyHaveNot) {
  const LeaseName name = grant(1);
  for (const UnitRange units : {UnitRange{UnitGroup::kBlocks, 0, 3}, UnitRange{UnitGroup::kBlocks, 2, 1},
                                UnitRange{UnitGroup::kBlocks, -1, 1}, UnitRange{UnitGroup::kBlocks, 0, 0},
                                UnitRange{UnitGroup::kBlocks, INT32_MAX, 1}, UnitRange{UnitGroup::kState, 0, 1}})
    EXPECT_EQ(read(name, units).error().code, Code::kBadInput) << units.first << " " << units.count;
  std::vector<uint8_t> small(10);
  EXPECT_FALSE(table.read(name, {UnitGroup::kBlocks, 0, 1}, small).ok());
}

LeaseGrowth growth_of(int64_t sequence, int32_t num_now, LeaseStage stage = LeaseStage::kGrows) {
  auto lease = std::make_shared<Lease>(Lease{.sequence = SequenceId(sequence),
                                             .num_tokens = num_now * kBlockTokens,
                                             .blocks = pages_from(static_cast<int32_t>(sequence), num_now)});
  return {.stage = stage, .num_tokens = 3 * kBlockTokens, .lease = std::move(lease)};
}

TEST_F(Leases, OneThatGrowsIsReadAsFarAsItIs) {
  const LeaseName name = table.grant(growth_of(1, 0), tokens);
  const std::vector<int32_t> wanted(192, 5);
  EXPECT_EQ(*table.open(name, wanted, 3), (LeaseHold{0, LeaseStage::kGrows, 192}));
  EXPECT_EQ(read(name).error().code, Code::kBadInput);
  table.grow(growth_of(1, 2));
  EXPECT_EQ(*table.extend(name), (LeaseHold{2, LeaseStage::kGrows, 192}));
  EXPECT_TRUE(read(name, {UnitGroup::kBlocks, 1, 1}).ok());
  EXPECT_EQ(read(name, {UnitGroup::kBlocks, 2, 1}).error().code, Code::kBadInput);
  table.grow(growth_of(1, 3, LeaseStage::kWhole));
  EXPECT_EQ(*table.extend(name), (LeaseHold{3, LeaseStage::kWhole, 192}));
  EXPECT_TRUE(read(name, {UnitGroup::kBlocks, 2, 1}).ok());
  table.release(name);
  EXPECT_EQ(freed.size(), 1u);
  table.grow(growth_of(1, 3, LeaseStage::kFailed));
  EXPECT_EQ(freed.size(), 1u) << "it is over already";
}

// A reader has a tail if it wants exactly the tokens that the lease has. Else it has the full blocks.
TEST_F(Leases, ATailIsForWhoWantsItsTokens) {
  auto lease = std::make_shared<Lease>(Lease{.sequence = SequenceId(1), .num_tokens = 199, .blocks = pages_from(1, 4)});
  auto prompt = std::make_shared<std::vector<int32_t>>(200);
  std::iota(prompt->begin(), prompt->end(), 0);
  const LeaseName name = table.grant(std::move(lease), prompt);
  const LeaseHold with{4, LeaseStage::kWhole, 199}, without{3, LeaseStage::kWhole, 192};
  const auto hold_for = [&](size_t num_tokens, size_t other_at = 1000) {
    std::vector<int32_t> wanted(num_tokens);
    std::iota(wanted.begin(), wanted.end(), 0);
    if (other_at < num_tokens) wanted[other_at] = -1;
    return table.open(name, wanted, 3);
  };
  EXPECT_EQ(*hold_for(199), with);
  EXPECT_EQ(*table.extend(name), with);
  EXPECT_EQ(*hold_for(192), without);
  EXPECT_EQ(*table.extend(name), without);
  EXPECT_EQ(*hold_for(198), without) << "the state after 198 tokens is not here";
  EXPECT_EQ(*hold_for(200), without);
  EXPECT_EQ(*hold_for(300), without) << "of more tokens than the prompt has";
  EXPECT_EQ(*hold_for(199, 198), without);
  EXPECT_EQ(*hold_for(199, 192), without);
  EXPECT_EQ(hold_for(199, 191).error().code, Code::kBadInput);
  EXPECT_EQ(hold_for(191).error().code, Code::kBadInput);
}

TEST_F(Leases, OneWhoseSequenceFailsIsOver) {
  const LeaseName name = table.grant(growth_of(1, 0), tokens);
  table.grow(growth_of(1, 2));
  table.grow(growth_of(1, 2, LeaseStage::kFailed));
  EXPECT_EQ(freed.size(), 1u);
  EXPECT_EQ(table.extend(name).error().code, Code::kNotFound);
}

// Its reader learns so, however late it asks; the pages are free at once.
TEST_F(Leases, OneThatIsWithdrawnSaysSo) {
  const LeaseName name = table.grant(growth_of(1, 0), tokens);
  table.grow(growth_of(1, 2, LeaseStage::kWithdrawn));
  EXPECT_EQ(freed.size(), 1u);
  for (int i = 0; i < 5; ++i) {
    clock.advance(20);
    table.expire();
    EXPECT_EQ(*table.extend(name), (LeaseHold{0, LeaseStage::kWithdrawn}));
    EXPECT_EQ(read(name).error().code, Code::kNotFound);
  }
  const std::vector<int32_t> wanted(192, 5), other(192, 6);
  EXPECT_EQ(*table.open(name, wanted, 3), (LeaseHold{0, LeaseStage::kWithdrawn}));
  EXPECT_FALSE(table.open(name, other, 3).ok());
  table.release(name);
  EXPECT_EQ(freed.size(), 1u);
  EXPECT_EQ(table.counts().held, 0);
  EXPECT_EQ(table.counts().withdrawn, 1);
}

TEST_F(Leases, OneThatIsWithdrawnWhileItIsReadIsFreeAfterTheRead) {
  for (const bool released : {false, true}) {
    const int64_t sequence = released ? 2 : 1;
    freed.clear();
    const LeaseName name = table.grant(growth_of(sequence, 0), tokens);
    table.grow(growth_of(sequence, 2));
    const auto take = [&](const PageStore&, const UnitPages&) -> Status {
      table.grow(growth_of(sequence, 2, LeaseStage::kWithdrawn));
      if (released) table.release(name);
      EXPECT_TRUE(freed.empty());
      return {};
    };
    EXPECT_EQ(table.read(name, {UnitGroup::kBlocks, 1, 1}, LeaseTable::Take(take)).ok(), !released);
    EXPECT_EQ(freed.size(), 1u);
    table.release(name);
    EXPECT_EQ(freed.size(), 1u) << "once";
  }
}

TEST_F(Leases, WhoWaitsForGrowthLearnsOfItAndOfTheEnd) {
  table.grant(growth_of(1, 0), tokens);
  EXPECT_EQ(*table.await_growth(0, 0.001), 0u) << "none in time";
  uint64_t known = 0;
  for (const LeaseStage stage : {LeaseStage::kGrows, LeaseStage::kWithdrawn}) {
    std::thread grows([&] { table.grow(growth_of(1, 1, stage)); });
    const uint64_t now = *table.await_growth(known, 60);
    EXPECT_GT(now, known);
    known = now;
    grows.join();
  }
  std::thread closes([&] { table.close(); });
  EXPECT_EQ(table.await_growth(known, 60).error().code, Code::kUnavailable);
  closes.join();
}

TEST_F(Leases, NothingAfterClose) {
  const LeaseName name = grant(1);
  table.close();
  EXPECT_EQ(freed.size(), 1u);
  EXPECT_FALSE(read(name).ok());
  grant(2);
  EXPECT_EQ(freed.size(), 2u) << "free at once";
}

// Pages are free when no read is under way: what a successful read has seen was never another's.
TEST(LeasesOfThreads, AreFreeAfterTheirReads) {
  TestPages pages(8);
  std::atomic<int32_t> num_freed{0};
  LeaseTable table(pages.store, pages.shape, 1, 30, system_clock(), [&](SequenceId id) {
    std::memset(pages.page(static_cast<int32_t>(id.value % 8)), 0xee, static_cast<size_t>(pages.shape.block_bytes));
    ++num_freed;
  });
  const auto tokens = std::make_shared<const std::vector<int32_t>>(64, 5);
  int32_t num_read = 0;
  for (int64_t id = 0; id < 300; ++id) {
    const auto page = static_cast<int32_t>(id % 8);
    std::memset(pages.page(page), 1, static_cast<size_t>(pages.shape.block_bytes));
    const LeaseName name =
        table.grant(std::make_shared<Lease>(Lease{
                        .sequence = SequenceId(id), .num_tokens = 1 * kBlockTokens, .blocks = pages_from(page, 1)}),
                    tokens);
    std::thread releases([&] { table.release(name); });
    std::vector<uint8_t> out(static_cast<size_t>(pages.shape.block_bytes));
    for (int i = 0; i < 20; ++i)
      if (table.read(name, {UnitGroup::kBlocks, 0, 1}, out).ok()) {
        ++num_read;
        ASSERT_EQ(std::count(out.begin(), out.end(), 1), std::ssize(out));
      }
    releases.join();
  }
  EXPECT_EQ(num_freed, 300);
  EXPECT_GT(num_read, 0);
}

}  // namespace
}  // namespace perigee

#include "control/pools.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"

namespace perigee {
namespace {

// The indices that blocks go to, one after the other, each counted before the next.
std::vector<int32_t> deal(Pools& pools, CountAtIndex num_blocks, int count, std::vector<PageHandle>& held) {
  std::vector<int32_t> indices;
  for (int i = 0; i < count; ++i) {
    held.push_back(pools.allocate_block(num_blocks));
    if (!held.back()) {
      indices.push_back(-1);
      continue;
    }
    indices.push_back(held.back().placement().dcp_index);
    ++num_blocks[static_cast<size_t>(indices.back())];
  }
  return indices;
}

using Indices = std::vector<int32_t>;

TEST(Pools, ABlockGoesWhereItsSequenceHasFewest) {
  Pools pools(4, 8, {});
  std::vector<PageHandle> held;
  EXPECT_EQ(deal(pools, {3, 1, 2, 1}, 6, held), (Indices{1, 3, 2, 1, 3, 0}));
}

TEST(Pools, TiesGoToTheMostAvailablePagesThenToTheLowestIndex) {
  Pools pools(3, 8, {});
  std::vector<PageHandle> held;
  EXPECT_EQ(deal(pools, {}, 2, held), (Indices{0, 1}));
  EXPECT_EQ(deal(pools, {}, 3, held), (Indices{2, 0, 1})) << "another sequence";
  EXPECT_EQ(deal(pools, {0, 9, 9}, 1, held), (Indices{0}));
  EXPECT_EQ(deal(pools, {}, 3, held), (Indices{2, 1, 0}));
}

// A page that is cached is available as a free one is.
TEST(Pools, CachedPagesAreAvailable) {
  std::vector<PlaceId> evicted;
  Pools pools(2, 2, [&](PlaceId place) { evicted.push_back(place); });
  std::vector<PageHandle> held;
  EXPECT_EQ(deal(pools, {}, 4, held), (Indices{0, 1, 0, 1}));
  const PlaceId cached = held[3].place();
  pools.publish(cached);
  held.pop_back();
  EXPECT_EQ(pools.num_available(0), 0);
  EXPECT_EQ(pools.num_available(1), 1);
  EXPECT_EQ(deal(pools, {}, 2, held), (Indices{1, -1}));
  EXPECT_EQ(evicted, std::vector<PlaceId>{cached});
}

TEST(Pools, AFullIndexIsPassedOver) {
  Pools pools(3, 2, {});
  std::vector<PageHandle> held;
  EXPECT_EQ(deal(pools, {5, 0, 1}, 7, held), (Indices{1, 2, 1, 2, 0, 0, -1}));
}

TEST(Pools, AHandleKnowsItsPlace) {
  Pools pools(3, 5, {});
  std::vector<PageHandle> held;
  deal(pools, {}, 15, held);
  std::vector<bool> seen(15, false);
  for (const PageHandle& handle : held) {
    const Placement at = handle.placement();
    EXPECT_EQ(handle.place().value, at.dcp_index * 5 + at.page.value);
    EXPECT_FALSE(seen[static_cast<size_t>(handle.place().value)]);
    seen[static_cast<size_t>(handle.place().value)] = true;
    const PageHandle again = pools.share(handle.place());
    EXPECT_EQ(again.placement(), at);
    EXPECT_EQ(pools.num_holders(handle.place()), 2);
  }
  held.clear();
  EXPECT_EQ(pools.num_free(), 15);
}

TEST(Pools, PagesEverywhereAreListedByIndex) {
  Pools pools(3, 4, {});
  const std::vector<PageHandle> state = pools.allocate_everywhere(PageOwner::kState, 2);
  ASSERT_EQ(state.size(), 6u);
  for (size_t i = 0; i < state.size(); ++i)
    EXPECT_EQ(state[i].placement().dcp_index, static_cast<int32_t>(i / 2)) << "page " << i;
  EXPECT_EQ(pools.num_owned(PageOwner::kState), 6);
  for (int32_t index = 0; index < 3; ++index) EXPECT_EQ(pools.num_available(index), 2);
}

TEST(Pools, EverywhereIsAsOftenAsTheFullestIndexAllows) {
  Pools pools(2, 10, {});
  EXPECT_EQ(pools.num_everywhere(3, 0), 3);
  EXPECT_EQ(pools.num_everywhere(3, 2), 3) << "one page is left at each index anyway";
  EXPECT_EQ(pools.num_everywhere(3, 3), 2);
  EXPECT_EQ(pools.num_everywhere(3, 30), 0);
  std::vector<PageHandle> held;
  deal(pools, {0, 100}, 6, held);
  EXPECT_EQ(pools.num_available(), 14);
  EXPECT_EQ(pools.num_everywhere(3, 0), 1) << "index 0 has 4 pages, index 1 has 10";
  EXPECT_EQ(pools.num_everywhere(3, 8), 1);
  EXPECT_EQ(pools.num_everywhere(3, 9), 0);
}

TEST(Pools, CountsAreOfAllIndices) {
  Pools pools(4, 6, {});
  std::vector<PageHandle> held;
  deal(pools, {}, 10, held);
  pools.publish(held[9].place());
  pools.publish(held[8].place());
  held.resize(8);
  EXPECT_EQ(pools.num_pages(), 24);
  EXPECT_EQ(pools.num_free(), 14);
  EXPECT_EQ(pools.num_cached(), 2);
  EXPECT_EQ(pools.num_used(), 8);
  EXPECT_EQ(pools.num_available(), 16);
  EXPECT_EQ(pools.num_owned(PageOwner::kLatent), 10);
  CountAtIndex idle = {};
  pools.count_if_idle(PlaceId(0 * 6), idle);
  EXPECT_EQ(idle, CountAtIndex{}) << "it is held";
  pools.count_if_idle(PlaceId(3 * 6 + 5), idle);
  EXPECT_EQ(idle, (CountAtIndex{0, 0, 0, 1}));
  pools.check_integrity();
}

// Until an index is full no sequence has two blocks more at one index than at another.
TEST(Pools, SequencesStayBalancedUntilAnIndexIsFull) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Rng rng(seed);
    const auto dcp_size = static_cast<int32_t>(rng.between(2, 8));
    Pools pools(dcp_size, 40, {});
    struct Blocks {
      std::vector<PageHandle> pages;
      CountAtIndex counts = {};
    };
    std::vector<Blocks> sequences(6);
    for (int i = 0; i < 400; ++i) {
      Blocks& blocks = sequences[rng.below(sequences.size())];
      if (rng.chance(0.03)) {
        blocks = {};
        continue;
      }
      bool full = false;
      for (int32_t index = 0; index < dcp_size; ++index) full |= pools.num_available(index) == 0;
      if (full) break;
      blocks.pages.push_back(pools.allocate_block(blocks.counts));
      ++blocks.counts[static_cast<size_t>(blocks.pages.back().placement().dcp_index)];
      const auto end = blocks.counts.begin() + dcp_size;
      ASSERT_LE(*std::max_element(blocks.counts.begin(), end) - *std::min_element(blocks.counts.begin(), end), 1)
          << "seed " << seed;
    }
  }
}

TEST(PoolsDeathTest, PagesThatWereNotCountedAreABug) {
  Pools pools(2, 2, {});
  std::vector<PageHandle> held;
  deal(pools, {0, 9}, 1, held);
  EXPECT_DEATH(pools.allocate_everywhere(PageOwner::kState, 2), "that were counted are not there");
}

}  // namespace
}  // namespace perigee

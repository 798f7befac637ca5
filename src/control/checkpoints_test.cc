#include "control/checkpoints.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

namespace perigee {
namespace {

// Pools whose evictions reach the checkpoints, as the scheduler wires them.
struct World {
  explicit World(int32_t num_pages, int32_t dcp_size = 1)
      : pools(dcp_size, num_pages,
              [this](PlaceId page) {
                if (pools.owner(page) == PageOwner::kCheckpoint) {
                  checkpoints.page_evicted(page);
                } else {
                  checkpoints.drop(page);
                }
              }),
        checkpoints(pools) {}

  std::vector<PageHandle> pages(PageOwner owner, int count) { return pools.allocate_everywhere(owner, count); }
  PlaceId block() {
    const PageHandle handle = pools.allocate_block({});
    pools.publish(handle.place());
    return handle.place();
  }

  Pools pools;
  Checkpoints checkpoints;
};

TEST(Checkpoints, SharesItsPagesInTheirOrder) {
  World world(8);
  const PlaceId block = world.block();
  EXPECT_EQ(world.checkpoints.at(block).serial, 0);
  std::vector<PageHandle> pages = world.pages(PageOwner::kCheckpoint, 3);
  std::vector<PlaceId> order;
  for (const PageHandle& handle : pages) order.push_back(handle.place());
  const CheckpointRef checkpoint = world.checkpoints.attach(block, std::move(pages));
  EXPECT_EQ(world.pools.num_cached(), 4);
  std::vector<PageHandle> first, second;
  world.checkpoints.share(checkpoint, first);
  world.checkpoints.share(checkpoint, second);
  ASSERT_EQ(first.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(first[i].place(), order[i]);
  EXPECT_EQ(world.pools.num_holders(order[0]), 2);
  EXPECT_EQ(world.checkpoints.block_of(order[2]), block);
  EXPECT_FALSE(world.checkpoints.block_of(block).valid());
}

TEST(Checkpoints, OnePageEvictedFreesTheOthersAndLeavesTheBlock) {
  World world(4);
  std::vector<PageHandle> pages = world.pages(PageOwner::kCheckpoint, 3);
  const PlaceId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, std::move(pages));
  world.pools.share(block);  // the most recently used
  const std::vector<PageHandle> fresh = world.pages(PageOwner::kState, 1);
  EXPECT_FALSE(world.checkpoints.contains(checkpoint));
  EXPECT_EQ(world.pools.num_free(), 2);
  EXPECT_TRUE(world.pools.is_published(block));
  EXPECT_EQ(world.pools.num_owned(PageOwner::kCheckpoint), 0);
  EXPECT_EQ(world.pools.num_owned(PageOwner::kState), 1);
  world.pools.check_integrity();
}

TEST(Checkpoints, AnEvictedBlockTakesItsCheckpointAlong) {
  World world(3);
  const PlaceId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 2));
  const PageHandle fresh = world.pools.allocate_block({});
  EXPECT_EQ(fresh.place(), block);
  EXPECT_FALSE(world.checkpoints.contains(checkpoint));
  EXPECT_EQ(world.pools.num_free(), 2);
  EXPECT_EQ(world.checkpoints.size(), 0);
}

TEST(Checkpoints, PagesThatAreHeldOutliveTheirCheckpoint) {
  World world(3);
  const PlaceId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 2));
  std::vector<PageHandle> copied;
  world.checkpoints.share(checkpoint, copied);
  world.checkpoints.drop(block);
  world.checkpoints.drop(block);
  EXPECT_EQ(world.pools.num_free(), 0);
  copied.clear();
  EXPECT_EQ(world.pools.num_free(), 2);
}

TEST(Checkpoints, ALaterCheckpointAtTheSameBlockIsAnother) {
  World world(3);
  const PlaceId block = world.block();
  const CheckpointRef former = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  world.checkpoints.drop(block);
  const CheckpointRef later = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  EXPECT_FALSE(world.checkpoints.contains(former));
  EXPECT_TRUE(world.checkpoints.contains(later));
}

// The starts of a block's former checkpoint are not those of its next one.
TEST(Checkpoints, ALaterCheckpointAtTheSameBlockHasNoStarts) {
  World world(4);
  const PlaceId block = world.block();
  const CheckpointRef former = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  for (int start = 0; start < 2; ++start) world.checkpoints.count_start(former);
  world.checkpoints.drop(block);
  const CheckpointRef later = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  world.checkpoints.supersede(later);
  std::vector<PageHandle> taken = world.pages(PageOwner::kLatent, 3);  // the free pages, then one of the two cached
  EXPECT_FALSE(world.checkpoints.contains(later)) << "superseded: it goes before the block";
  EXPECT_TRUE(world.pools.is_published(block));
}

TEST(CheckpointsDeathTest, MisuseIsABug) {
  World world(4);
  const PlaceId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  EXPECT_DEATH(world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1)), "has a checkpoint");
  world.checkpoints.drop(block);
  std::vector<PageHandle> handles;
  EXPECT_DEATH(world.checkpoints.share(checkpoint, handles), "is gone");
  EXPECT_DEATH(world.checkpoints.page_evicted(block), "in no checkpoint");
}

}  // namespace
}  // namespace perigee

#include "control/checkpoints.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

namespace perigee {
namespace {

// A pool whose evictions reach the checkpoints, as the scheduler wires them.
struct World {
  explicit World(int32_t num_pages)
      : pool(num_pages,
             [this](PageId page) {
               if (pool.owner(page) == PageOwner::kCheckpoint) {
                 checkpoints.page_evicted(page);
               } else {
                 checkpoints.drop(page);
               }
             }),
        checkpoints(pool) {}

  std::vector<PageHandle> pages(PageOwner owner, int count) {
    std::vector<PageHandle> taken;
    for (int i = 0; i < count; ++i) taken.push_back(pool.allocate(owner));
    return taken;
  }
  PageId block() {
    PageHandle handle = pool.allocate(PageOwner::kLatent);
    pool.publish(handle.page());
    return handle.page();
  }

  BlockPool pool;
  Checkpoints checkpoints;
};

TEST(Checkpoints, SharesItsPagesInTheirOrder) {
  World world(8);
  const PageId block = world.block();
  EXPECT_EQ(world.checkpoints.at(block).serial, 0);
  std::vector<PageHandle> pages = world.pages(PageOwner::kCheckpoint, 3);
  std::vector<PageId> order;
  for (const PageHandle& handle : pages) order.push_back(handle.page());
  const CheckpointRef checkpoint = world.checkpoints.attach(block, std::move(pages));
  EXPECT_EQ(world.pool.num_cached(), 4);
  std::vector<PageHandle> first, second;
  world.checkpoints.share(checkpoint, first);
  world.checkpoints.share(checkpoint, second);
  ASSERT_EQ(first.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(first[i].page(), order[i]);
  EXPECT_EQ(world.pool.num_holders(order[0]), 2);
  EXPECT_EQ(world.checkpoints.block_of(order[2]), block);
  EXPECT_FALSE(world.checkpoints.block_of(block).valid());
}

TEST(Checkpoints, OnePageEvictedFreesTheOthersAndLeavesTheBlock) {
  World world(4);
  std::vector<PageHandle> pages = world.pages(PageOwner::kCheckpoint, 3);
  const PageId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, std::move(pages));
  world.pool.share(block);  // the most recently used
  const PageHandle fresh = world.pool.allocate(PageOwner::kState);
  EXPECT_FALSE(world.checkpoints.contains(checkpoint));
  EXPECT_EQ(world.pool.num_free(), 2);
  EXPECT_TRUE(world.pool.is_published(block));
  EXPECT_EQ(world.pool.num_owned(PageOwner::kCheckpoint), 0);
  EXPECT_EQ(world.pool.num_owned(PageOwner::kState), 1);
  world.pool.check_integrity();
}

TEST(Checkpoints, AnEvictedBlockTakesItsCheckpointAlong) {
  World world(3);
  const PageId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 2));
  const PageHandle fresh = world.pool.allocate(PageOwner::kLatent);
  EXPECT_EQ(fresh.page(), block);
  EXPECT_FALSE(world.checkpoints.contains(checkpoint));
  EXPECT_EQ(world.pool.num_free(), 2);
  EXPECT_EQ(world.checkpoints.size(), 0);
}

TEST(Checkpoints, PagesThatAreHeldOutliveTheirCheckpoint) {
  World world(3);
  const PageId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 2));
  std::vector<PageHandle> copied;
  world.checkpoints.share(checkpoint, copied);
  world.checkpoints.drop(block);
  world.checkpoints.drop(block);
  EXPECT_EQ(world.pool.num_free(), 0);
  copied.clear();
  EXPECT_EQ(world.pool.num_free(), 2);
}

TEST(Checkpoints, ALaterCheckpointAtTheSameBlockIsAnother) {
  World world(3);
  const PageId block = world.block();
  const CheckpointRef former = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  world.checkpoints.drop(block);
  const CheckpointRef later = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  EXPECT_FALSE(world.checkpoints.contains(former));
  EXPECT_TRUE(world.checkpoints.contains(later));
}

// The starts of a block's former checkpoint are not those of its next one.
TEST(Checkpoints, ALaterCheckpointAtTheSameBlockHasNoStarts) {
  World world(4);
  const PageId block = world.block();
  const CheckpointRef former = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  for (int start = 0; start < 2; ++start) world.checkpoints.count_start(former);
  world.checkpoints.drop(block);
  const CheckpointRef later = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  world.checkpoints.supersede(later);
  std::vector<PageHandle> taken = world.pages(PageOwner::kLatent, 3);  // the free pages, then one of the two cached
  EXPECT_FALSE(world.checkpoints.contains(later)) << "superseded: it goes before the block";
  EXPECT_TRUE(world.pool.is_published(block));
}

TEST(CheckpointsDeathTest, MisuseIsABug) {
  World world(4);
  const PageId block = world.block();
  const CheckpointRef checkpoint = world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1));
  EXPECT_DEATH(world.checkpoints.attach(block, world.pages(PageOwner::kCheckpoint, 1)), "has a checkpoint");
  world.checkpoints.drop(block);
  std::vector<PageHandle> handles;
  EXPECT_DEATH(world.checkpoints.share(checkpoint, handles), "is gone");
  EXPECT_DEATH(world.checkpoints.page_evicted(block), "in no checkpoint");
}

}  // namespace
}  // namespace perigee

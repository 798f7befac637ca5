#include "base/queue.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

TEST(BoundedQueue, RefusesWhatComesWhenFullAndEverythingOnceClosed) {
  BoundedQueue<int> queue(1);
  EXPECT_TRUE(queue.try_push(1));
  EXPECT_FALSE(queue.try_push(2));
  EXPECT_TRUE(queue.push_reserved(3));
  queue.close();
  EXPECT_FALSE(queue.push_reserved(4));
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), 3);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

}  // namespace
}  // namespace perigee

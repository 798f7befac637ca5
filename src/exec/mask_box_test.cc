#include "exec/mask_box.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace perigee {
namespace {

StepMasks masks_of(int64_t step, int32_t slot) {
  return {.step = StepId(step), .rows = {{.slot = SlotId(slot), .words = {1u << slot}}}};
}

TEST(MaskBox, ARowGetsItsWordsAndOneWithoutAnEntryNone) {
  MaskBox box;
  box.put(masks_of(4, 1));
  box.put(masks_of(5, 2));
  EXPECT_EQ(box.wait(StepId(5), SlotId(2)), std::vector<uint32_t>{4});
  EXPECT_TRUE(box.wait(StepId(5), SlotId(1)).empty()) << "that one's entry is another step's";
  EXPECT_EQ(box.wait(StepId(4), SlotId(1)), std::vector<uint32_t>{2});
}

// In some round the other thread waits already; where closing would not wake it, the test hangs.
TEST(MaskBox, ClosingWakesWhoeverWaits) {
  for (int round = 0; round < 20; ++round) {
    MaskBox box;
    std::thread waiting([&] { EXPECT_TRUE(box.wait(StepId(1), SlotId(0)).empty()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    box.close();
    waiting.join();
  }
}

}  // namespace
}  // namespace perigee

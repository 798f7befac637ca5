#include "exec/mask_box.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace perigee {
namespace {

MaskBox::Message masks_of(int64_t step, int32_t slot) {
  return std::make_shared<const StepMasks>(
      StepMasks{.step = StepId(step), .rows = {{.slot = SlotId(slot), .words = {1u << slot}}}});
}

std::vector<uint32_t> words(const MaskBox::Message& masks, int32_t slot) {
  const std::span<const uint32_t> found = MaskCursor(*masks).of(SlotId(slot));
  return {found.begin(), found.end()};
}

TEST(MaskBox, ARowGetsItsWordsAndOneWithoutAnEntryNone) {
  MaskBox box;
  box.put(masks_of(4, 1));
  box.put(masks_of(5, 2));
  EXPECT_EQ(words(box.wait(StepId(5)), 2), std::vector<uint32_t>{4});
  EXPECT_EQ(words(box.wait(StepId(5)), 1), std::vector<uint32_t>()) << "that one's entry is another step's";
  EXPECT_EQ(words(box.wait(StepId(4)), 1), std::vector<uint32_t>{2});
}

TEST(MaskBox, AMessageOutlivesItsBox) {
  MaskBox::Message message;
  {
    MaskBox box;
    box.put(masks_of(4, 1));
    message = box.wait(StepId(4));
    box.drop(StepId(4));
  }
  EXPECT_EQ(words(message, 1), std::vector<uint32_t>{2});
}

TEST(MaskCursor, PassesRowsWithoutAnEntry) {
  const StepMasks masks{.step = StepId(1),
                        .rows = {{.slot = SlotId(7), .words = {1}}, {.slot = SlotId(2), .words = {2}}}};
  MaskCursor cursor(masks);
  EXPECT_TRUE(cursor.of(SlotId(3)).empty());
  EXPECT_EQ(cursor.of(SlotId(7))[0], 1u);
  EXPECT_TRUE(cursor.of(SlotId(1)).empty());
  EXPECT_EQ(cursor.of(SlotId(2))[0], 2u);
  EXPECT_TRUE(cursor.of(SlotId(4)).empty());
  cursor.check_end();
}

TEST(MaskCursorDeathTest, EntriesAreInTheOrderOfTheRows) {
  const StepMasks masks{.step = StepId(1),
                        .rows = {{.slot = SlotId(7), .words = {1}}, {.slot = SlotId(2), .words = {2}}}};
  MaskCursor cursor(masks);
  for (const int32_t slot : {2, 7}) cursor.of(SlotId(slot));
  EXPECT_DEATH(cursor.check_end(), "slot 2 are not in the order");
}

// In some round the other thread waits already; where closing would not wake it, the test hangs.
TEST(MaskBox, ClosingWakesWhoeverWaits) {
  for (int round = 0; round < 20; ++round) {
    MaskBox box;
    std::thread waiting([&] { EXPECT_TRUE(box.wait(StepId(1))->rows.empty()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    box.close();
    waiting.join();
  }
}

}  // namespace
}  // namespace perigee

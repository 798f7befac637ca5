#include "tensor/tensor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>

#include "base/soak.h"

namespace perigee {
namespace {

TEST(Formats, Bf16RoundsToNearestEven) {
  EXPECT_EQ(f32_to_bf16(1.0f), 0x3F80);
  EXPECT_EQ(f32_to_bf16(1.00390625f), 0x3F80);  // half way: even
  EXPECT_EQ(f32_to_bf16(1.01171875f), 0x3F82);  // half way: even
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(NAN))));
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(-INFINITY)), -INFINITY);
}

TEST(Formats, EveryFp8ValueRoundTrips) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = f8e4m3_to_f32(static_cast<uint8_t>(bits));
    if (std::isnan(value)) continue;
    EXPECT_EQ(f32_to_f8e4m3(value), bits) << value;
  }
}

TEST(Formats, Fp8RoundsToNearestAndSaturates) {
  for (int bits = 0; bits < 0x7E; ++bits) {
    const float low = f8e4m3_to_f32(static_cast<uint8_t>(bits)), high = f8e4m3_to_f32(static_cast<uint8_t>(bits + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(f32_to_f8e4m3(std::nextafter(middle, 0.0f)), bits);
    EXPECT_EQ(f32_to_f8e4m3(std::nextafter(middle, 1e9f)), bits + 1);
    EXPECT_EQ(f32_to_f8e4m3(middle) % 2, 0) << "a tie goes to the even one";
  }
  EXPECT_EQ(f8e4m3_to_f32(f32_to_f8e4m3(1e9f)), 448.0f);
  EXPECT_EQ(f8e4m3_to_f32(f32_to_f8e4m3(-1e9f)), -448.0f);
}

TEST(Formats, F16) {
  EXPECT_EQ(f16_to_f32(0x3C00), 1.0f);
  EXPECT_EQ(f16_to_f32(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(f16_to_f32(0xFBFF), -65504.0f);
}

TEST(Arena, GrowsOnlyWhileWarmingUp) {
  Arena arena;
  const auto step = [&] {
    arena.reset();
    for (int layer = 0; layer < 8; ++layer) {
      const ArenaScope temporaries(arena);
      arena.tensor(DType::kF32, 1000, 1000);
      arena.tensor(DType::kBF16, 3000, 1000);
    }
    return arena.tensor(DType::kF32, 2000, 1000).data;
  };
  step();
  step();
  const int64_t growths = arena.num_growths();
  void* first = step();
  EXPECT_EQ(step(), first);
  EXPECT_EQ(arena.num_growths(), growths);
}

TEST(Buffer, SaysWhatCannotBeHad) {
  EXPECT_TRUE(Buffer::can_make(0));
  EXPECT_TRUE(Buffer::can_make(100 << 20));
  EXPECT_FALSE(Buffer::can_make(size_t{1} << 60));
}

int64_t resident_bytes() {
  int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * 4096;
}

TEST(Buffer, LargeMemoryIsZeroAndTakenOnlyWhereItIsWritten) {
  const int64_t before = resident_bytes();
  const size_t bytes = (size_t{1} << 30) + 100;
  Buffer buffer(bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kAlignment, 0U);
  for (size_t i = 0; i < bytes; i += 100 << 20) EXPECT_EQ(buffer.data()[i], 0);
  buffer.data()[0] = buffer.data()[bytes - 1] = 1;
  EXPECT_LT(resident_bytes() - before, 64 << 20);
}

TEST(BufferDeathTest, NotToGetMemoryIsAFailedCheck) {
  EXPECT_DEATH(Buffer(size_t{1} << 60), "out of host memory allocating 1152921504606846976 bytes");
  if (kSanitized) return;  // a sanitizer's own memory is more than any limit
  const auto take = [] {
    const rlimit most{.rlim_cur = 256 << 20, .rlim_max = 256 << 20};
    ASSERT_EQ(setrlimit(RLIMIT_DATA, &most), 0);
    const Buffer buffer(size_t{1} << 30);
  };
  EXPECT_DEATH(take(), "out of host memory allocating 1073741824 bytes");
}

TEST(BufferDeathTest, WhatLiesAroundLargeMemoryCannotBeTouched) {
  const size_t bytes = 4 << 20;
  Buffer buffer(bytes);
  EXPECT_DEATH(const_cast<volatile uint8_t*>(buffer.data())[bytes] = 1, "");
}

// What a checker needs: each array ends where its memory does, and is gone with its scope.
TEST(Arena, SeparateArraysAreMemoryOfTheirOwn) {
  static std::vector<size_t> asked;
  static int live = 0;
  const auto source = [](size_t bytes) {
    asked.push_back(bytes);
    ++live;
    return Buffer(new uint8_t[bytes], bytes, [](uint8_t* memory) {
      --live;
      delete[] memory;
    });
  };
  Arena arena(source, true);
  arena.tensor(DType::kBF16, 3, 5);
  {
    const ArenaScope temporaries(arena);
    arena.array<int32_t>(7);
    arena.allocate(0);
    EXPECT_EQ(live, 3);
  }
  EXPECT_EQ(live, 1);
  arena.array<float>(2);
  EXPECT_EQ(asked, (std::vector<size_t>{30, 28, 1, 8}));
  arena.reset();
  EXPECT_EQ(live, 0);
}

}  // namespace
}  // namespace perigee

#include "tensor/cuda/gpus.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

Gpu h200(int64_t bytes = 139 * kGiB) {
  return {.name = "NVIDIA H200", .bytes = bytes, .compute_capability = 90};
}

Gpu h100() {
  return {.name = "NVIDIA H100 80GB HBM3", .bytes = 79 * kGiB, .compute_capability = 90};
}

TEST(Gpus, TooFewAreRefusedByName) {
  EXPECT_TRUE(check_gpus(std::vector{h200(), h200()}, 2).ok());
  const Status few = check_gpus(std::vector{h200(), h200()}, 4);
  ASSERT_FALSE(few.ok());
  EXPECT_EQ(few.error().message,
            "--tensor-parallel-size 4 needs 4 GPUs, and there are 2: GPU 0: NVIDIA H200, 139.0 GiB; GPU 1: NVIDIA "
            "H200, 139.0 GiB");
  EXPECT_EQ(few.error().field, "tensor-parallel-size");
  const Status none = check_gpus({}, 1);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().message, "--tensor-parallel-size 1 needs 1 GPU, and there is none");
}

TEST(Gpus, UnlikeOnesAreRefusedByName) {
  const Status unlike = check_gpus(std::vector{h200(), h200(), h100()}, 3);
  ASSERT_FALSE(unlike.ok());
  EXPECT_NE(unlike.error().message.find("GPU 2: NVIDIA H100 80GB HBM3, 79.0 GiB"), std::string::npos)
      << unlike.error().message;
  EXPECT_NE(unlike.error().message.find("CUDA_VISIBLE_DEVICES"), std::string::npos);
  EXPECT_TRUE(check_gpus(std::vector{h200(), h200(), h100()}, 2).ok()) << "the third is not used";
}

TEST(Gpus, TheSameModelWithLessMemoryIsUnlike) {
  EXPECT_TRUE(check_gpus(std::vector{h200(), h200(139 * kGiB - (64 << 20))}, 2).ok());
  EXPECT_FALSE(check_gpus(std::vector{h200(), h200(70 * kGiB)}, 2).ok()) << "half of it, as a MIG slice has";
}

TEST(Gpus, OfAPlanAreCountedByModel) {
  const auto four = parse_gpus("4xH200");
  ASSERT_TRUE(four.ok()) << four.error().message;
  EXPECT_EQ(four->size(), 4u);
  EXPECT_EQ((*four)[3].name, "H200");
  EXPECT_EQ((*four)[3].bytes, 139 * kGiB);
  ASSERT_TRUE(parse_gpus("4Xh200").ok()) << "in any case";
  EXPECT_EQ((*parse_gpus("4Xh200"))[3].name, "H200");
  ASSERT_TRUE(parse_gpus("L40S").ok());
  EXPECT_EQ(parse_gpus("L40S")->size(), 1u);
  for (const char* wrong : {"", "4x", "xH200", "0xH200", "-1xH200", "4xH300", "4 H200", "99999xH200"}) {
    const auto gpus = parse_gpus(wrong);
    ASSERT_FALSE(gpus.ok()) << wrong;
    EXPECT_NE(gpus.error().message.find("H100, H200, A100"), std::string::npos) << gpus.error().message;
    EXPECT_EQ(gpus.error().field, "gpus");
  }
}

}  // namespace
}  // namespace perigee

#include "tensor/cuda/device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "base/rng.h"
#include "base/soak.h"
#include "tensor/cuda/per_device.h"
#include "tensor/cuda/upload.h"

namespace perigee {
namespace {

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = select_device(0); !status.ok()) GTEST_SKIP() << status.error().message;
  }
};

ByteRows one_row(const void* data, int64_t bytes) {
  return {.data = data, .rows = 1, .row_bytes = bytes, .stride = bytes};
}

// More calls than slots, sizes on both sides of a piece, and kernels (here: copies) that read late.
TEST_F(DeviceTest, WhatArrivesIsWhatWasSent) {
  Upload upload(3);
  const Stream consumer;
  Rng rng(1);
  std::vector<std::vector<uint8_t>> sources;
  std::vector<Buffer> arrived;
  for (const int64_t bytes : {1, 4096, 5'000'000, 16 << 20, (16 << 20) + 1, 77, 40'000'000, 300'000, 9, 20'000'000}) {
    std::vector<uint8_t>& source = sources.emplace_back(static_cast<size_t>(bytes));
    for (size_t i = 0; i < source.size(); i += 97) source[i] = static_cast<uint8_t>(rng.below(256));
    arrived.push_back(device_buffer(source.size()));
    const void* there = upload.bring(one_row(source.data(), bytes), consumer);
    ASSERT_NE(there, nullptr);
    ASSERT_TRUE(
        cuda_ok(cudaMemcpyAsync(arrived.back().data(), there, source.size(), cudaMemcpyDeviceToDevice, consumer.get()),
                "test"));
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    std::vector<uint8_t> back(sources[i].size());
    device_copy(back.data(), arrived[i].data(), back.size());
    EXPECT_EQ(back, sources[i]) << "upload " << i;
  }
  EXPECT_TRUE(device_status().ok());
}

// A range of columns arrives as far apart as it was; several pieces, and rows around a thread's slice.
TEST_F(DeviceTest, RowsKeepTheirDistance) {
  Upload upload(3);
  const Stream consumer;
  Rng rng(2);
  using Shape = std::array<int64_t, 3>;  // initcheck takes over a millisecond for each row that is copied back
  for (const auto& [rows, row_bytes, stride] :
       few_if_gpu_sanitizer<Shape>({{40'000, 512, 1024}, {3, 300'000, 300'004}, {70, 8, 4096}, {5, 16, 16}},
                                   {{70, 300'000, 300'004}, {70, 8, 4096}, {5, 16, 16}})) {
    std::vector<uint8_t> source(static_cast<size_t>(rows * stride));
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(rng.below(256));
    const ByteRows part{.data = source.data(), .rows = rows, .row_bytes = row_bytes, .stride = stride};
    const void* there = upload.bring(part, consumer);
    ASSERT_NE(there, nullptr);
    cuda_ok(cudaStreamSynchronize(consumer.get()), "test");
    const auto width = static_cast<size_t>(row_bytes);
    std::vector<uint8_t> back(width * static_cast<size_t>(rows));  // without what lies between the rows, never written
    cuda_ok(cudaMemcpy2D(back.data(), width, there, static_cast<size_t>(stride), width, static_cast<size_t>(rows),
                         cudaMemcpyDeviceToHost),
            "test");
    for (int64_t r = 0; r < rows; ++r) ASSERT_EQ(std::memcmp(back.data() + r * row_bytes, part.row(r), width), 0) << r;
  }
}

// Without a GPU, too: eight threads ask for four GPUs at once.
TEST(PerDevice, EachGpuHasAValueOfItsOwnMadeOnce) {
  PerDevice<int> values;
  std::atomic<int> made = 0;
  std::barrier start(8);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, device = i % 4] {
      start.arrive_and_wait();
      EXPECT_EQ(values.get(device, [&] { return ++made, 100 + device; }), 100 + device);
    });
  threads.clear();
  EXPECT_EQ(made, 4);
  EXPECT_EQ(values.get(3, [] { return -1; }), 103);
}

TEST_F(DeviceTest, NothingIsNothing) {
  Upload upload(1);
  const Stream consumer;
  EXPECT_EQ(upload.bring(one_row(nullptr, 100), consumer), nullptr);
  EXPECT_EQ(upload.bring(one_row(&upload, 0), consumer), nullptr);
}

TEST_F(DeviceTest, AReportNamesTheGpu) {
  EXPECT_NE(gpu_report(0).find("NVIDIA"), std::string::npos) << gpu_report(0);
  EXPECT_EQ(gpu_report(99), "not reachable");
}

}  // namespace
}  // namespace perigee

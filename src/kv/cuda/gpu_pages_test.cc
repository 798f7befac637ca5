// A GPU's pages against the host's: any layout to any other, through the host and by areas of another process.
#include "kv/cuda/gpu_pages.h"

#include <fmt/core.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "kv/page_store_testing.h"
#include "kv/shared_area.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

std::shared_ptr<uint8_t[]> device_memory_of(size_t bytes) {
  const auto buffer = std::make_shared<Buffer>(device_buffer(bytes));
  return {buffer, buffer->data()};
}

TestMemory gpu_memory(const std::shared_ptr<PageMemory>& pages) {
  return {.pages = pages, .make = device_memory_of, .copy = device_copy};
}

class GpuPages : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
    auto made = make_gpu_pages({.most_unit_bytes = kTestUnitBytes, .num_areas = 1});
    ASSERT_TRUE(made.ok()) << made.error().message;
    pages_ = *made;
  }
  TestMemory memory() const { return gpu_memory(pages_); }
  std::shared_ptr<PageMemory> pages_;
};

TEST_F(GpuPages, AnyLayoutToAnyLayout) {
  for (const auto& [tp, dcp] : kTestLayouts)
    for (const auto& [to_tp, to_dcp] : {kTestLayouts[0], kTestLayouts[2], kTestLayouts[4]}) {
      SCOPED_TRACE(str_cat(tp, "/", dcp, " to ", to_tp, "/", to_dcp));
      expect_exchange(TestNode(tp, dcp, 5, 1, memory()), TestNode(to_tp, to_dcp, 5, 2, memory()));
      expect_exchange(TestNode(tp, dcp, 5, 1, memory()), TestNode(to_tp, to_dcp, 5, 2));
      expect_exchange(TestNode(to_tp, to_dcp, 5, 2), TestNode(tp, dcp, 5, 1, memory()));
    }
}

TEST_F(GpuPages, NeighboursAndOtherPagesStayAsTheyAre) {
  expect_poison_where_units_are(TestNode(2, 2, 3, 1, memory()));
}

// More than one piece of staging, from several threads, to places in reverse order.
TEST_F(GpuPages, ManyUnitsAtATimeFromSeveralThreads) {
  constexpr int64_t kUnitBytes = 200 << 10;
  constexpr size_t kCount = 300, kThreads = 6;
  const Buffer memory = device_buffer(kCount * kUnitBytes);
  const std::vector<uint8_t> bytes = random_bytes(kCount * kUnitBytes);
  std::vector<UnitRun> runs;
  for (size_t i = 0; i < kCount; ++i)
    runs.push_back({memory.data() + (kCount - 1 - i) * kUnitBytes, static_cast<int64_t>(i) * kUnitBytes});
  const auto part_of = [&](size_t thread) {
    return std::span(runs).subspan(thread * kCount / kThreads, kCount / kThreads);
  };
  std::vector<uint8_t> out(bytes.size());
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      EXPECT_TRUE(pages_->poison(part_of(t), kUnitBytes).ok());
      EXPECT_TRUE(pages_->scatter(part_of(t), kUnitBytes, bytes).ok());
      EXPECT_TRUE(pages_->gather(part_of(t), kUnitBytes, out).ok());
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(out == bytes);
}

TEST_F(GpuPages, AreasAreLimitedAndComeBack) {
  auto area = pages_->give_area();
  ASSERT_TRUE(area.ok()) << area.error().message;
  EXPECT_EQ(pages_->give_area().error().code, Code::kUnavailable) << "there is one";
  area->reset();
  EXPECT_TRUE(pages_->give_area().ok());
  EXPECT_EQ(pages_->map_area(std::string(64, 'x')).error().code, Code::kUnavailable);
  EXPECT_EQ(pages_->map_area("short").error().code, Code::kUnavailable);
  EXPECT_TRUE(device_status().ok()) << "a handle that is none is no failure of the GPU";
}

// The other side of the next test, in a process of its own: takes the units of one slot, and prints their digests and
// its own.
constexpr const char* kHandle = "PERIGEE_TEST_AREA";
constexpr int64_t kAreaUnitBytes = 100 << 10;
constexpr size_t kAreaUnits = 64;

std::vector<UnitRun> area_runs(const Buffer& memory) {
  std::vector<UnitRun> runs;
  for (size_t i = 0; i < kAreaUnits; ++i)
    runs.push_back({memory.data() + i * kAreaUnitBytes, static_cast<int64_t>(kAreaUnits - 1 - i) * kAreaUnitBytes});
  return runs;
}

TEST_F(GpuPages, OtherProcess) {
  const char* hex = getenv(kHandle);
  if (hex == nullptr) return;  // it is the other side of the next test alone
  std::string handle;
  for (size_t i = 0; i < 64; ++i)
    handle.push_back(static_cast<char>(std::stoi(std::string(hex + 2 * i, 2), nullptr, 16)));
  const auto mapped = pages_->map_area(handle);
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  const Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  std::vector<uint64_t> digests(kAreaUnits);
  (*mapped)->begin(2, area_runs(memory), kAreaUnitBytes);
  ASSERT_TRUE((*mapped)->wait(2, digests).ok());
  std::vector<uint8_t> here(memory.size());
  device_copy(here.data(), memory.data(), here.size());
  EXPECT_TRUE(here == random_bytes(here.size()));
  for (size_t i = 0; i < kAreaUnits; ++i)
    EXPECT_EQ(digests[i], unit_digest(std::span(here).subspan(i * kAreaUnitBytes, kAreaUnitBytes)));
}

TEST_F(GpuPages, StagedUnitsHaveTheDigestsOfTheHost) {
  const Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  const std::vector<uint8_t> bytes = random_bytes(memory.size());
  device_copy(memory.data(), bytes.data(), bytes.size());
  const auto area = pages_->give_area();
  ASSERT_TRUE(area.ok());
  std::vector<uint64_t> digests(kAreaUnits);
  (*area)->begin(2, area_runs(memory), kAreaUnitBytes);
  ASSERT_TRUE((*area)->wait(2, digests).ok());
  for (size_t i = 0; i < kAreaUnits; ++i)
    EXPECT_EQ(digests[i], unit_digest(std::span(bytes).subspan(i * kAreaUnitBytes, kAreaUnitBytes)));
}

TEST_F(GpuPages, AnotherProcessTakesUnitsFromAnArea) {
  const Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  const std::vector<uint8_t> bytes = random_bytes(memory.size());
  device_copy(memory.data(), bytes.data(), bytes.size());
  const auto area = pages_->give_area();
  ASSERT_TRUE(area.ok());
  std::vector<uint64_t> digests(kAreaUnits);
  (*area)->begin(2, area_runs(memory), kAreaUnitBytes);
  ASSERT_TRUE((*area)->wait(2, digests).ok());
  std::string hex;
  for (const char c : (*area)->handle()) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  setenv(kHandle, hex.c_str(), 1);
  std::string program = "/proc/self/exe", filter = "--gtest_filter=GpuPages.OtherProcess";
  char* const arguments[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  unsetenv(kHandle);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace perigee

// A GPU's pages against the host's: any layout to any other, through the host and by areas of another process.
#include "kv/cuda/gpu_pages.h"

#include <fmt/core.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
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
    auto made = make_gpu_pages({.most_unit_bytes = kTestUnitBytes, .areas = {.given = 1, .reads = true}});
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
      for (const TestDraft draft : {TestDraft::kLatents, TestDraft::kHeads})
        expect_exchange(TestNode(tp, dcp, 5, 1, memory(), draft), TestNode(to_tp, to_dcp, 5, 2, memory(), draft));
    }
}

TEST_F(GpuPages, NeighboursAndOtherPagesStayAsTheyAre) {
  expect_poison_where_units_are(TestNode(2, 2, 3, 1, memory()));
  expect_poison_where_units_are(TestNode(2, 2, 3, 1, memory(), TestDraft::kHeads));
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

constexpr int64_t kAreaUnitBytes = 100 << 10;
constexpr size_t kAreaUnits = 64;
constexpr int kGood = 42;  // exit code of the other side of a test, in a process of its own

std::vector<UnitRun> area_runs(const Buffer& memory) {
  std::vector<UnitRun> runs;
  for (size_t i = 0; i < kAreaUnits; ++i)
    runs.push_back({memory.data() + i * kAreaUnitBytes, static_cast<int64_t>(kAreaUnits - 1 - i) * kAreaUnitBytes});
  return runs;
}

// Memory with random units, staged in slot 2 of an area.
struct Staged {
  explicit Staged(PageMemory& pages) : area(std::move(pages.give_area()).value()) {
    device_copy(memory.data(), bytes.data(), bytes.size());
    area->begin(2, area_runs(memory), kAreaUnitBytes);
    EXPECT_TRUE(area->wait(2, digests).ok());
  }
  Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  std::vector<uint8_t> bytes = random_bytes(memory.size());
  std::unique_ptr<SharedArea> area;
  std::vector<uint64_t> digests = std::vector<uint64_t>(kAreaUnits);
};

uint64_t digest_on_host(const std::vector<uint8_t>& bytes, size_t unit) {
  return unit_digest(std::span(bytes).subspan(unit * kAreaUnitBytes, kAreaUnitBytes));
}

TEST_F(GpuPages, StagedUnitsHaveTheDigestsOfTheHost) {
  const Staged staged(*pages_);
  for (size_t i = 0; i < kAreaUnits; ++i) EXPECT_EQ(staged.digests[i], digest_on_host(staged.bytes, i));
}

// A process that runs another test of this program; `input` is its standard input, what it prints first is `line`.
class Other {
 public:
  Other(const char* test, const std::string& input) {
    int in[2], out[2];
    CHECK(pipe(in) == 0 && pipe(out) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDERR_FILENO);
    for (const int fd : {in[1], out[0]}) posix_spawn_file_actions_addclose(&actions, fd);
    std::string program = "/proc/self/exe", filter = str_cat("--gtest_filter=GpuPages.DISABLED_", test),
                disabled = "--gtest_also_run_disabled_tests";
    char* const arguments[] = {program.data(), filter.data(), disabled.data(), nullptr};
    CHECK(posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    CHECK(write(in[1], input.data(), input.size()) == std::ssize(input));
    close(in[1]);
    from_ = out[0];
  }
  ~Other() { close(from_); }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;
  std::string line() const {
    std::string text;
    for (char byte = 0; read(from_, &byte, 1) == 1 && byte != '\n';) text.push_back(byte);
    return text;
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  int wait() const {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return status;
  }

 private:
  pid_t pid_ = 0;
  int from_ = -1;
};

std::string hex_of(const std::string& bytes) {
  std::string hex;
  for (const char c : bytes) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return hex;
}
std::string bytes_of(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

// Takes the units of a slot that the other process has staged.
TEST_F(GpuPages, DISABLED_Reader) {
  std::string hex;
  std::getline(std::cin, hex);
  const auto mapped = pages_->map_area(bytes_of(hex));
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  const Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  std::vector<uint64_t> digests(kAreaUnits);
  (*mapped)->begin(2, area_runs(memory), kAreaUnitBytes);
  ASSERT_TRUE((*mapped)->wait(2, digests).ok());
  std::vector<uint8_t> here(memory.size());
  device_copy(here.data(), memory.data(), here.size());
  ASSERT_TRUE(here == random_bytes(here.size()));
  for (size_t i = 0; i < kAreaUnits; ++i) ASSERT_EQ(digests[i], digest_on_host(here, i));
  _exit(kGood);
}

TEST_F(GpuPages, AnotherProcessTakesUnitsFromAnArea) {
  const Staged staged(*pages_);
  const Other reader("Reader", hex_of(staged.area->handle()) + "\n");
  const int status = reader.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kGood) << status;
}

// Shows an area and waits for its end.
TEST_F(GpuPages, DISABLED_Giver) {
  const Staged staged(*pages_);
  const std::string line = "area " + hex_of(staged.area->handle()) + "\n";
  ASSERT_EQ(write(STDERR_FILENO, line.data(), line.size()), std::ssize(line));
  sleep(60);
}

// Its memory stays until it is unmapped here, and this GPU goes on.
TEST_F(GpuPages, AProcessMayDieWhileItsAreaIsRead) {
  const Other giver("Giver", "");
  std::string line = giver.line();
  while (!line.empty() && !line.starts_with("area ")) line = giver.line();
  auto mapped = pages_->map_area(bytes_of(line.substr(std::min<size_t>(line.size(), 5))));
  ASSERT_TRUE(mapped.ok()) << mapped.error().message;
  const Buffer memory = device_buffer(kAreaUnits * kAreaUnitBytes);
  std::vector<uint64_t> digests(kAreaUnits);
  const std::vector<uint8_t> bytes = random_bytes(memory.size());
  std::thread kills([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    giver.kill();
    EXPECT_TRUE(WIFSIGNALED(giver.wait()));
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(600);
  int64_t copies = 0;
  for (; std::chrono::steady_clock::now() < end && !HasFailure(); ++copies) {
    (*mapped)->begin(2, area_runs(memory), kAreaUnitBytes);
    ASSERT_TRUE((*mapped)->wait(2, digests).ok()) << "after " << copies;
    for (size_t i = 0; i < kAreaUnits; ++i) ASSERT_EQ(digests[i], digest_on_host(bytes, i)) << "after " << copies;
  }
  kills.join();
  mapped->reset();
  EXPECT_GT(copies, 20);
  EXPECT_TRUE(device_status().ok());
  const TestNode node(1, 1, 5, 1, gpu_memory(pages_));
  expect_exchange(node, TestNode(1, 1, 5, 2));
}

}  // namespace
}  // namespace perigee
